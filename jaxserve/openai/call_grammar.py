"""The grammar of a request's calls: which tools, how strictly, and what may stand instead."""

from jaxserve.errors import InvalidRequestError
from jaxserve.guided.calls import AnswerSpec, CallMarks, CallsSource, CallTool, Strictness
from jaxserve.guided.tables import GrammarSpec
from jaxserve.openai.guided import refuse_inexact
from jaxserve.openai.tools import Tool, ToolUse


def calls_spec(
    use: ToolUse,
    marks: CallMarks | None,
    *,
    strict_by_default: bool,
    gives_up: bool = False,
    answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar of the calls that may or must be made, or of an answer instead.

    Where a call is not forced, and a token opens it, the grammar is that of what follows the token.
    `gives_up`: schemas that need not hold are left out, and counted as such.

    Raises:
        InvalidRequestError: a schema that has to hold is not read exactly.
    """
    by_default: Strictness = "always" if use.must_call else "if_possible"
    if not strict_by_default:
        by_default = "never"
    elif gives_up:
        by_default = "given_up"
    source = CallsSource(
        tools=tuple(_call_tool(tool, by_default) for tool in use.offered),
        marks=marks,
        is_opened=not use.must_call and answer is None and marks is not None,
        repeats=use.max_calls != 1,
        answer=None if answer is None else AnswerSpec(answer.kind, answer.source, answer.compact),
    )
    return GrammarSpec(kind="calls", source=source.text(), num_schemas=len(source.tools))


def _call_tool(tool: Tool, by_default: Strictness) -> CallTool:
    strictness = by_default
    if tool.is_strict is not None:
        strictness = "always" if tool.is_strict else "never"
    if strictness not in ("given_up", "never"):
        try:
            refuse_inexact(tool.parameters, tool.path)
        except InvalidRequestError:
            if strictness == "always":
                raise
            strictness = "given_up"
    if strictness in ("given_up", "never"):
        return CallTool(tool.name, {}, strictness)
    # Without parameters a tool takes none; with some, arguments are an object, said or not.
    parameters = {"type": "object", **(tool.parameters or {"properties": {}})}
    return CallTool(tool.name, parameters, strictness)

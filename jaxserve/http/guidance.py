"""What an answer has to be: the grammar of a request, of its calls, and what may go before either.

Event loop only.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, SchemaError
from jaxserve.guided.tables import GrammarSpec
from jaxserve.guided.triggered import Forced, Opening, Thought, Trigger
from jaxserve.http.answer_parts import TurnPlan
from jaxserve.http.grammars import Grammars, naming, of_model
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.call_grammar import calls_spec
from jaxserve.openai.guided import GrammarRequest
from jaxserve.openai.requests import GrammarCheckRequest
from jaxserve.openai.tools import ToolUse
from jaxserve.text.markers import Markers, call_marks
from jaxserve.types import Grammar

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """What holds of an answer from its beginning, and of what follows a thought of it.

    The latter is `spec` with `openings` before it.
    """

    whole: Grammar
    behind_thought: Grammar
    spec: GrammarSpec
    openings: tuple[Opening, ...] = ()


async def answer_grammar(
    grammars: Grammars | None,
    asked: GrammarRequest | None,
    plan: TurnPlan | None,
    prompt_ids: Sequence[int],
) -> AnswerGrammar | None:
    """Return what an answer has to be; None: anything.

    Raises:
        SchemaError: that can't be enforced.
        UnsupportedFieldError: this server has no grammars.
    """
    if plan is not None and plan.tool_use.offered:
        return await _with_calls(grammars, asked, plan, prompt_ids)
    if asked is None:
        return None
    with naming(asked.param):
        return await _behind_thought(of_model(grammars, asked.param), asked.spec, plan, prompt_ids)


async def _with_calls(
    grammars: Grammars | None,
    asked: GrammarRequest | None,
    plan: TurnPlan,
    prompt_ids: Sequence[int],
) -> AnswerGrammar | None:
    use, markers = plan.tool_use, plan.markers
    if use.must_call:
        known = of_model(grammars, "tool_choice")
        marks = call_marks(markers, known.marks)
        spec = calls_spec(use, marks, strict_by_default=plan.strict_by_default)
        with naming_tool(use):
            return await _behind_thought(known, spec, plan, prompt_ids)
    if asked is not None:
        known = of_model(grammars, asked.param)
        with naming(asked.param):
            await known.prepare(asked.spec)  # what is wrong with it is no tool's fault
        try:
            return await _loosely(known, plan, prompt_ids, asked.spec)
        except SchemaError as error:
            raise InvalidRequestError(
                f"{asked.param} and tools cannot both be held: {error.message}",
                param=asked.param,
                code=error.code,
            ) from error
    if markers is None or grammars is None:
        return None  # no token tells that a call begins
    try:
        return await _loosely(grammars, plan, prompt_ids, None)
    except SchemaError as error:
        if any(tool.is_strict for tool in use.offered):
            raise
        logger.warning("calls of tools are not held to their syntax: %s", error.message)
        return None


async def _loosely(
    grammars: Grammars, plan: TurnPlan, prompt_ids: Sequence[int], answer: GrammarSpec | None
) -> AnswerGrammar:
    """Return what an answer with or without calls has to be, by the syntax alone if need be."""
    use, markers = plan.tool_use, plan.markers
    gives_up = False
    while True:
        marks = call_marks(markers, grammars.marks)
        spec = calls_spec(
            use,
            marks,
            strict_by_default=plan.strict_by_default,
            gives_up=gives_up,
            answer=answer,
        )
        try:
            with naming_tool(use):
                if answer is not None or markers is None:
                    return await _behind_thought(grammars, spec, plan, prompt_ids)
                trigger = Trigger(markers.call_start)
                grammar = await grammars.prepare(spec, trigger)
                return AnswerGrammar(
                    whole=grammar, behind_thought=grammar, spec=spec, openings=(trigger,)
                )
        except SchemaError as error:
            is_strict = any(tool.is_strict for tool in use.offered)
            if gives_up or is_strict or not plan.strict_by_default:
                raise
            logger.warning("calls of tools are not held to their schemas: %s", error.message)
            gives_up = True


async def _behind_thought(
    grammars: Grammars, spec: GrammarSpec, plan: TurnPlan | None, prompt_ids: Sequence[int]
) -> AnswerGrammar:
    """Let a thought go before a grammar where the prompt has begun one, or asks for one."""
    behind = await grammars.prepare(spec)
    opening: Opening | None = None
    if plan is not None and plan.markers is not None:
        markers = plan.markers
        if plan.is_in_thought(prompt_ids):
            opening = Thought(markers.thought_end, None)
        elif plan.thinks:
            opening = Thought(markers.thought_end, markers.thought_start)
    if opening is None:
        return AnswerGrammar(whole=behind, behind_thought=behind, spec=spec)
    whole = await grammars.prepare(spec, opening)
    return AnswerGrammar(whole=whole, behind_thought=behind, spec=spec)


async def forced_closers(
    grammars: Grammars | None, grammar: AnswerGrammar | None, closers: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], Grammar]:
    """Return by the ids that close a thought: these, and then what holds of what follows.

    Raises:
        UnsupportedFieldError: this server has no grammars.
    """
    known = of_model(grammars, "thinking_token_budget")
    spec, openings = (grammar.spec, grammar.openings) if grammar else (None, ())
    return {ids: await known.prepare(spec, *openings, Forced(ids)) for ids in closers}


@contextmanager
def naming_tool(use: ToolUse) -> Iterator[None]:
    """Let errors of a tool's schema name the field that it came in."""
    try:
        yield
    except SchemaError as error:
        index = (error.path or "/").split("/")[1]  # as guided.calls names a tool's place
        if index.isdecimal():
            error.param = use.offered[int(index)].path
        else:
            error.param = "tool_choice" if use.must_call else "tools"
        raise


async def check_grammar(request: GrammarCheckRequest, model: ServedModel) -> dict[str, object]:
    """Tell what a grammar compiles to, and what it says of texts; raises as `answer_grammar`."""
    if request.grammar is not None:
        with naming(request.grammar.param):
            grammars = of_model(model.grammars, request.grammar.param)
            return await grammars.check(request.grammar.spec, request.texts)
    grammars, markers = of_model(model.grammars, "tools"), Markers.find(model.tokenizer)
    spec = calls_spec(request.tool_use, call_marks(markers, grammars.marks), strict_by_default=True)
    with naming_tool(request.tool_use):
        return await grammars.check(spec, request.texts, markers.spellings if markers else None)

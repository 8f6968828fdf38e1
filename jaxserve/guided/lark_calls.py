"""Calls of tools as a grammar for the host, where they have no tables."""

import json

from jaxserve.errors import SchemaError
from jaxserve.guided.calls import ANY_OBJECT, CallsSource, naming_tool
from jaxserve.guided.cases import Cases
from jaxserve.guided.conditions import Literal
from jaxserve.guided.document import Document
from jaxserve.guided.lark import LarkWriter
from jaxserve.guided.lark_spelling import JsonSpelling, MarkedSpelling, Spelling, quoted
from jaxserve.guided.vocabulary import GrammarVocabulary


def lark_of_calls(
    source: CallsSource, vocabulary: GrammarVocabulary
) -> tuple[str, tuple[str, ...]]:
    """Return the grammar of calls, and the names of tools whose schemas it does not hold.

    Raises:
        SchemaError: a schema that always has to hold cannot be enforced there.
    """
    ids = {mark: token_id for token_id, mark in vocabulary.marks.items()}

    def spelled(text: str) -> str:
        return f"<[{ids[text]}]>" if text in ids else json.dumps(text)

    spelling: Spelling = JsonSpelling(spaces=1)
    if source.marks is not None:
        spelling = MarkedSpelling(ids[source.marks.delimiter])
    calls, rules, loosened = [], [], []
    for index, tool in enumerate(source.tools):
        is_free = tool.strictness in ("given_up", "never")
        schema = ANY_OBJECT if is_free else tool.parameters
        try:
            with naming_tool(index, tool.name):
                name, lines = _arguments(schema, spelling, f"t{index}")
            if tool.strictness == "given_up":
                loosened.append(tool.name)
        except SchemaError:
            if tool.strictness == "always":
                raise
            loosened.append(tool.name)
            name, lines = _arguments(ANY_OBJECT, spelling, f"t{index}")
        calls.append(f"{quoted(source.head(tool.name))} {name}")
        rules += lines
    call = f"call: ({' | '.join(calls)}) {spelled(source.closer)}"
    if source.is_opened:
        start = "start: call"
    else:
        more = f" ({spelled(source.separator + source.opener)} call)*" if source.repeats else ""
        start = f"start: {spelled(source.opener)} call{more}"
    return "\n".join([start, call, *spelling.separators, *rules]) + "\n", tuple(loosened)


def _arguments(schema: object, spelling: Spelling, prefix: str) -> tuple[str, list[str]]:
    cases = Cases(Document(json.dumps(schema)))
    return LarkWriter(cases, spelling, prefix=prefix).objects(cases.key(Literal("")))

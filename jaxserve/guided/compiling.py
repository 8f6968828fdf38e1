"""From a grammar's source to tables, or to text for a matcher on the host.

Pure and slow: a worker process calls it, with a limit of time and memory.
"""

import json
from collections.abc import Callable
from dataclasses import replace

from jaxserve.errors import SchemaError
from jaxserve.guided import regex
from jaxserve.guided.automaton import AutomatonTooLargeError, Dfa
from jaxserve.guided.calls import CallAutomata, CallsSource
from jaxserve.guided.cases import Cases
from jaxserve.guided.composing import literals
from jaxserve.guided.conditions import Literal
from jaxserve.guided.document import MAX_ENUM_VALUES, MAX_SCHEMA_BYTES, Document
from jaxserve.guided.endings import nothing_fits
from jaxserve.guided.host import check_grammar
from jaxserve.guided.json_automaton import JsonAutomata, NeedsStackError
from jaxserve.guided.lark import LarkWriter, lark_of_choices, lark_of_expression
from jaxserve.guided.lark_calls import lark_of_calls
from jaxserve.guided.lark_spelling import JsonSpelling
from jaxserve.guided.notation import JsonNotation
from jaxserve.guided.tables import (
    Grammar,
    GrammarSpec,
    HostGrammar,
    TablesTooLargeError,
    TokenTables,
)
from jaxserve.guided.token_tables import token_tables
from jaxserve.guided.vocabulary import FIRST_MARK, GrammarVocabulary

COMPILER_VERSION = 2
"""Of what tables a source gives: raise it, and cached ones are not used again."""

MAX_TABLE_BYTES = 32 << 20
"""Of `next_SC` and `masks_DW` together; larger grammars run on the host."""

MAX_CALL_TABLE_BYTES = 64 << 20
MAX_CALL_STATES = 20_000
"""The same of calls, which all requests of an agent share, and the states that fit it mostly."""

_LESS = 0.7
"""States that are left for another try where they did not."""

ANY_OBJECT = '{"type": "object"}'

TOO_LARGE_FOR_TABLES = (NeedsStackError, AutomatonTooLargeError, TablesTooLargeError)


def compile_grammar(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Grammar:
    """Return the tables of a grammar, or its text for the host where it cannot have any.

    Raises:
        SchemaError: it is malformed, cannot be enforced, or is too complex.
    """
    if len(spec.source.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
        raise SchemaError(
            f"the grammar has more than {MAX_SCHEMA_BYTES} bytes", code="schema_too_complex"
        )
    if spec.kind == "lark":
        return _host(spec.source, "a grammar in Lark's form needs a stack")
    if spec.kind == "calls":
        return _compile_calls(CallsSource.read(spec.source), vocabulary)
    automaton, text = _languages(spec)
    try:
        return _tables(automaton(), vocabulary)
    except TOO_LARGE_FOR_TABLES as error:
        return _host(text(), _reason(error))


def _languages(spec: GrammarSpec) -> tuple[Callable[[], Dfa], Callable[[], str]]:
    """Return what makes a spec's automaton, and its text for the host."""
    if spec.kind in ("json_schema", "json_object"):
        cases = Cases(Document(spec.source if spec.kind == "json_schema" else ANY_OBJECT))
        root = cases.key(Literal(""))
        notation = JsonNotation(spaces=0 if spec.compact else None)
        return (
            lambda: JsonAutomata(cases, notation).value(root),
            lambda: LarkWriter(cases, JsonSpelling(notation.spaces)).grammar(root),
        )
    if spec.kind == "regex":
        return lambda: regex.full_match(spec.source), lambda: lark_of_expression(spec.source)
    choices = _choices(spec.source)
    return (
        lambda: literals(choice.encode() for choice in choices),
        lambda: lark_of_choices(choices),
    )


def _compile_calls(source: CallsSource, vocabulary: GrammarVocabulary) -> Grammar:
    answer = None
    if source.answer is not None and source.answer.kind == "lark":
        raise SchemaError(
            "an answer that has to follow a grammar in Lark's form does not go with tools",
            code="unsupported_schema",
        )
    try:
        if source.answer is not None:
            answer = _languages(GrammarSpec(**source.answer._asdict()))[0]()
        automata = CallAutomata(source)
        automata.loosen(MAX_CALL_STATES)
        while True:
            try:
                tables = _tables(automata.whole(answer), vocabulary, MAX_CALL_TABLE_BYTES)
            except TOO_LARGE_FOR_TABLES:
                if not automata.loosen(int(automata.num_states * _LESS)):
                    raise
            else:
                return replace(tables, loosened=automata.loosened)
    except TOO_LARGE_FOR_TABLES as error:
        if source.answer is not None:
            raise SchemaError(
                "an answer that has to follow a grammar goes with tools only where both have"
                f" tables; {_reason(error)}",
                code="schema_too_complex",
            ) from error
        return host_calls(source, vocabulary, _reason(error))


def host_calls(source: CallsSource, vocabulary: GrammarVocabulary, reason: str) -> HostGrammar:
    """Return calls as a grammar for the host.

    Raises:
        SchemaError: a schema that always has to hold cannot be enforced there.
    """
    text, loosened = lark_of_calls(source, vocabulary)
    return replace(_host(text, reason), loosened=loosened)


def _choices(source: str) -> list[str]:
    """Read a JSON list of texts."""
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise SchemaError(f"the choices are not JSON: {error}") from error
    if not isinstance(choices, list) or not all(isinstance(x, str) and x for x in choices):
        raise SchemaError("the choices must be a list of strings, none of them empty")
    if not 0 < len(choices) <= MAX_ENUM_VALUES:
        raise SchemaError(f"there must be 1 to {MAX_ENUM_VALUES} choices")
    for choice in choices:
        if any(0xD800 <= ord(char) < 0xE000 or ord(char) >= FIRST_MARK for char in choice):
            raise SchemaError(f"the choice {choice!r} has characters that cannot be written")
    return choices


def _tables(
    automaton: Dfa, vocabulary: GrammarVocabulary, max_bytes: int = MAX_TABLE_BYTES
) -> TokenTables:
    if automaton.is_empty:
        raise nothing_fits()
    return token_tables(automaton, vocabulary, max_bytes)


def _reason(error: Exception) -> str:
    if isinstance(error, NeedsStackError):
        return "the schema contains itself"
    return "its tables would be too large"


def _host(text: str, reason: str) -> HostGrammar:
    grammar = HostGrammar(text=text, reason=reason)
    check_grammar(grammar)
    return grammar

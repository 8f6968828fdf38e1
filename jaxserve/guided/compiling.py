"""From a grammar's source to tables, or to text for a matcher on the host.

Pure and slow: a worker process calls it, with a limit of time and memory.
"""

import json
from collections.abc import Callable

from jaxserve.errors import SchemaError
from jaxserve.guided import regex
from jaxserve.guided.automaton import AutomatonTooLargeError, Dfa
from jaxserve.guided.cases import Cases
from jaxserve.guided.composing import literals
from jaxserve.guided.conditions import Literal
from jaxserve.guided.document import MAX_ENUM_VALUES, MAX_SCHEMA_BYTES, Document
from jaxserve.guided.endings import nothing_fits
from jaxserve.guided.host import check_grammar
from jaxserve.guided.json_automaton import JsonAutomata, NeedsStackError
from jaxserve.guided.lark import LarkWriter, lark_of_choices, lark_of_expression
from jaxserve.guided.tables import Grammar, GrammarSpec, HostGrammar
from jaxserve.guided.token_tables import TablesTooLargeError, token_tables
from jaxserve.guided.vocabulary import FIRST_MARK, GrammarVocabulary

COMPILER_VERSION = 1
"""Of what tables a source gives: raise it, and cached ones are not used again."""

MAX_TABLE_BYTES = 32 << 20
"""Of `next_SC` and `masks_DW` together; larger grammars run on the host."""

ANY_OBJECT = '{"type": "object"}'


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
    if spec.kind in ("json_schema", "json_object"):
        return _compile_schema(spec, vocabulary)
    if spec.kind == "regex":
        return _tables_or_host(
            lambda: regex.full_match(spec.source),
            vocabulary,
            lambda: lark_of_expression(spec.source),
        )
    choices = _choices(spec.source)
    return _tables_or_host(
        lambda: literals(choice.encode() for choice in choices),
        vocabulary,
        lambda: lark_of_choices(choices),
    )


def _compile_schema(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Grammar:
    document = Document(spec.source if spec.kind == "json_schema" else ANY_OBJECT)
    cases = Cases(document)
    root = cases.key(Literal(""))
    return _tables_or_host(
        lambda: JsonAutomata(cases, compact=spec.compact).value(root),
        vocabulary,
        lambda: LarkWriter(cases, compact=spec.compact).grammar(root),
    )


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


def _tables_or_host(
    make_automaton: Callable[[], Dfa],
    vocabulary: GrammarVocabulary,
    make_text: Callable[[], str],
) -> Grammar:
    try:
        automaton = make_automaton()
        if automaton.is_empty:
            raise nothing_fits()
        return token_tables(automaton, vocabulary, MAX_TABLE_BYTES)
    except NeedsStackError:
        reason = "the schema contains itself"
    except (AutomatonTooLargeError, TablesTooLargeError):
        reason = f"its tables would take more than {MAX_TABLE_BYTES} bytes"
    return _host(make_text(), reason)


def _host(text: str, reason: str) -> HostGrammar:
    grammar = HostGrammar(text=text, reason=reason)
    check_grammar(grammar)
    return grammar

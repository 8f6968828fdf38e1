"""Forced texts have one way through the tables, the tokenizer's; all else is as it was."""

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.composing import literals
from jaxserve.guided.forced import MAX_FORCED_BYTES, CanonicalTables, canonical
from jaxserve.guided.guide import TablesGuide
from jaxserve.guided.tables import GrammarKind, GrammarSpec, TokenTables
from jaxserve.guided.token_tables import token_tables
from jaxserve.guided.triggered import triggered
from tests.grammars import (
    CONTROL_ID,
    distances,
    ids_of,
    longest_first,
    random_walk,
    spelled,
    tiny_vocabulary,
)

VOCABULARY = tiny_vocabulary()
NAME = '{"properties": {"name": {"type": "boolean"}}, "required": ["name"], "type": "object"}'
SCHEMAS = [
    NAME,
    '{"enum": ["the kind", "the name", "abc"]}',
    '{"const": {"kind": "日本 abc the é", "name": [1, 12, null, true]}}',
    '{"type": "object", "properties": {"kind": {"enum": ["é", "è"]}, "abc": {"type": "integer"},'
    ' "name": {"type": "array", "items": {"enum": ["the kind", "ab"]}, "minItems": 1}}}',
    '{"anyOf": [{"const": "the name"}, {"const": "the"}, {"type": "null"}]}',
]


def encode(text: str) -> list[int]:
    return longest_first(VOCABULARY, text)


def compiled(source: str, kind: GrammarKind = "json_schema") -> TokenTables:
    spec = GrammarSpec(kind=kind, source=source, compact=kind == "json_schema")
    tables = compile_grammar(spec, VOCABULARY)
    assert isinstance(tables, TokenTables)
    return tables


def chain(made: CanonicalTables, limit: int = 1000) -> Sequence[int]:
    return TablesGuide(made.tables, forced_id_S=made.id_S).forced_ids(limit)


def allowed(tables: TokenTables, state: int) -> set[int]:
    return ids_of(tables.masks_DW[tables.mask_id_S[state]])


def test_forced_text_is_written_as_the_tokenizer_does_but_for_its_last_token() -> None:
    tables = compiled(NAME)
    assert tables.forced_bytes(0, 99) == b'{"name":'
    assert tables.forced_bytes(0, 3) == b'{"n'
    made = canonical(tables, encode)
    assert chain(made) == encode('{"name":')[:-1]
    assert chain(made, limit=1) == encode('{"name":')[:1]
    after = 0
    for token_id in chain(made):
        assert allowed(made.tables, after) == {token_id}
        after = made.tables.advance(after, token_id)
    # `":` could be one token with what follows.
    assert len(allowed(made.tables, after)) > 1


def test_forced_text_up_to_the_end_is_written_whole() -> None:
    assert spelled(VOCABULARY, chain(canonical(compiled('["the null"]', "choice"), encode))) == (
        "the null"
    )


def test_long_forced_text_is_found_piece_by_piece() -> None:
    text = "the kind, abc; " * (MAX_FORCED_BYTES // 10)
    made = canonical(compiled(json.dumps([text]), "choice"), encode)
    assert chain(made) == encode(text)


@pytest.mark.parametrize("source", SCHEMAS)
def test_all_that_could_be_written_still_can_and_nothing_else(source: str) -> None:
    tables = compiled(source)
    made = canonical(tables, encode)

    rng = random.Random(source)
    for _ in range(30):
        ids = random_walk(made.tables, rng, free_tokens=rng.randrange(12))
        state = 0
        for token_id in ids:
            state = tables.advance(state, token_id)
        assert tables.accepting_S[state]
        # Any text of the grammar: spelled as the tables want it, it is there.
        text = spelled(VOCABULARY, random_walk(tables, rng, free_tokens=rng.randrange(12)))
        assert _can_write(made.tables, text.encode())
    is_reached_S = distances(tables) < 1 << 20
    assert (distances(made.tables)[is_reached_S & (made.id_S >= 0)] < 1 << 20).all()
    for state in np.flatnonzero(made.id_S >= 0).tolist():
        assert allowed(made.tables, state) == {made.id_S[state]} <= allowed(tables, state)
        assert not tables.accepting_S[state]
    for state in np.flatnonzero(made.id_S < 0).tolist():
        assert allowed(made.tables, state) == allowed(tables, state)


def _can_write(tables: TokenTables, text: bytes) -> bool:
    reached = [{0}, *(set[int]() for _ in text)]
    for start, states in enumerate(reached):
        for state in states:
            for token_id in allowed(tables, state):
                piece = VOCABULARY.token_bytes[token_id]
                if text.startswith(piece, start):
                    reached[start + len(piece)].add(tables.advance(state, token_id))
    return any(tables.accepting_S[state] for state in reached[-1])


def test_an_id_that_stops_the_request_is_not_forced() -> None:
    tables = compiled(NAME)
    brace, name, *_ = encode('{"name":')
    made = canonical(tables, encode, never=[name])
    assert chain(made) == [brace]
    after = made.tables.advance(0, brace)
    assert allowed(made.tables, after) == allowed(tables, after) > {name}
    assert chain(canonical(tables, encode, never=[brace])) == []


def test_a_control_token_of_the_grammar_is_forced_and_what_stands_before_it_whole() -> None:
    text = f"the name{VOCABULARY.marks[CONTROL_ID]}abc"
    made = canonical(token_tables(literals([text.encode()]), VOCABULARY), encode)
    assert chain(made) == [*encode("the name"), CONTROL_ID, *encode("abc")]


def test_free_text_in_front_of_a_grammar_stays_free() -> None:
    tables = triggered(compiled(NAME), CONTROL_ID, vocab_size=VOCABULARY.size)
    made = canonical(tables, encode)
    assert chain(made) == []
    guide = TablesGuide(made.tables, forced_id_S=made.id_S)
    guide.advance(CONTROL_ID)
    assert guide.forced_ids(9) == encode('{"name":')[:-1]

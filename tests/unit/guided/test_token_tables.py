"""Tables over tokens against walking each token's bytes."""

import random

import numpy as np
import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided import regex
from jaxserve.guided.automaton import Dfa
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.composing import literals
from jaxserve.guided.forced import forced_tokens
from jaxserve.guided.json_automaton import any_value
from jaxserve.guided.notation import JsonNotation
from jaxserve.guided.tables import GrammarSpec, TokenTables
from jaxserve.guided.token_tables import token_tables
from jaxserve.guided.vocabulary import GrammarVocabulary
from tests.grammars import CONTROL_ID, END_ID, spelled, tiny_vocabulary, unpacked

VOCABULARY = tiny_vocabulary()


def walked(dfa: Dfa, state: int, text: bytes) -> int:
    end, taken = dfa.walk(text, state)
    return end if text and taken == len(text) else -1


@pytest.mark.parametrize(
    "dfa",
    [
        any_value(1, JsonNotation()),
        regex.full_match("(é|日本)*ab{2,5}"),
        literals([b"true", b"tr", b"trab"]),
    ],
    ids=["json", "regex", "words"],
)
def test_tables_are_what_walking_bytes_says(dfa: Dfa) -> None:
    tables = token_tables(dfa, VOCABULARY)
    rng = random.Random(5)

    for state in rng.sample(range(dfa.num_states), min(dfa.num_states, 60)):
        expected = [walked(dfa, state, text) for text in VOCABULARY.token_bytes]
        assert [tables.advance(state, x) for x in range(VOCABULARY.size)] == expected
        mask = unpacked(tables.masks_DW[tables.mask_id_S[state]], VOCABULARY.size)
        assert mask.tolist() == [x >= 0 for x in expected]
    assert (tables.accepting_S == dfa.accepting_S).all()


def test_control_tokens_and_unused_ids_are_nowhere() -> None:
    tables = token_tables(regex.full_match("(?:.|\n)*"), VOCABULARY)

    for token_id in (END_ID, CONTROL_ID, CONTROL_ID + 1):
        assert tables.class_of_V[token_id] == 0
        assert not tables.allowed_V(0)[token_id]
    assert tables.advance(0, VOCABULARY.size + 5) == -1
    assert tables.allowed_V(0)[257:CONTROL_ID].all()


def test_unused_tokens_are_found_by_name() -> None:
    vocabulary = GrammarVocabulary.build({0: "a", 1: "<unused7>", 2: "[multimodal]", 3: "<mask>"})

    assert vocabulary.token_bytes == (b"a", b"", b"", b"")


def test_a_control_token_is_a_character_that_text_cannot_spell() -> None:
    mark = VOCABULARY.marks[CONTROL_ID]
    tables = token_tables(literals([f"ab{mark}12".encode()]), VOCABULARY)
    state = tables.advance(0, VOCABULARY.token_bytes.index(b"ab"))

    assert np.flatnonzero(tables.allowed_V(state)).tolist() == [CONTROL_ID]
    others = [x for x in range(VOCABULARY.size) if x not in VOCABULARY.marks]
    assert not any(0xF4 in VOCABULARY.token_bytes[token_id] for token_id in others)


def test_without_byte_tokens_no_way_leads_into_a_dead_end() -> None:
    vocabulary = GrammarVocabulary.build({0: "a", 1: "ab", 2: "c"})

    tables = token_tables(literals([b"ax", b"abc", b"c"]), vocabulary)

    assert tables.allowed_V(0).tolist() == [False, True, True]
    with pytest.raises(SchemaError, match="tokens"):
        token_tables(literals([b"ax"]), vocabulary)


def test_masks_are_shared_and_arrays_read_only() -> None:
    tables = token_tables(regex.full_match("[ab]{20}"), VOCABULARY)

    assert len(tables.masks_DW) < len(tables.mask_id_S)
    assert tables.masks_DW.shape[1] == -(-VOCABULARY.size // 32)
    with pytest.raises(ValueError, match="read-only"):
        tables.next_SC[0, 0] = 1


def encode(text: str) -> list[int]:
    """Tokenize by taking the longest token each time."""
    ids, rest = [], text.encode()
    while rest:
        fitting = [x for x, piece in enumerate(VOCABULARY.token_bytes) if piece]
        best = max(
            (x for x in fitting if rest.startswith(VOCABULARY.token_bytes[x])),
            key=lambda x: len(VOCABULARY.token_bytes[x]),
        )
        ids.append(best)
        rest = rest[len(VOCABULARY.token_bytes[best]) :]
    return ids


def compiled(kind: str, source: str) -> TokenTables:
    tables = compile_grammar(GrammarSpec(kind=kind, source=source, compact=True), VOCABULARY)  # type: ignore[arg-type]
    assert isinstance(tables, TokenTables)
    return tables


def test_forced_text_is_drafted_less_its_last_token() -> None:
    schema = '{"properties": {"name": {"type": "boolean"}}, "required": ["name"], "type": "object"}'
    tables = compiled("json_schema", schema)

    assert tables.forced_bytes(0) == b'{"name":'
    assert spelled(VOCABULARY, forced_tokens(tables, 0, encode)) == '{"name'
    after = 0
    for token_id in encode('{"name":'):
        after = tables.advance(after, token_id)
    assert forced_tokens(tables, after, encode) == ()


def test_forced_text_up_to_the_end_is_drafted_whole() -> None:
    assert spelled(VOCABULARY, forced_tokens(compiled("choice", '["the null"]'), 0, encode)) == (
        "the null"
    )

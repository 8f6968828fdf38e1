"""Tables over tokens against walking each token's bytes."""

import random

import numpy as np
import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided import regex
from jaxserve.guided.automaton import Dfa
from jaxserve.guided.composing import literals
from jaxserve.guided.json_values import any_value
from jaxserve.guided.masks import unpacked
from jaxserve.guided.notation import JsonNotation
from jaxserve.guided.token_tables import token_tables
from jaxserve.guided.vocabulary import GrammarVocabulary
from tests.grammars import CONTROL_ID, END_ID, tiny_vocabulary

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
        mask = unpacked(tables.masks_DW[tables.mask_id_S[state]])[: VOCABULARY.size]
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

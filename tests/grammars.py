"""Small vocabularies and ways through grammars, for tests of guided decoding."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.masks import unpacked
from jaxserve.guided.tables import START_STATE, TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary

WORDS = (
    *('{"', '"}', '": ', '":', ', "', '",', '"]', "[]", "{}", '["', '""', "}}", "]}", '"a"'),
    *("true", "false", "null", "tr", "12", "00", "-1", ".5", "e+", "ab", "abc", "the ", " a"),
    *("é", "日本", "🙂", "\\n", "\\u", "d83d", '\\"', "\\\\", "kind", "name", "<table>"),
)
END_ID = 256
FIRST_WORD_ID = 257
CONTROL_ID = FIRST_WORD_ID + len(WORDS)


def tiny_vocabulary() -> GrammarVocabulary:
    """All bytes (ids 0 to 255), an end id, some words, and one more control token."""
    pieces: dict[int, str | int] = {byte: byte for byte in range(256)}
    pieces[END_ID] = "<eos>"
    pieces |= {FIRST_WORD_ID + number: word for number, word in enumerate(WORDS)}
    pieces[CONTROL_ID] = "<|call>"
    return GrammarVocabulary.build(
        pieces, control_ids=(END_ID, CONTROL_ID), vocab_size=CONTROL_ID + 8
    )


def longest_first(vocabulary: GrammarVocabulary, text: str) -> list[int]:
    """Tokenize by taking the longest token each time."""
    id_of = {piece: token_id for token_id, piece in enumerate(vocabulary.token_bytes) if piece}
    ids, rest = [], text.encode()
    while rest:
        length = next(n for n in range(len(rest), 0, -1) if rest[:n] in id_of)
        ids.append(id_of[rest[:length]])
        rest = rest[length:]
    return ids


def ids_of(words_W: NDArray[np.uint32]) -> set[int]:
    """Return the ids that a packed mask has."""
    return set(np.flatnonzero(unpacked(words_W)).tolist())


def distances(tables: TokenTables) -> NDArray[np.int64]:
    """Return how many tokens the shortest way from each state to an end has."""
    far = np.iinfo(np.int32).max
    steps = np.where(tables.accepting_S, 0, far).astype(np.int64)
    while True:
        after = np.append(steps, far)[tables.next_SC].min(axis=1) + 1
        shorter = np.minimum(steps, after)
        if (shorter == steps).all():
            return steps
        steps = shorter


def random_walk(tables: TokenTables, rng: random.Random, *, free_tokens: int) -> list[int]:
    """Return the ids of a text: random ones for a while, then the shortest way to an end."""
    steps = distances(tables)
    state = START_STATE
    ids: list[int] = []
    while True:
        allowed = sorted(ids_of(tables.masks_DW[tables.mask_id_S[state]]))
        if tables.accepting_S[state] and (len(ids) >= free_tokens or not allowed):
            return ids
        if len(ids) >= free_tokens:
            after = steps[tables.next_SC[state, tables.class_of_V[allowed]]]
            allowed = np.asarray(allowed)[after == after.min()].tolist()
        token_id = int(rng.choice(allowed))
        ids.append(token_id)
        state = tables.advance(state, token_id)


def spelled(vocabulary: GrammarVocabulary, ids: Sequence[int]) -> str:
    """Return the text of some ids."""
    return b"".join(vocabulary.token_bytes[token_id] for token_id in ids).decode()

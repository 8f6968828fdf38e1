"""From an automaton over bytes to tables over tokens, for the whole vocabulary at once.

A token is a map of states to states. Maps are made along the tree of all tokens' bytes, level by
level, and equal ones are one: a few hundred are left of a vocabulary of 262,144, and each is a
class of tokens. Exact: maps are compared, not only their hashes.
"""

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import DEAD, Dfa
from jaxserve.guided.tables import TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary

MAX_STATES = 32_767
MAX_CLASSES = 65_535
MAX_MAP_BYTES = 512 << 20


class TablesTooLargeError(Exception):
    """The grammar has more states or classes than tables can hold."""


def token_tables(dfa: Dfa, vocabulary: GrammarVocabulary) -> TokenTables:
    """Return the tables of an automaton.

    Raises:
        TablesTooLargeError: it has too many states, or tokens act in too many ways.
        SchemaError: no text of the language can be written in the vocabulary's tokens.
    """
    if dfa.num_states > MAX_STATES:
        raise TablesTooLargeError
    maps = _Maps(dfa)
    map_V = maps.of_tokens(vocabulary)
    used, class_of_V = np.unique(map_V, return_inverse=True)
    if len(used) > MAX_CLASSES:
        raise TablesTooLargeError
    next_CS = maps.rows(used)
    if used[0] != _Maps.DEAD_MAP:  # class 0 is the one that is allowed nowhere
        next_CS = np.concatenate([np.full_like(next_CS[:1], DEAD), next_CS])
        class_of_V = class_of_V + 1
    next_SC = np.ascontiguousarray(next_CS.T)
    if not vocabulary.spells_all_bytes:
        next_SC = _without_dead_ends(next_SC, dfa.accepting_S)
    forced_byte_S, forced_next_S = _forced(dfa)
    masks, mask_id_S = _masks(next_SC, class_of_V)
    tables = TokenTables(
        class_of_V=class_of_V.astype(np.uint16),
        next_SC=next_SC,
        mask_id_S=mask_id_S,
        masks_DW=masks,
        accepting_S=dfa.accepting_S,
        forced_byte_S=forced_byte_S,
        forced_next_S=forced_next_S,
    )
    for name in TokenTables.__dataclass_fields__:
        getattr(tables, name).flags.writeable = False
    return tables


class _Maps:
    """Maps of states to states, numbered; 0 leads nowhere from everywhere, 1 stays everywhere."""

    DEAD_MAP = 0
    SAME_MAP = 1

    def __init__(self, dfa: Dfa) -> None:
        count = dfa.num_states
        moves = dfa.moves.next_SK
        self._class_of_byte = dfa.moves.class_of_byte
        # One more state, so that DEAD as an index finds DEAD.
        self._move_KS = np.full((moves.shape[1], count + 1), DEAD, np.int16)
        self._move_KS[:, :-1] = moves.T
        self._rows = [np.full(count, DEAD, np.int16), np.arange(count, dtype=np.int16)]
        self._numbers = {row.tobytes(): number for number, row in enumerate(self._rows)}
        # What a map and a byte class make: -1 where nobody asked yet.
        self._made = np.full((1024, moves.shape[1]), -1, np.int32)
        self._made[self.DEAD_MAP] = self.DEAD_MAP

    def of_tokens(self, vocabulary: GrammarVocabulary) -> NDArray[np.int32]:
        """Return each token's map, int32 [V]; DEAD_MAP for ids without text."""
        tree = vocabulary.tree
        map_V = np.full(vocabulary.size, self.DEAD_MAP, np.int32)
        node_maps = np.full(1, self.SAME_MAP, np.int32)
        for depth, level in enumerate(tree.levels):
            parents = node_maps[level.parent_N]
            node_maps = self._follow(parents, self._class_of_byte[level.byte_N])
            ends = np.flatnonzero(tree.level_V == depth)
            map_V[ends] = node_maps[tree.node_V[ends]]
        return map_V

    def rows(self, numbers: NDArray[np.int32]) -> NDArray[np.int16]:
        """Return the maps of some numbers, int16 [C, S]."""
        return np.stack([self._rows[number] for number in numbers.tolist()])

    def _follow(self, maps_N: NDArray[np.int32], classes_N: NDArray[np.intp]) -> NDArray[np.int32]:
        made = self._made[maps_N, classes_N]
        if (made < 0).any():
            num_classes = self._made.shape[1]
            missing = np.unique(
                maps_N[made < 0].astype(np.int64) * num_classes + classes_N[made < 0]
            )
            for pair in missing.tolist():
                self._make(*divmod(pair, num_classes))
            made = self._made[maps_N, classes_N]
        return made

    def _make(self, number: int, byte_class: int) -> None:
        row = self._move_KS[byte_class][self._rows[number]]
        key = row.tobytes()
        made = self._numbers.get(key)
        if made is None:
            made = self._numbers[key] = len(self._rows)
            self._rows.append(row)
            if made * row.nbytes > MAX_MAP_BYTES:
                raise TablesTooLargeError
            if made == len(self._made):
                self._made = np.concatenate([self._made, np.full_like(self._made, -1)])
        self._made[number, byte_class] = made


def _masks(
    next_SC: NDArray[np.int16], class_of_V: NDArray[np.intp]
) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """Return the distinct masks and which of them a state has."""
    allowed_SC = next_SC >= 0
    packed = np.packbits(allowed_SC, axis=1)
    numbers: dict[bytes, int] = {}
    firsts = []
    mask_id_S = np.empty(len(packed), np.int32)
    for state, row in enumerate(packed):
        key = row.tobytes()
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(numbers)
            firsts.append(state)
        mask_id_S[state] = number
    allowed_CD = np.ascontiguousarray(allowed_SC[firsts].T)
    num_words = -(-len(class_of_V) // 32)
    # Bits of the masks side by side for one token are together in allowed_CD: gathered once, and
    # turned by blocks of tokens.
    masks = np.empty((len(firsts), num_words * 4), np.uint8)
    padded = np.zeros(num_words * 32, np.intp)
    padded[: len(class_of_V)] = class_of_V
    block = 32 * 256
    for first in range(0, len(padded), block):
        bits = allowed_CD[padded[first : first + block]]
        masks[:, first // 8 : (first + block) // 8] = np.packbits(bits.T, axis=1, bitorder="little")
    return masks.view("<u4").astype(np.uint32, copy=False), mask_id_S


def _without_dead_ends(
    next_SC: NDArray[np.int16], accepting_S: NDArray[np.bool_]
) -> NDArray[np.int16]:
    """Forbid tokens after which no tokens lead to an end.

    Raises:
        SchemaError: none do from the start.
    """
    alive = np.append(accepting_S, False)
    while True:
        found = alive[:-1] | alive[next_SC].any(axis=1)
        if (found == alive[:-1]).all():
            break
        alive[:-1] = found
    if not alive[0]:
        raise SchemaError(
            "no text that fits can be written in the model's tokens", code="unsupported_schema"
        )
    return np.where(alive[next_SC], next_SC, np.int16(DEAD))


def _forced(dfa: Dfa) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the only byte that can follow each state, and the state after it; -1 for others."""
    moves = dfa.moves.next_SK
    class_of_byte = dfa.moves.class_of_byte
    sizes = np.bincount(class_of_byte, minlength=moves.shape[1])
    live = moves != DEAD
    only = ((live * sizes).sum(axis=1) == 1) & ~dfa.accepting_S
    byte_of_class = np.zeros(moves.shape[1], np.int16)
    byte_of_class[class_of_byte] = np.arange(256)
    column = live.argmax(axis=1)
    byte_S = np.where(only, byte_of_class[column], DEAD).astype(np.int16)
    next_S = np.where(only, moves[np.arange(len(moves)), column], DEAD).astype(np.int16)
    return byte_S, next_S

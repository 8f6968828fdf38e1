"""From an automaton over bytes to tables over tokens, for the whole vocabulary at once.

A token is a map of states to states. Maps are made along the tree of all tokens' bytes, level by
level, and equal ones are one: a few hundred are left of a vocabulary of 262,144, and each is a
class of tokens. Exact: maps are compared, not only their hashes.
"""

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import DEAD, Dfa
from jaxserve.guided.masks import num_words
from jaxserve.guided.tables import MAX_CLASSES, MAX_STATES, TablesTooLargeError, TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary

MAX_MAP_BYTES = 256 << 20
_BLOCK_TOKENS = 8_192
"""What is worked on at a time: it should stay in the processor's cache."""


def token_tables(
    dfa: Dfa, vocabulary: GrammarVocabulary, max_bytes: int | None = None
) -> TokenTables:
    """Return the tables of an automaton; `next_SC` and `masks_DW` take at most `max_bytes`.

    Raises:
        TablesTooLargeError: they would take more, or have too many states or classes.
        SchemaError: no text of the language can be written in the vocabulary's tokens.
    """
    if dfa.num_states > MAX_STATES:
        raise TablesTooLargeError
    maps = _Maps(dfa)
    map_V = maps.of_tokens(vocabulary)
    used, class_of_V = np.unique(map_V, return_inverse=True)
    if len(used) > MAX_CLASSES:
        raise TablesTooLargeError
    left_bytes = None if max_bytes is None else max_bytes - 2 * dfa.num_states * len(used)
    if left_bytes is not None and left_bytes < 0:
        raise TablesTooLargeError
    next_CS = maps.rows(used)
    if used[0] != _Maps.DEAD_MAP:  # class 0 is the one that is allowed nowhere
        next_CS = np.concatenate([np.full_like(next_CS[:1], DEAD), next_CS])
        class_of_V = class_of_V + 1
    next_SC = np.ascontiguousarray(next_CS.T)
    if not vocabulary.spells_all_bytes:
        next_SC = _without_dead_ends(next_SC, dfa.accepting_S)
    forced_byte_S, forced_next_S = _forced(dfa)
    firsts, mask_id_S = _distinct(next_SC >= 0)
    mask_bytes = 4 * num_words(len(class_of_V))
    if left_bytes is not None and len(firsts) * mask_bytes > left_bytes:
        raise TablesTooLargeError
    masks = _masks(next_SC[firsts] >= 0, class_of_V)
    tables = TokenTables(
        class_of_V=class_of_V.astype(np.uint16),
        next_SC=next_SC,
        mask_id_S=mask_id_S,
        masks_DW=masks,
        accepting_S=dfa.accepting_S,
        forced_byte_S=forced_byte_S,
        forced_next_S=forced_next_S,
    )
    tables.freeze()
    return tables


class _Maps:
    """Maps of states to states, numbered; 0 leads nowhere from everywhere, 1 stays everywhere."""

    DEAD_MAP = 0
    SAME_MAP = 1

    def __init__(self, dfa: Dfa) -> None:
        count = dfa.num_states
        moves = dfa.moves.next_SK
        self._class_of_byte = dfa.moves.class_of_byte
        # One more state, which stands for none: what follows it is none.
        self._move_KS = np.full((moves.shape[1], count + 1), DEAD, np.int16)
        self._move_KS[:, :-1] = moves.T
        # What a map and a byte class make: -1 where nobody asked yet.
        self._made = np.full((256, moves.shape[1]), -1, np.int32)
        self._made[self.DEAD_MAP] = self.DEAD_MAP
        # By number: as indices of _move_KS, which are quick to look up by, and as they are told.
        self._index_rows: list[NDArray[np.intp]] = []
        self._numbers: dict[bytes, int] = {}
        self._num_bytes = 0
        for row in (np.full(count, DEAD, np.int16), np.arange(count, dtype=np.int16)):
            self._number(row)

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
        num_states = self._move_KS.shape[1] - 1
        rows_CS = np.empty((len(numbers), num_states), np.int16)
        for row_S, number in zip(rows_CS, numbers.tolist(), strict=True):
            index_S = self._index_rows[number]
            row_S[:] = index_S
            row_S[index_S == num_states] = DEAD
        return rows_CS

    def _follow(self, maps_N: NDArray[np.int32], classes_N: NDArray[np.intp]) -> NDArray[np.int32]:
        made = self._made[maps_N, classes_N]
        unknown = made < 0
        if unknown.any():
            num_classes = self._made.shape[1]
            pairs = np.unique(maps_N[unknown].astype(np.int64) * num_classes + classes_N[unknown])
            row = np.empty(self._move_KS.shape[1] - 1, np.int16)
            for pair in pairs.tolist():
                number, byte_class = divmod(pair, num_classes)
                move = self._move_KS[byte_class]
                move.take(self._index_rows[number], out=row, mode="clip")
                self._made[number, byte_class] = self._number(row)
            made = self._made[maps_N, classes_N]
        return made

    def _number(self, row: NDArray[np.int16]) -> int:
        """Return a map's number; new ones get the next."""
        key = row.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._index_rows)
            self._index_rows.append(np.where(row == DEAD, len(row), row).astype(np.intp))
            self._num_bytes += self._index_rows[-1].nbytes
            if self._num_bytes > MAX_MAP_BYTES:
                raise TablesTooLargeError
            if number >= len(self._made):
                self._made = np.concatenate([self._made, np.full_like(self._made, -1)])
        return number


def _distinct(allowed_SC: NDArray[np.bool_]) -> tuple[list[int], NDArray[np.int32]]:
    """Return the first state of each set of allowed classes, and which set each state has."""
    numbers: dict[bytes, int] = {}
    firsts: list[int] = []
    set_S = np.empty(len(allowed_SC), np.int32)
    for state, row in enumerate(np.packbits(allowed_SC, axis=1)):
        key = row.tobytes()
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(state)
        set_S[state] = numbers[key]
    return firsts, set_S


def _masks(allowed_DC: NDArray[np.bool_], class_of_V: NDArray[np.intp]) -> NDArray[np.uint32]:
    """Return the packed masks over tokens of some over classes."""
    packed_CG = np.packbits(allowed_DC.T, axis=1, bitorder="little")
    padded = np.zeros(num_words(len(class_of_V)) * 32, np.intp)
    padded[: len(class_of_V)] = class_of_V
    masks = np.empty((packed_CG.shape[1] * 8, len(padded) // 8), np.uint8)
    for first in range(0, len(padded), _BLOCK_TOKENS):
        # Bits of eight masks for one token make a byte; they are to be those of eight tokens.
        bytes_VG = packed_CG[padded[first : first + _BLOCK_TOKENS]]
        turned = _turn_bits(bytes_VG)
        masks[:, first // 8 : first // 8 + turned.shape[1]] = turned
    return masks[: len(allowed_DC)].view("<u4").astype(np.uint32, copy=False)


def _turn_bits(bytes_VG: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Transpose a matrix of bits: [V, 8 G] as [V, G] bytes to [8 G, V] as [8 G, V / 8]."""
    num_tokens, num_groups = bytes_VG.shape
    blocks = bytes_VG.reshape(num_tokens // 8, 8, num_groups).transpose(2, 0, 1)
    words = np.ascontiguousarray(blocks).view("<u8")[..., 0]
    # Eight by eight bits within a word: halves, quarters and single bits change places.
    for shift, mask in (
        (7, 0x00AA00AA00AA00AA),
        (14, 0x0000CCCC0000CCCC),
        (28, 0x00000000F0F0F0F0),
    ):
        swapped = (words ^ (words >> np.uint64(shift))) & np.uint64(mask)
        words = words ^ swapped ^ (swapped << np.uint64(shift))
    turned = words[..., None].view(np.uint8).transpose(0, 2, 1)
    return turned.reshape(num_groups * 8, num_tokens // 8)


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

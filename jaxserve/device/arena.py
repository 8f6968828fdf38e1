"""Grammars as the device keeps them, and the host's account of which are there.

The arena is rows of R words. A grammar's image is some rows that may lie anywhere, and one more,
its header, that tells where: nothing has to be contiguous, so nothing ever has to be moved. This
module lays images out and gives rows away; device/grammar.py reads them. It knows numpy alone.

Rows of the arena:

    [0, 1)                   no grammar
    [1, 1 + num_slots)       a mask of each slot, for grammars that run on the host
    [1 + num_slots, ...)     headers, images, and end ids as masks

Words of an image, its rows read as one: the class of each token (two a word: token t and token t +
⌈V/2⌉); two words a state (device/grammar.py); the next state by state and class (two a word). Then
its masks, a row each. Bit j of word w of a mask is token j·W + w: so unpacked, a mask needs no
relayout on a TPU. S states, C classes, V vocabulary, W = ⌈V/32⌉ words of a mask.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.types import GrammarImage

Words = npt.NDArray[np.uint32]

Key = str | frozenset[int]
"""What names a thing in the arena: a grammar's own key, or the end ids of a mask."""

MIN_ROW_WORDS = 1024

# Where a header's constants lie, counted from its end; in front stand the arena rows of the image.
NUM_CLASSES = -1
FIRST_STATE_WORD = -2
FIRST_NEXT_WORD = -3
_NUM_CONSTANTS = 3

# The first word of a state: the image row of its mask, and whether the text may end there.
MASK_ROW_BITS = 24
# The second: tokens to an end, the end id included; in the upper half the most that any next state
# has. Larger numbers are cut to this one.
MAX_DISTANCE = 0xFFFF

MAX_CLASSES = 4096
"""Of grammars on the device: what a token leads to is looked up for all of them at once."""


# Worked on at a time: other threads wait for numpy meanwhile.
_BLOCK_STATES = 1024


class Tables(Protocol):
    """What `pack` reads of a grammar; jaxserve.guided.tables.TokenTables says what they mean."""

    @property
    def class_of_V(self) -> npt.NDArray[np.uint16]: ...
    @property
    def next_SC(self) -> npt.NDArray[np.int16]: ...
    @property
    def mask_id_S(self) -> npt.NDArray[np.int32]: ...
    @property
    def masks_DW(self) -> npt.NDArray[np.uint32]: ...
    @property
    def accepting_S(self) -> npt.NDArray[np.bool_]: ...


def mask_words(vocab_size: int) -> int:
    """Return W, the words of a mask."""
    return -(-vocab_size // 32)


def row_words(vocab_size: int) -> int:
    """Return R, the words of a row: a mask, but not so few that headers would hold little."""
    return max(mask_words(vocab_size), MIN_ROW_WORDS)


def pack_bits(is_set_V: npt.NDArray[np.bool_]) -> Words:
    """Pack bool [V] to the W words of a mask."""
    num_words = mask_words(len(is_set_V))
    padded = np.zeros(num_words * 32, np.bool_)
    padded[: len(is_set_V)] = is_set_V
    bits_W32 = np.ascontiguousarray(padded.reshape(32, num_words).T)
    words: Words = np.packbits(bits_W32, axis=1, bitorder="little").view("<u4").reshape(-1)
    return words


def distances(tables: Tables) -> npt.NDArray[np.int64]:
    """Return [S], the least tokens from each state to the end of a text, its end id included."""
    distance_S = np.where(tables.accepting_S, 1, MAX_DISTANCE).astype(np.int64)
    open_S = np.flatnonzero(~tables.accepting_S)
    # One more, for -1: from there nothing leads to an end.
    is_reached_S = np.append(tables.accepting_S, False)
    for distance in range(2, MAX_DISTANCE):
        blocks = np.split(open_S, range(_BLOCK_STATES, len(open_S), _BLOCK_STATES))
        found = [is_reached_S[tables.next_SC[block_S]].any(axis=1) for block_S in blocks]
        leads = np.concatenate(found)
        if not leads.any():
            break
        distance_S[open_S[leads]] = distance
        is_reached_S[open_S[leads]] = True
        open_S = open_S[~leads]
    return distance_S


def num_image_rows(num_states: int, num_classes: int, num_masks: int, vocab_size: int) -> int:
    """Return the rows of a grammar of these sizes, its header left out."""
    words = -(-vocab_size // 2) + 2 * num_states + -(-num_states * num_classes // 2)
    return -(-words // row_words(vocab_size)) + num_masks


def pack(
    tables: Tables,
    key: str,
    vocab_size: int,
    max_rows: int,
    distance_S: npt.NDArray[np.int64] | None = None,
) -> GrammarImage | None:
    """Lay a grammar out; None where it has too many classes, or more rows than `max_rows`.

    `key` names the grammar: equal keys, equal tables. `distance_S` are its `distances`, where they
    are known. Takes 0.1 ms for each distinct mask.
    """
    num_states, num_classes = tables.next_SC.shape
    num_masks = len(tables.masks_DW)
    num_rows = num_image_rows(num_states, num_classes, num_masks, vocab_size)
    row_size = row_words(vocab_size)
    if num_classes > MAX_CLASSES or num_rows > min(max_rows, row_size - _NUM_CONSTANTS):
        return None

    class_of_V = np.zeros(vocab_size, np.uint16)
    known = tables.class_of_V[:vocab_size]
    class_of_V[: len(known)] = known
    first_state, first_next = -(-vocab_size // 2), -(-vocab_size // 2) + 2 * num_states
    first_mask = num_rows - num_masks
    if distance_S is None:
        distance_S = distances(tables)
    next_distance_S = _farthest(distance_S, tables.next_SC)

    rows_NR = np.zeros((num_rows, row_size), np.uint32)
    words = rows_NR.reshape(-1)
    words[:first_state] = _halves(class_of_V, first_state)
    state_S2 = words[first_state:first_next].reshape(-1, 2)
    state_S2[:, 0] = first_mask + tables.mask_id_S
    state_S2[:, 0] |= tables.accepting_S.astype(np.uint32) << MASK_ROW_BITS
    state_S2[:, 1] = distance_S | next_distance_S << 16
    flat = np.ascontiguousarray(tables.next_SC, np.int16).reshape(-1).view(np.uint16)
    words[first_next : first_next + -(-len(flat) // 2)] = _pairs(flat)
    num_words = mask_words(vocab_size)
    for row_R, mask_W in zip(rows_NR[first_mask:], tables.masks_DW, strict=True):
        row_R[:num_words] = strided(mask_W, vocab_size)
    rows_NR.setflags(write=False)
    return GrammarImage(
        key=key,
        rows_NR=rows_NR,
        num_classes=num_classes,
        first_state_word=first_state,
        first_next_word=first_next,
    )


def _farthest(
    distance_S: npt.NDArray[np.int64], next_SC: npt.NDArray[np.int16]
) -> npt.NDArray[np.int64]:
    """Return [S], the largest distance of a state that each state leads to."""
    of_next = np.append(distance_S, 0)
    farthest_S = np.empty_like(distance_S)
    for first in range(0, len(next_SC), _BLOCK_STATES):
        rows = slice(first, first + _BLOCK_STATES)
        farthest_S[rows] = of_next[next_SC[rows]].max(axis=1)
    return farthest_S


def _halves(values: npt.NDArray[np.uint16], num_words: int) -> Words:
    """Put value i and value i + num_words in word i."""
    words = np.zeros(num_words, np.uint32)
    words |= values[:num_words]
    words[: len(values) - num_words] |= values[num_words:].astype(np.uint32) << 16
    return words


def _pairs(values: npt.NDArray[np.uint16]) -> Words:
    """Put values 2i and 2i + 1 in word i."""
    words = values[0::2].astype(np.uint32)
    words[: len(values) // 2] |= values[1::2].astype(np.uint32) << 16
    return words


def strided(words: Words, vocab_size: int) -> Words:
    """Turn a mask whose bit b of word w is token 32·w + b into one of the arena's.

    Tokens that it does not reach are not allowed; those from `vocab_size` on are dropped.
    """
    num_words = mask_words(vocab_size)
    plain = np.zeros(num_words, np.uint32)
    plain[: len(words)] = words[:num_words]
    if num_words % 32:
        bits = np.unpackbits(plain.view(np.uint8), bitorder="little")
        return pack_bits(bits[:vocab_size].astype(np.bool_))
    # 32 words, one of each stride, are a square of bits, and the mask is its transpose.
    square_Q32 = np.ascontiguousarray(plain.reshape(32, -1).T)
    for half, low in _TRANSPOSE_STEPS:
        pair_QN2J = square_Q32.reshape(-1, 32 // (2 * int(half)), 2, int(half))
        above, below = pair_QN2J[:, :, 0], pair_QN2J[:, :, 1]
        swapped = (above >> half ^ below) & low
        below ^= swapped
        above ^= swapped << half
    return square_Q32.reshape(-1)


_TRANSPOSE_STEPS = tuple(
    (np.uint32(half), np.uint32(low))
    for half, low in (
        (16, 0x0000FFFF),
        (8, 0x00FF00FF),
        (4, 0x0F0F0F0F),
        (2, 0x33333333),
        (1, 0x55555555),
    )
)


class Write(NamedTuple):
    """A row of the arena, and what it is to hold: R words or fewer."""

    row: int
    words: Words


class Place(NamedTuple):
    """Where a slot's grammar lies, and what has to be written there first."""

    header: int
    ends: int
    writes: list[Write]


@dataclass(slots=True)
class _Resident:
    rows: list[int]
    slots: set[int]


class Arena:
    """Gives rows to grammars. What no slot uses stays until its rows are needed, the oldest first.

    Device thread only.
    """

    def __init__(self, *, num_rows: int, num_slots: int, vocab_size: int) -> None:
        """`num_rows` are those of grammars, beside the ones that every slot owns."""
        self._vocab_size = vocab_size
        self._num_rows = num_rows
        self._free = list(range(num_slots + num_rows, num_slots, -1))
        # The one that was placed least lately is first.
        self._residents: dict[Key, _Resident] = {}

    @property
    def num_rows_used(self) -> int:
        """Rows of grammars that are there, in use or not."""
        return self._num_rows - len(self._free)

    def place(
        self, slot: int, image: GrammarImage, end_ids: frozenset[int], live_slots: Collection[int]
    ) -> Place | None:
        """Find or make room for a slot's grammar; None where other slots leave none.

        Only `live_slots` still use what was placed for them: nobody has to tell when a slot ends.
        """
        self.leave(slot)
        for resident in self._residents.values():
            resident.slots.intersection_update(live_slots)
        num_rows: dict[Key, int] = {image.key: len(image.rows_NR) + 1, end_ids: 1}
        wanted = num_rows.keys()
        num_pinned = sum(
            len(resident.rows)
            for key, resident in self._residents.items()
            if resident.slots and key not in wanted
        )
        if num_pinned + sum(num_rows.values()) > self._num_rows:
            return None
        num_missing = sum(n for key, n in num_rows.items() if key not in self._residents)
        self._evict(num_missing, wanted)
        writes: list[Write] = []
        for key, count in num_rows.items():
            if key in self._residents:
                self._residents[key] = self._residents.pop(key)  # the last to be evicted
            else:
                rows = [self._free.pop() for _ in range(count)]
                self._residents[key] = _Resident(rows, set())
                if isinstance(key, str):
                    writes += self._image_writes(image, rows)
                else:
                    writes.append(Write(rows[0], end_mask(key, self._vocab_size)))
            self._residents[key].slots.add(slot)
        header, ends = (self._residents[key].rows[0] for key in num_rows)
        return Place(header, ends, writes)

    def leave(self, slot: int) -> None:
        """Note that a slot uses nothing: it is another sequence's now."""
        for resident in self._residents.values():
            resident.slots.discard(slot)

    def _evict(self, num_missing: int, wanted: Collection[Key]) -> None:
        for key in list(self._residents):
            if num_missing <= len(self._free):
                return
            if key not in wanted and not self._residents[key].slots:
                self._free += self._residents.pop(key).rows

    def _image_writes(self, image: GrammarImage, rows: Sequence[int]) -> Iterable[Write]:
        header, *body = rows
        words = np.zeros(row_words(self._vocab_size), np.uint32)
        words[: len(body)] = body
        words[NUM_CLASSES] = image.num_classes
        words[FIRST_STATE_WORD] = image.first_state_word
        words[FIRST_NEXT_WORD] = image.first_next_word
        return (Write(header, words), *map(Write, body, image.rows_NR))


def end_mask(end_ids: Collection[int], vocab_size: int) -> Words:
    """Return a mask of end ids."""
    is_end_V = np.zeros(vocab_size, np.bool_)
    is_end_V[[token_id for token_id in end_ids if token_id < vocab_size]] = True
    return pack_bits(is_end_V)

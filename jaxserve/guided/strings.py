r"""JSON strings: what stands between the quotes, as an automaton over bytes.

A constraint speaks of the string's characters, and becomes an automaton over their UTF-8. `quoted`
writes that as JSON does: quotes, backslashes and control characters escaped, other characters
themselves or as `\uXXXX`, no surrogate alone. Lengths are counted on what is written.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided import regex
from jaxserve.guided.automaton import (
    DEAD,
    AutomatonTooLargeError,
    Dfa,
    Transitions,
    by_classes,
    minimize,
    trimmed,
)

MAX_COUNTED_STATES = 100_000
MAX_PAIRS_LENGTH = 64
MAX_HEX_LENGTH = 256
MAX_HEX_STATES = 8
r"""Beyond these surrogate pairs, then all of `\uXXXX` are left out: 7 and 6 states a character."""

_SHORT_ESCAPES = {
    ord(letter): ord(char) for letter, char in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)
}
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_DIGITS = [[ord(x) for x in {f"{digit:x}", f"{digit:X}"}] for digit in range(16)]
_SURROGATES = slice(0xD800, 0xE000)
_ASTRAL_LEADS = range(0xF0, 0xF4)


@dataclass(frozen=True, slots=True)
class Length:
    """Numbers of characters, `most` included; None: any."""

    least: int = 0
    most: int | None = None

    def meet(self, other: "Length") -> "Length":
        """Return the lengths that both allow."""
        bounds = [most for most in (self.most, other.most) if most is not None]
        return Length(max(self.least, other.least), min(bounds, default=None))

    @property
    def is_empty(self) -> bool:
        """Whether no length is allowed."""
        return self.most is not None and self.most < self.least

    def __contains__(self, count: int) -> bool:
        return count >= self.least and (self.most is None or count <= self.most)


ANY_LENGTH = Length()


@lru_cache(maxsize=256)
def quoted(content: Dfa, length: Length = ANY_LENGTH) -> Dfa:
    """Return the JSON strings, quotes included, whose content is in a language over UTF-8.

    Raises:
        AutomatonTooLargeError: counting takes more than MAX_COUNTED_STATES states.
    """
    written = _Writer(content, length).run()
    # The closing quote is a class of bytes of its own: counting multiplies the table's rows.
    only_quote = np.full((1, 256), DEAD, np.int32)
    only_quote[0, _QUOTE] = 0
    moves = by_classes(np.concatenate([written.table, only_quote]), np.arange(256))
    table, class_of_byte = moves.next_SK[:-1], moves.class_of_byte
    accepting = written.accepting
    if length != ANY_LENGTH:
        table, accepting = _counted(table, written, length)
    count = len(table)
    rows = np.full((count + 2, table.shape[1]), DEAD, np.int32)
    rows[1:-1] = np.where(table == DEAD, DEAD, table + 1)
    quote = class_of_byte[_QUOTE]
    rows[0, quote] = 1
    rows[1:-1][accepting, quote] = count + 1
    final = np.zeros(count + 2, np.bool_)
    final[-1] = True
    whole = trimmed(Transitions(rows, class_of_byte), final)
    # Counts tell the copies of a state apart anyway.
    return minimize(whole) if length == ANY_LENGTH else whole


def any_string(length: Length = ANY_LENGTH) -> Dfa:
    """Return all JSON strings of a length."""
    return quoted(regex.any_text(), length)


@lru_cache(maxsize=256)
def counted(content: Dfa, length: Length = ANY_LENGTH) -> Dfa:
    """Return the texts of a language over UTF-8 that have a length.

    Raises:
        AutomatonTooLargeError: counting takes more than MAX_COUNTED_STATES states.
    """
    if length == ANY_LENGTH:
        return content
    plain = _Writer(content, length).plain()
    rows, accepting = _counted(content.moves.next_SK, plain, length)
    return trimmed(Transitions(rows, content.moves.class_of_byte), accepting)


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """Content as JSON writes it: moves by byte; at `between` states a character may begin."""

    table: NDArray[np.int32]
    accepting: NDArray[np.bool_]
    between: NDArray[np.bool_]


def _counted(
    table: NDArray[np.int32], written: _Written, length: Length
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Count characters, with `table` for written's moves.

    Level n of the result is a copy of the automaton after n characters.

    With no upper bound the last level counts no more.
    """
    top = length.least if length.most is None else length.most
    count = len(table)
    if count * (top + 1) > MAX_COUNTED_STATES:
        raise AutomatonTooLargeError
    levels = np.arange(top + 1)
    target_level = levels[:, None] + written.between
    if length.most is None:
        target_level = np.minimum(target_level, top)
    offset = (target_level * count).astype(np.int32)
    rows = np.where(table == DEAD, DEAD, table + offset[:, :, None])
    rows[target_level > top] = DEAD
    accepting = (levels >= length.least)[:, None] & written.accepting
    return rows.reshape(-1, table.shape[1]), accepting.ravel()


class _Writer:
    """Adds the escapes of JSON to the automaton of a content."""

    def __init__(self, content: Dfa, length: Length) -> None:
        self._table = content.moves.by_byte()
        self._accepting = content.accepting_S
        # No continuation byte leads on from where a character may begin.
        self._between = ~(self._table[:, 0x80:0xC0] != DEAD).any(axis=1)
        self._rows: list[NDArray[np.int32]] = []
        self._blocks: dict[bytes, int] = {}
        self._pairs: dict[int, int] = {}
        positions = max(length.least, length.most or 0)
        num_between = int(self._between.sum())
        self._with_hex = positions <= MAX_HEX_LENGTH and num_between <= MAX_HEX_STATES
        self._with_pairs = positions <= MAX_PAIRS_LENGTH

    def plain(self) -> _Written:
        """Return the content as it is."""
        accepting = self._accepting & self._between
        return _Written(table=self._table, accepting=accepting, between=self._between)

    def run(self) -> _Written:
        """Return the content as it is written in JSON."""
        table = self._table.copy()
        table[:, :0x20] = table[:, _QUOTE] = table[:, _BACKSLASH] = DEAD
        for state in np.flatnonzero(self._between).tolist():
            table[state, _BACKSLASH] = self._escape(state)
        extra = len(self._rows)
        if extra:
            table = np.concatenate([table, np.stack(self._rows)])
        return _Written(
            table=table,
            accepting=np.append(self._accepting & self._between, np.zeros(extra, np.bool_)),
            between=np.append(self._between, np.zeros(extra, np.bool_)),
        )

    def _add(self, moves: dict[int, int]) -> int:
        row = np.full(256, DEAD, np.int32)
        row[list(moves)] = list(moves.values())
        self._rows.append(row)
        return len(self._table) + len(self._rows) - 1

    def _escape(self, state: int) -> int:
        """Return the state after a backslash at `state`."""
        row = self._table[state]
        moves = {
            letter: int(row[char]) for letter, char in _SHORT_ESCAPES.items() if row[char] != DEAD
        }
        if self._with_hex:
            astral = self._astral(state) if self._with_pairs else DEAD
            target = self._hex(self._basic_plane(state), astral)
            if target != DEAD:
                moves[ord("u")] = target
        return self._add(moves) if moves else DEAD

    def _basic_plane(self, state: int) -> NDArray[np.int32]:
        """Return the state after each character of the basic plane, int32 [65536]."""
        padded = np.concatenate([self._table, np.full((1, 256), DEAD, np.int32)])
        after = np.full(0x10000, DEAD, np.int32)
        after[:0x80] = padded[state, :0x80]
        leads = padded[state, 0xC0:0xF0]
        if (leads != DEAD).any():
            second = padded[leads, 0x80:0xC0]
            after[0x80:0x800] = second[:0x20].ravel()[0x80:]
            third = padded[second[0x20:], 0x80:0xC0]
            after[0x800:] = third.ravel()[0x800:]
        after[_SURROGATES] = DEAD
        return after

    def _astral(self, state: int) -> int:
        """Return the state after any character of planes 1 to 15; DEAD where they differ."""
        padded = np.concatenate([self._table, np.full((1, 256), DEAD, np.int32)])
        reached = set()
        for lead in _ASTRAL_LEADS:
            first = 0x90 if lead == _ASTRAL_LEADS[0] else 0x80
            states = padded[padded[state, lead], first:0xC0]
            for _ in range(2):
                states = np.unique(padded[np.unique(states), 0x80:0xC0])
            reached.update(states.tolist())
        return reached.pop() if len(reached) == 1 else DEAD

    def _hex(self, after: NDArray[np.int32], astral: int) -> int:
        """Return the state that reads `after`'s number in hexadecimal digits, most first."""
        if len(after) == 1:
            return int(after[0])
        if (after == DEAD).all() and astral == DEAD:
            return DEAD
        key = after.tobytes() + astral.to_bytes(4, "little", signed=True)
        known = self._blocks.get(key)
        if known is None:
            moves: dict[int, int] = {}
            for digit, part in enumerate(np.split(after, 16)):
                # Only numbers that begin with D8 to DB go on to a second half.
                first = len(after) == 0x10000 and digit == 0xD
                if astral != DEAD and len(after) == 0x1000 and digit in range(8, 12):
                    target = self._second_half(astral)
                else:
                    target = self._hex(part, astral if first else DEAD)
                if target != DEAD:
                    moves |= dict.fromkeys(_DIGITS[digit], target)
            known = self._blocks[key] = self._add(moves)
        return known

    def _second_half(self, target: int) -> int:
        r"""Return the state that reads the rest of a surrogate pair, after `\uD8`."""
        if target not in self._pairs:
            any_digit = [byte for digit in _DIGITS for byte in digit]
            d = _DIGITS[0xD]
            low = [byte for digit in _DIGITS[0xC:] for byte in digit]
            state = target
            for choices in (
                any_digit,
                any_digit,
                low,
                d,
                [ord("u")],
                [_BACKSLASH],
                *[any_digit] * 2,
            ):
                state = self._add(dict.fromkeys(choices, state))
            self._pairs[target] = state
        return self._pairs[target]

"""Deterministic automata over bytes: values, with set operations and minimizing.

Letters: S states, K byte classes.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_from
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

DEAD = -1
_MINIMIZE_STATES = 2_048
_MINIMIZE_ROUNDS = 24
"""After so many an automaton stays as it is if refining goes slowly, as it does for counters."""


S = TypeVar("S", bound=Hashable)


class AutomatonTooLargeError(Exception):
    """More states than the caller allows."""


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """A table of moves by byte class: next_SK int32, DEAD where there is none."""

    next_SK: NDArray[np.int32]
    class_of_byte: NDArray[np.intp]

    def by_byte(self) -> NDArray[np.int32]:
        """Return int32 [S, 256]."""
        return self.next_SK[:, self.class_of_byte]


@dataclass(frozen=True, eq=False)
class Dfa:
    """States 0 (the start) to S - 1, all of them reachable and on a way to an accepting one.

    The language without texts is one state that neither accepts nor moves.
    """

    moves: Transitions
    accepting_S: NDArray[np.bool_]

    @cached_property
    def rows(self) -> list[list[int]]:
        """The moves as lists, by state and byte class: for walks in Python."""
        rows: list[list[int]] = self.moves.next_SK.tolist()
        return rows

    @property
    def num_states(self) -> int:
        """How many states there are."""
        return len(self.accepting_S)

    @property
    def is_empty(self) -> bool:
        """Whether no text at all is accepted."""
        return not self.accepting_S.any()

    def walk(self, text: bytes, state: int = 0) -> tuple[int, int]:
        """Return the last state, and how many bytes were taken before none fitted."""
        classes = self.moves.class_of_byte
        for offset, byte in enumerate(text):
            following = self.rows[state][classes[byte]]
            if following == DEAD:
                return state, offset
            state = following
        return state, len(text)

    def accepts(self, text: bytes) -> bool:
        """Whether the whole text is in the language."""
        state, taken = self.walk(text)
        return taken == len(text) and bool(self.accepting_S[state])


def from_table(table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int = 0) -> Dfa:
    """Make a Dfa of moves by byte, int32 [S, 256]."""
    return trimmed(by_classes(table, np.arange(256)), accepting, start)


def explore(
    start: S,
    step: Callable[[S, int], S | None],
    accepts: Callable[[S], bool],
    alphabet: Iterable[int],
    limit: int,
) -> Dfa:
    """Make a Dfa of a step function, by trying every byte of the alphabet in every state.

    Raises:
        AutomatonTooLargeError: there are more than `limit` states.
    """
    number = {start: 0}
    states = [start]
    rows: list[NDArray[np.int32]] = []
    bytes_tried = list(alphabet)
    for state in states:
        row = np.full(256, DEAD, np.int32)
        for byte in bytes_tried:
            following = step(state, byte)
            if following is None:
                continue
            if following not in number:
                number[following] = len(states)
                states.append(following)
            row[byte] = number[following]
        rows.append(row)
        if len(states) > limit:
            raise AutomatonTooLargeError
    accepting = np.fromiter((accepts(state) for state in states), np.bool_, len(states))
    return from_table(np.stack(rows), accepting)


def product(
    left: Dfa, right: Dfa, accepts: Callable[[bool, bool], bool], limit: int = 100_000
) -> Dfa:
    """Combine two languages; `accepts` says what a pair of states accepts.

    Raises:
        AutomatonTooLargeError: there are more than `limit` pairs.
    """
    class_of_byte, (a_rows, b_rows) = _common_classes([_total(left), _total(right)])
    pairs = {(0, 0): 0}
    queue = [(0, 0)]
    rows: list[list[int]] = []
    a_lists, b_lists = a_rows.tolist(), b_rows.tolist()
    for a, b in queue:
        row = []
        for pair in zip(a_lists[a], b_lists[b], strict=True):
            if pair not in pairs:
                pairs[pair] = len(queue)
                queue.append(pair)
            row.append(pairs[pair])
        rows.append(row)
        if len(queue) > limit:
            raise AutomatonTooLargeError
    a_accepting = [*left.accepting_S.tolist(), False]
    b_accepting = [*right.accepting_S.tolist(), False]
    accepting = np.array([accepts(a_accepting[a], b_accepting[b]) for a, b in queue], np.bool_)
    return minimize(trimmed(Transitions(np.array(rows, np.int32), class_of_byte), accepting))


def intersection(left: Dfa, right: Dfa, limit: int = 100_000) -> Dfa:
    """Return what both accept."""
    return product(left, right, lambda a, b: a and b, limit)


def difference(left: Dfa, right: Dfa, limit: int = 100_000) -> Dfa:
    """Return what `left` accepts and `right` does not."""
    return product(left, right, lambda a, b: a and not b, limit)


def minimize(dfa: Dfa) -> Dfa:
    """Join states that accept the same texts, unless that takes too long."""
    if dfa.num_states > _MINIMIZE_STATES:
        return dfa
    table = dfa.moves.next_SK
    # A state's signature: a sum of random words for its own block and each move's block. 64 bits
    # and at most a few thousand states: two blocks do not meet by chance.
    words = np.random.default_rng(13).integers(1, 2**64, (table.shape[1] + 1,), np.uint64) | 1
    mixer = np.random.default_rng(17).integers(1, 2**64, (dfa.num_states + 1,), np.uint64)
    block = dfa.accepting_S.astype(np.intp)
    count = len(np.unique(block))
    for done in count_from(1):
        mixed = mixer[np.append(block, dfa.num_states)]
        # Index -1 is the last: the dead state.
        signature = mixed[table] @ words[:-1]
        signature += mixed[:-1] * words[-1]
        _, first, block = np.unique(signature, return_index=True, return_inverse=True)
        if len(first) == count:
            break
        if done >= _MINIMIZE_ROUNDS and (len(first) - count) * 128 < dfa.num_states - 1024:
            return dfa
        count = len(first)
    if count == dfa.num_states:
        return dfa
    # Blocks in the order of their first states, so that the start stays 0.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(count)
    new_id = np.append(rank[block], DEAD)
    kept = first[order]
    joined = new_id[table[kept]].astype(np.int32)
    return Dfa(by_classes(joined, dfa.moves.class_of_byte), dfa.accepting_S[kept])


def nothing() -> Dfa:
    """Return the language without texts."""
    moves = Transitions(np.full((1, 1), DEAD, np.int32), np.zeros(256, np.intp))
    return Dfa(moves, np.zeros(1, np.bool_))


def _total(dfa: Dfa) -> Transitions:
    """Return the moves with one more state, where all that is not in the language ends."""
    dead = dfa.num_states
    table = np.where(dfa.moves.next_SK == DEAD, dead, dfa.moves.next_SK)
    last = np.full((1, table.shape[1]), dead, np.int32)
    return Transitions(np.concatenate([table, last]), dfa.moves.class_of_byte)


def refine(partitions: list[NDArray[np.intp]]) -> NDArray[np.intp]:
    """Return the coarsest classes of bytes that are within classes of all partitions."""
    refined = np.zeros(256, np.intp)
    for partition in partitions:
        _, refined = np.unique(refined * 256 + partition, return_inverse=True)
    return refined


def _common_classes(
    tables: list[Transitions],
) -> tuple[NDArray[np.intp], list[NDArray[np.int32]]]:
    class_of_byte = refine([table.class_of_byte for table in tables])
    _, sample = np.unique(class_of_byte, return_index=True)
    return class_of_byte, [table.next_SK[:, table.class_of_byte[sample]] for table in tables]


def by_classes(table: NDArray[np.int32], class_of_byte: NDArray[np.intp]) -> Transitions:
    """Return a table by byte class with classes that act alike joined."""
    numbers: dict[bytes, int] = {}
    columns = np.ascontiguousarray(table.T)
    joined = [numbers.setdefault(column.tobytes(), len(numbers)) for column in columns]
    _, first = np.unique(joined, return_index=True)
    next_SK = np.ascontiguousarray(columns[first].T, np.int32)
    return Transitions(next_SK, np.array(joined, np.intp)[class_of_byte])


def trimmed(moves: Transitions, accepting: NDArray[np.bool_], start: int = 0) -> Dfa:
    """Keep the states between the start and an accepting one; the start becomes 0."""
    table = moves.next_SK
    reachable = _reached(table, np.array([start]))
    source, column = np.nonzero(table != DEAD)
    back = _Edges(table[source, column], source, len(table))
    useful = reachable & back.reached(np.flatnonzero(accepting & reachable))
    if not useful[start]:
        return nothing()
    others = np.flatnonzero(useful)
    kept = np.concatenate([[start], others[others != start]])
    new_id = np.full(len(table) + 1, DEAD, np.int32)
    new_id[kept] = np.arange(len(kept))
    return Dfa(by_classes(new_id[table[kept]], moves.class_of_byte), accepting[kept])


def _reached(table: NDArray[np.int32], frontier: NDArray[np.intp]) -> NDArray[np.bool_]:
    reached = np.zeros(len(table) + 1, np.bool_)
    reached[-1] = True  # the dead state's index
    reached[frontier] = True
    while len(frontier):
        following = np.unique(table[frontier]).astype(np.intp)
        frontier = following[~reached[following]]
        reached[frontier] = True
    return reached[:-1]


class _Edges:
    """Edges sorted by their source, for breadth-first walks."""

    def __init__(self, source: NDArray[np.int32], target: NDArray[np.intp], num_nodes: int) -> None:
        order = np.argsort(source, kind="stable")
        self._target = target[order]
        self._first = np.searchsorted(source[order], np.arange(num_nodes + 1))

    def reached(self, frontier: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return which nodes the frontier leads to, itself included."""
        reached = np.zeros(len(self._first) - 1, np.bool_)
        reached[frontier] = True
        while len(frontier):
            first, past = self._first[frontier], self._first[frontier + 1]
            counts = past - first
            offsets = np.repeat(first - np.cumsum(counts) + counts, counts)
            following = np.unique(self._target[offsets + np.arange(counts.sum())])
            frontier = following[~reached[following]]
            reached[frontier] = True
        return reached

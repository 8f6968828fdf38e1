"""Deterministic automata over bytes, and the composing of them into larger ones.

A Dfa is a value. An Nfa is a workshop: nodes, single-byte edges, empty moves and copies of whole
Dfas; `determinize` makes one Dfa of it. Most states of our languages have one way on, so only the
few that empty moves join are computed as sets; all others are copied as arrays.

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


def literals(texts: Iterable[bytes]) -> Dfa:
    """Make a Dfa of a finite set of texts."""
    nfa = Nfa()
    end = nfa.node()
    nfa.choices(0, texts, end)
    return nfa.determinize(end)


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


class Nfa:
    """Nodes and moves under construction; node 0 is the start."""

    def __init__(self, limit: int = 200_000) -> None:
        """Make one that refuses more than `limit` nodes (AutomatonTooLargeError)."""
        self._limit = limit
        self._count = 1
        self._edges: list[tuple[int, int, int]] = []
        self._empty: dict[int, list[int]] = {}
        self._blocks: list[tuple[int, Dfa]] = []

    def node(self) -> int:
        """Make a node."""
        return self._take(1)

    def skip(self, source: int, target: int) -> None:
        """Let nothing lead from a node to another."""
        self._empty.setdefault(source, []).append(target)

    def literal(self, source: int, text: bytes, target: int) -> None:
        """Let a text lead from a node to another."""
        self.choices(source, (text,), target)

    def choices(self, source: int, texts: Iterable[bytes], target: int) -> None:
        """Let each of the texts lead from a node to another, by a tree of their prefixes."""
        entry = self.node()
        self.skip(source, entry)
        children: dict[tuple[int, int], int] = {}
        for text in texts:
            node = entry
            for byte in text:
                child = children.get((node, byte))
                if child is None:
                    child = children[node, byte] = self.node()
                    self._edges.append((node, byte, child))
                node = child
            self.skip(node, target)

    def embed(self, source: int, dfa: Dfa, target: int) -> None:
        """Let every text of a language lead from a node to another; copies the automaton."""
        first = self._take(dfa.num_states)
        self._blocks.append((first, dfa))
        self.skip(source, first)
        for state in np.flatnonzero(dfa.accepting_S).tolist():
            self.skip(first + state, target)

    def determinize(self, end: int, *, minimal: bool = True) -> Dfa:
        """Return the language of the ways from node 0 to `end`.

        Raises:
            AutomatonTooLargeError: the sets of nodes are more than the limit.
        """
        class_of_byte, table = self._table()
        dfa = _Determinizer(table, self._empty, end, self._limit).run(class_of_byte)
        return minimize(dfa) if minimal else dfa

    def _take(self, count: int) -> int:
        first = self._count
        self._count += count
        if self._count > self._limit:
            raise AutomatonTooLargeError
        return first

    def _table(self) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return the byte classes of all moves together, and the moves by them."""
        bytes_used = np.zeros(256, np.intp)
        singled = sorted({byte for _, byte, _ in self._edges})
        bytes_used[singled] = np.arange(1, len(singled) + 1)
        partitions = {id(dfa): dfa.moves.class_of_byte for _, dfa in self._blocks}
        class_of_byte = _refine([bytes_used, *partitions.values()])
        _, sample = np.unique(class_of_byte, return_index=True)
        table = np.full((self._count, len(sample)), DEAD, np.int32)
        for first, dfa in self._blocks:
            rows = dfa.moves.next_SK[:, dfa.moves.class_of_byte[sample]]
            table[first : first + dfa.num_states] = np.where(rows == DEAD, DEAD, rows + first)
        if self._edges:
            source, byte, target = np.array(self._edges, np.int32).T
            table[source, class_of_byte[byte]] = target
        return class_of_byte, table


class _Determinizer:
    """The subset construction. A set of one node has that node's number; others follow."""

    def __init__(
        self, table: NDArray[np.int32], empty: dict[int, list[int]], end: int, limit: int
    ) -> None:
        self._table = table
        self._empty = empty
        self._end = end
        self._limit = limit
        self._moves_on = (table != DEAD).any(axis=1).tolist()
        self._closures: dict[int, frozenset[int]] = {}
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []

    def run(self, class_of_byte: NDArray[np.intp]) -> Dfa:
        """Return the automaton of the sets that the start leads to."""
        count = len(self._table)
        # What a move to a node leads to. Nodes with neither moves nor empty moves stay: a copied
        # automaton's last states have empty moves, and `end` is where texts end.
        numbers = np.arange(count + 1, dtype=np.int32)
        numbers[-1] = DEAD
        for node in self._empty:
            numbers[node] = self._number(self._closure(node))
        own = numbers[self._table]
        extra: list[NDArray[np.int32]] = []
        rows: dict[int, list[int]] = {}
        for members in self._sets:
            extra.append(np.array(self._row(members, rows), np.int32))
            if len(self._sets) > self._limit:
                raise AutomatonTooLargeError
        moves = np.concatenate([own, np.stack(extra)]) if extra else own
        accepting = np.zeros(len(moves), np.bool_)
        accepting[self._end] = True
        accepting[count:] = [self._end in members for members in self._sets]
        start = int(numbers[0])
        if start == DEAD:
            return nothing()
        return trimmed(Transitions(moves, class_of_byte), accepting, start)

    def _row(self, members: frozenset[int], rows: dict[int, list[int]]) -> list[int]:
        for node in members:
            if node not in rows:
                rows[node] = self._table[node].tolist()
        row: list[int] = []
        known: dict[tuple[int, ...], int] = {}
        for targets in zip(*(rows[node] for node in members), strict=True):
            number = known.get(targets)
            if number is None:
                live = [self._closure(node) for node in set(targets) if node != DEAD]
                number = self._number(frozenset().union(*live)) if live else DEAD
                known[targets] = number
            row.append(number)
        return row

    def _closure(self, node: int) -> frozenset[int]:
        """Return the nodes that a node reaches for nothing, less those that lead nowhere."""
        closure = self._closures.get(node)
        if closure is None:
            seen = {node}
            queue = [node]
            for reached in queue:
                for following in self._empty.get(reached, ()):
                    if following not in seen:
                        seen.add(following)
                        queue.append(following)
            closure = frozenset(x for x in seen if self._moves_on[x] or x == self._end)
            self._closures[node] = closure
        return closure

    def _number(self, members: frozenset[int]) -> int:
        if not members:
            return DEAD
        if len(members) == 1:
            return next(iter(members))
        number = self._numbers.get(members)
        if number is None:
            number = self._numbers[members] = len(self._table) + len(self._sets)
            self._sets.append(members)
        return number


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


def _refine(partitions: list[NDArray[np.intp]]) -> NDArray[np.intp]:
    """Return the coarsest classes of bytes that are within classes of all partitions."""
    refined = np.zeros(256, np.intp)
    for partition in partitions:
        _, refined = np.unique(refined * 256 + partition, return_inverse=True)
    return refined


def _common_classes(
    tables: list[Transitions],
) -> tuple[NDArray[np.intp], list[NDArray[np.int32]]]:
    class_of_byte = _refine([table.class_of_byte for table in tables])
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

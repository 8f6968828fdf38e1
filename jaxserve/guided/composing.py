"""Composing automata into larger ones.

An Nfa is a workshop: nodes, texts and empty moves between them, and copies of whole automata;
`determinize` makes one automaton of it. Most states of our languages have one way on, so only the
few that empty moves join are computed as sets; all others are copied as arrays.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.automaton import (
    DEAD,
    AutomatonTooLargeError,
    Dfa,
    Transitions,
    minimize,
    nothing,
    refine,
    trimmed,
)


def literals(texts: Iterable[bytes]) -> Dfa:
    """Make a Dfa of a finite set of texts."""
    nfa = Nfa()
    end = nfa.node()
    nfa.choices(0, texts, end)
    return nfa.determinize(end)


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
        class_of_byte = refine([bytes_used, *partitions.values()])
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

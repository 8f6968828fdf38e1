"""The automata of objects: their properties in order, each once."""

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.guided.automaton import Dfa
from jaxserve.guided.composing import Nfa
from jaxserve.guided.json_values import Ends
from jaxserve.guided.notation import Notation
from jaxserve.guided.shapes import Entry, Key, Object


class _Written(NamedTuple):
    """How far an object is: its next entry, and how many properties it has."""

    entry: int
    number: int


class ObjectWriter:
    """Writes an object: entries in order, optional ones left out or not, extras behind them."""

    def __init__(
        self, value: Callable[[Key], Dfa], nfa: Nfa, shape: Object, notation: Notation
    ) -> None:
        self._value = value
        self._nfa = nfa
        self._shape = shape
        self._notation = notation
        self._entries = shape.entries
        if notation.sorts_names:
            self._entries = tuple(sorted(shape.entries, key=lambda entry: entry.name.lower()))
        length = shape.length
        # How many properties there are matters only up to here; 0 means that no comma is due.
        self._top = max(1, length.least, length.most or 0)
        # Nodes by what is written: behind it, behind the comma after it, before an entry's name.
        self._behind: dict[_Written, int] = {}
        self._before: dict[_Written, int] = {}
        self._names: dict[_Written, int] = {}
        self._extras: dict[_Written, int] = {}
        self._queue: list[_Written] = []
        self._end = 0

    def run(self, ends: Ends) -> None:
        """Write the object between two nodes."""
        self._end = ends.end
        first = _Written(0, 0)
        opened = self._nfa.node()
        self._nfa.literal(ends.source, b"{", opened)
        self._nfa.skip(opened, self._entry(first))
        if self._may_close(first):
            self._nfa.literal(opened, b"}", ends.end)
        for written in self._queue:
            self._go_on(written)

    def _entry(self, written: _Written) -> int:
        """Return the node where the name of the next property comes."""
        if written not in self._before:
            self._before[written] = self._nfa.node()
            self._queue.append(written)
        return self._before[written]

    def _go_on(self, written: _Written) -> None:
        most = self._shape.length.most
        if most is not None and written.number >= most:
            return
        source = self._before[written]
        entries = self._entries
        after = _Written(written.entry + 1, min(written.number + 1, self._top))
        if written.entry < len(entries):
            entry = entries[written.entry]
            self._nfa.skip(source, self._named(entry, after))
            if not entry.required:
                self._nfa.skip(source, self._entry(written._replace(entry=written.entry + 1)))
            return
        if self._shape.extras:
            self._nfa.skip(source, self._extra(after._replace(entry=written.entry)))

    def _extra(self, after: _Written) -> int:
        """Return the node before a property that no schema names."""
        if after not in self._extras:
            node = self._extras[after] = self._nfa.node()
            for extra in self._shape.extras:
                value, colon = self._nfa.node(), self._nfa.node()
                names = self._notation.names(extra.names.content, extra.names.length)
                self._nfa.embed(node, names, colon)
                self._nfa.choices(colon, self._notation.colons, value)
                self._nfa.embed(value, self._value(extra.value), self._after(after))
        return self._extras[after]

    def _named(self, entry: Entry, after: _Written) -> int:
        """Return the node before an entry's name; it is written once, first or behind others."""
        if after not in self._names:
            node, value, colon = self._nfa.node(), self._nfa.node(), self._nfa.node()
            self._names[after] = node
            self._nfa.literal(node, self._notation.name(entry.name), colon)
            self._nfa.choices(colon, self._notation.colons, value)
            self._nfa.embed(value, self._value(entry.value), self._after(after))
        return self._names[after]

    def _after(self, written: _Written) -> int:
        """Return the node behind a property."""
        if written not in self._behind:
            node = self._behind[written] = self._nfa.node()
            self._nfa.choices(node, self._notation.commas, self._entry(written))
            if self._may_close(written):
                self._nfa.literal(node, b"}", self._end)
        return self._behind[written]

    def _may_close(self, written: _Written) -> bool:
        left = self._entries[written.entry :]
        return written.number >= self._shape.length.least and not any(x.required for x in left)

"""From shapes to one automaton over the bytes of values, in some notation.

One space at most follows a comma or a colon, and none stands elsewhere: a model that may write any
amount of white space can write nothing else for ever. A schema within itself has no automaton.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from jaxserve.guided.automaton import Dfa
from jaxserve.guided.cases import Cases
from jaxserve.guided.composing import Nfa
from jaxserve.guided.conditions import Literal, refusal
from jaxserve.guided.notation import Notation
from jaxserve.guided.numbers import ANY_NUMBER, numbers
from jaxserve.guided.regex import any_text
from jaxserve.guided.shapes import ANY, Array, Entry, Fixed, Key, Number, Object, Shape, Text
from jaxserve.guided.strings import ANY_LENGTH

FREE_DEPTH = 5
"""How deep lists and objects nest in a value of which nothing is asked."""

MAX_NODES = 400_000
MAX_UNIQUE_VALUES = 8
"""Different values of a list with uniqueItems: each set of used ones is a state."""


class NeedsStackError(Exception):
    """A schema is a part of itself."""


@lru_cache(maxsize=16)
def any_value(depth: int, notation: Notation) -> Dfa:
    """Return all values, nested at most so deep."""
    nfa = Nfa()
    end = nfa.node()
    nfa.choices(0, (b"null", b"true", b"false"), end)
    nfa.embed(0, numbers(ANY_NUMBER), end)
    nfa.embed(0, notation.string(any_text(), ANY_LENGTH), end)
    if depth:
        part = any_value(depth - 1, notation)
        for brackets in (b"[]", b"{}"):
            first, after = nfa.node(), nfa.node()
            nfa.literal(0, brackets[:1], first)
            nfa.literal(first, brackets[1:], end)
            item = nfa.node()
            nfa.skip(first, item)
            value = _any_name(nfa, item, notation) if brackets == b"{}" else item
            nfa.embed(value, part, after)
            nfa.literal(after, brackets[1:], end)
            nfa.choices(after, notation.commas, item)
    return nfa.determinize(end)


def _any_name(nfa: Nfa, source: int, notation: Notation) -> int:
    after, value = nfa.node(), nfa.node()
    nfa.embed(source, notation.names(any_text(), ANY_LENGTH), after)
    nfa.choices(after, notation.colons, value)
    return value


class _Written(NamedTuple):
    """How far an object is: its next entry, and how many properties it has."""

    entry: int
    number: int


class _Listed(NamedTuple):
    """How far a list is: items so far, how many fitted each counted schema, values used."""

    place: int
    counts: tuple[int, ...]
    used: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Ends:
    """Where a fragment begins and ends in the workshop."""

    source: int
    end: int


class JsonAutomata:
    """The automata of a document's schemas, each made once."""

    def __init__(self, cases: Cases, notation: Notation) -> None:
        self._cases = cases
        self._notation = notation
        self._known: dict[Key, Dfa] = {}
        self._alike: dict[tuple[Shape, ...], Dfa] = {}
        self._under_way: set[Key] = set()

    def value(self, key: Key) -> Dfa:
        """Return the texts of values that fit schemas.

        Raises:
            NeedsStackError: they are a part of themselves.
            AutomatonTooLargeError: there are more than MAX_NODES places.
            SchemaError: a keyword is wrong or cannot be enforced.
        """
        if key == ANY:
            return any_value(FREE_DEPTH, self._notation)
        known = self._known.get(key)
        if known is None:
            if key in self._under_way:
                raise NeedsStackError
            self._under_way.add(key)
            try:
                known = self._of_shapes(self._cases.shapes(key))
            finally:
                self._under_way.discard(key)
            self._known[key] = known
        return known

    def objects(self, key: Key) -> Dfa:
        """Return the objects among them; errors as in `value`."""
        return self._of_shapes(self._cases.of_type(key, "object"))

    def _of_shapes(self, shapes: tuple[Shape, ...]) -> Dfa:
        """Return the texts of some shapes; properties are often alike."""
        known = self._alike.get(shapes)
        if known is None:
            nfa = Nfa(MAX_NODES)
            ends = _Ends(0, nfa.node())
            for shape in shapes:
                self._write(nfa, shape, ends)
            known = self._alike[shapes] = nfa.determinize(ends.end)
        return known

    def _write(self, nfa: Nfa, shape: Shape, ends: _Ends) -> None:
        if isinstance(shape, Fixed):
            nfa.choices(ends.source, map(self._notation.scalar, sorted(shape.texts)), ends.end)
        elif isinstance(shape, Number):
            nfa.embed(ends.source, numbers(shape.wanted), ends.end)
        elif isinstance(shape, Text):
            string = self._notation.string(shape.texts.content, shape.texts.length)
            nfa.embed(ends.source, string, ends.end)
        elif isinstance(shape, Array):
            _ArrayWriter(self, self._cases, nfa, shape, self._notation).run(ends)
        else:
            _ObjectWriter(self, nfa, shape, self._notation).run(ends)


class _ObjectWriter:
    """Writes an object: entries in order, optional ones left out or not, extras behind them."""

    def __init__(self, automata: JsonAutomata, nfa: Nfa, shape: Object, notation: Notation) -> None:
        self._automata = automata
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

    def run(self, ends: _Ends) -> None:
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
                self._nfa.embed(value, self._automata.value(extra.value), self._after(after))
        return self._extras[after]

    def _named(self, entry: Entry, after: _Written) -> int:
        """Return the node before an entry's name; it is written once, first or behind others."""
        if after not in self._names:
            node, value, colon = self._nfa.node(), self._nfa.node(), self._nfa.node()
            self._names[after] = node
            self._nfa.literal(node, self._notation.name(entry.name), colon)
            self._nfa.choices(colon, self._notation.colons, value)
            self._nfa.embed(value, self._automata.value(entry.value), self._after(after))
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


class _ArrayWriter:
    """Writes a list: nodes by how far it is."""

    def __init__(
        self, automata: JsonAutomata, cases: Cases, nfa: Nfa, shape: Array, notation: Notation
    ) -> None:
        self._automata = automata
        self._cases = cases
        self._nfa = nfa
        self._shape = shape
        self._notation = notation
        length = shape.length
        starts = (counted.start for counted in shape.counted)
        # From here on all items are alike, and only an upper bound counts them.
        self._top = max(len(shape.prefix), length.least, length.most or 0, *starts, 0)
        self._before: dict[_Listed, int] = {}
        self._behind: dict[_Listed, int] = {}
        self._queue: list[_Listed] = []
        self._end = 0

    def run(self, ends: _Ends) -> None:
        """Write the list between two nodes."""
        self._end = ends.end
        first = _Listed(0, (0,) * len(self._shape.counted))
        opened = self._nfa.node()
        self._nfa.literal(ends.source, b"[", opened)
        self._nfa.skip(opened, self._item(first))
        if self._may_close(first):
            self._nfa.literal(opened, b"]", ends.end)
        for listed in self._queue:
            most = self._shape.length.most
            if most is None or listed.place < most:
                self._go_on(listed)

    def _item(self, listed: _Listed) -> int:
        if listed not in self._before:
            self._before[listed] = self._nfa.node()
            self._queue.append(listed)
        return self._before[listed]

    def _after(self, listed: _Listed) -> int:
        if listed not in self._behind:
            node = self._behind[listed] = self._nfa.node()
            self._nfa.choices(node, self._notation.commas, self._item(listed))
            if self._may_close(listed):
                self._nfa.literal(node, b"]", self._end)
        return self._behind[listed]

    def _may_close(self, listed: _Listed) -> bool:
        enough = all(
            count in counted.length
            for count, counted in zip(listed.counts, self._shape.counted, strict=True)
        )
        return enough and listed.place >= self._shape.length.least

    def _go_on(self, listed: _Listed) -> None:
        shape = self._shape
        source = self._before[listed]
        key = shape.prefix[listed.place] if listed.place < len(shape.prefix) else shape.rest
        index = min(listed.place + 1, self._top)
        if shape.unique is not None:
            for identity, texts in unique_values(self._cases, shape, key):
                if identity not in listed.used:
                    used = listed.used | {identity}
                    after = _Listed(index, listed.counts, used)
                    spelled = map(self._notation.scalar, texts)
                    self._nfa.choices(source, spelled, self._after(after))
            return
        for variant, counts in self._variants(key, listed):
            after = _Listed(index, counts)
            self._nfa.embed(source, self._automata.value(variant), self._after(after))

    def _variants(self, key: Key, listed: _Listed) -> Iterator[tuple[Key, tuple[int, ...]]]:
        """Split an item by which counted schemas it fits."""
        variants: list[tuple[Key, tuple[int, ...]]] = [(key, ())]
        for count, counted in zip(listed.counts, self._shape.counted, strict=True):
            if listed.place < counted.start:
                variants = [(one, (*counts, count)) for one, counts in variants]
                continue
            length, schema = counted.length, counted.schema
            other = Literal(schema.pointer, not schema.positive)
            more = count + 1 if length.most is not None else min(count + 1, length.least)
            split = [(self._cases.key(*one, other), (*counts, count)) for one, counts in variants]
            if length.most is None or more <= length.most:
                split += [
                    (self._cases.key(*one, schema), (*counts, more)) for one, counts in variants
                ]
            variants = split
        yield from ((one, counts) for one, counts in variants if not self._cases.is_empty(one))


def unique_values(cases: Cases, shape: Array, key: Key) -> list[tuple[str, list[bytes]]]:
    """Return the finitely many values of a list's item, each with its name and texts.

    Raises:
        SchemaError: there are too many.
    """
    values: dict[str, list[bytes]] = {}
    for form in cases.shapes(key):
        if not isinstance(form, Fixed):
            raise refusal(
                shape.unique or "", "uniqueItems", "needs items of an enum of simple values"
            )
        for text in sorted(form.texts):
            values.setdefault(_identity(json.loads(text)), []).append(text)
    if len(values) > MAX_UNIQUE_VALUES or shape.counted:
        raise refusal(
            shape.unique or "",
            "uniqueItems",
            f"needs items of at most {MAX_UNIQUE_VALUES} different values, and no contains",
        )
    return list(values.items())


def _identity(value: Any) -> str:
    """Name a simple value as JSON Schema tells values apart: 1 and 1.0 are one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return repr(value)

"""The automata of lists, whose items may be counted, by what they fit, or have to differ."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxserve.guided.automaton import Dfa
from jaxserve.guided.cases import Cases
from jaxserve.guided.composing import Nfa
from jaxserve.guided.conditions import Literal, refusal
from jaxserve.guided.json_values import Ends
from jaxserve.guided.notation import Notation
from jaxserve.guided.shapes import Array, Fixed, Key

MAX_UNIQUE_VALUES = 8
"""Different values of a list with uniqueItems: each set of used ones is a state."""


class _Listed(NamedTuple):
    """How far a list is: items so far, how many fitted each counted schema, values used."""

    place: int
    counts: tuple[int, ...]
    used: frozenset[str] = frozenset()


class ArrayWriter:
    """Writes a list: nodes by how far it is."""

    def __init__(
        self, value: Callable[[Key], Dfa], cases: Cases, nfa: Nfa, shape: Array, notation: Notation
    ) -> None:
        self._value = value
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

    def run(self, ends: Ends) -> None:
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
            self._nfa.embed(source, self._value(variant), self._after(after))

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

"""From shapes to one automaton over the bytes of values, in some notation.

One space at most follows a comma or a colon, and none stands elsewhere: a model that may write any
amount of white space can write nothing else for ever. A schema within itself has no automaton.
"""

from jaxserve.guided.automaton import Dfa
from jaxserve.guided.cases import Cases
from jaxserve.guided.composing import Nfa
from jaxserve.guided.json_lists import ArrayWriter
from jaxserve.guided.json_objects import ObjectWriter
from jaxserve.guided.json_values import FREE_DEPTH, Ends, any_value
from jaxserve.guided.notation import Notation
from jaxserve.guided.numbers import numbers
from jaxserve.guided.shapes import ANY, Array, Fixed, Key, Number, Shape, Text

MAX_NODES = 400_000


class NeedsStackError(Exception):
    """A schema is a part of itself."""


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
            ends = Ends(0, nfa.node())
            for shape in shapes:
                self._write(nfa, shape, ends)
            known = self._alike[shapes] = nfa.determinize(ends.end)
        return known

    def _write(self, nfa: Nfa, shape: Shape, ends: Ends) -> None:
        if isinstance(shape, Fixed):
            nfa.choices(ends.source, map(self._notation.scalar, sorted(shape.texts)), ends.end)
        elif isinstance(shape, Number):
            nfa.embed(ends.source, numbers(shape.wanted), ends.end)
        elif isinstance(shape, Text):
            string = self._notation.string(shape.texts.content, shape.texts.length)
            nfa.embed(ends.source, string, ends.end)
        elif isinstance(shape, Array):
            ArrayWriter(self.value, self._cases, nfa, shape, self._notation).run(ends)
        else:
            ObjectWriter(self.value, nfa, shape, self._notation).run(ends)

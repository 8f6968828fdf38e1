"""Atoms on an object that all hold, merged into one shape.

Which properties are written is decided here: those that schemas name, in their order, and others
only where a schema speaks of them.
"""

import json
from itertools import product

from jaxserve.errors import SchemaError
from jaxserve.guided import conditions as c
from jaxserve.guided.composing import literals
from jaxserve.guided.conditions import And, Atom, Formula, Literal, refusal
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.merging import Knows, content_of, search_of
from jaxserve.guided.shapes import Entry, Extra, Fixed, Key, Object, Shape, Text, Texts
from jaxserve.guided.strings import ANY_LENGTH, Length

MAX_PATTERNS = 4
"""Of patternProperties that may hold of one name: each combination is a language of its own."""


def options_of(cases: Knows, atom: Atom, atoms: list[Atom]) -> tuple[Formula, ...] | None:
    """Return what a condition that some property fulfils comes to: one option a property.

    None for other conditions.
    """
    if not isinstance(atom, (c.SomeOf, c.SomeNameFits)):
        return None
    view = _Properties(cases, atoms)
    if view.is_open:
        raise refusal(
            atom.pointer,
            "not" if isinstance(atom, c.SomeOf) else "propertyNames",
            "would ask for some property of any name",
        )
    options: list[Formula] = []
    for name in view.names:
        if isinstance(atom, c.SomeNameFits):
            if view.name_fits(name, atom.schema):
                options.append(c.Has(name, declared=False))
        elif view.is_about(atom.which, name):
            fits = c.Property(name, atom.schema, declared=False)
            options.append(And((c.Has(name, declared=False), fits)))
    return tuple(options)


def merge_object(
    cases: Knows, atoms: list[Atom], *, scope: str | None
) -> tuple[Shape | None, bool]:
    """Return the shape of an object; None where no value is left.

    And whether it has a property that is there only because another schema must not fit. `scope`:
    the place of the schema that all atoms come from, None where there are several.
    """
    view = _Properties(cases, atoms, scope)
    entries = []
    foreign = False
    for name in view.names:
        value = view.value(name)
        possible = name not in view.lacking and view.name_is_allowed(name)
        possible = possible and not cases.is_empty(value)
        required = name in view.required
        if required and not possible:
            return None, False
        if possible and (name in view.declared or required):
            entries.append(Entry(name, value, required))
            foreign = foreign or name not in view.declared
    extras = view.extras()
    length = _properties_length(view, entries, extras)
    if length is None:
        return None, False
    return Object(entries=tuple(entries), extras=extras, length=length), foreign


def _properties_length(
    view: "_Properties", entries: list[Entry], extras: tuple[Extra, ...]
) -> Length | None:
    """Return the length that is still to be counted; None where none is possible."""
    length = view.length
    num_required = sum(entry.required for entry in entries)
    if length.is_empty or (length.most is not None and length.most < num_required):
        return None
    if length.least > len(entries) + bool(extras):
        if extras:
            raise refusal(
                view.count_pointer,
                "minProperties",
                "above 1 cannot be enforced for properties without names in the schema",
            )
        return None
    least = length.least if length.least > num_required else 0
    most = length.most
    if not extras and most is not None and most >= len(entries):
        most = None
    return Length(least, most)


class _Properties:
    """Which properties an object's atoms speak of."""

    def __init__(self, cases: Knows, atoms: list[Atom], scope: str | None = None) -> None:
        self._cases = cases
        self._properties = [x for x in atoms if isinstance(x, c.Property)]
        self._all_of = [x for x in atoms if isinstance(x, c.AllOf)]
        self._names_fit = [x for x in atoms if isinstance(x, c.NamesFit)]
        has = [x for x in atoms if isinstance(x, c.Has)]
        self.required = {x.name for x in has}
        self.lacking = {x.name for x in atoms if isinstance(x, c.Lacks)}
        self.declared = {x.name for x in self._properties if x.declared}
        self.declared |= {x.name for x in has if x.declared}
        listed = dict.fromkeys(x.name for x in self._properties if x.declared)
        self.names = list(
            listed
            | dict.fromkeys(x.name for x in has)
            | dict.fromkeys(x.name for x in self._properties)
        )
        self.length = ANY_LENGTH
        self.count_pointer = ""
        for atom in atoms:
            if isinstance(atom, c.Counts):
                self.length = self.length.meet(atom.length)
                self.count_pointer = atom.pointer
        self._closed = any(isinstance(x, c.Declares) for x in atoms)
        self._read_unevaluated(atoms, scope)

    def _read_unevaluated(self, atoms: list[Atom], scope: str | None) -> None:
        for atom in atoms:
            if not isinstance(atom, c.Unevaluated):
                continue
            if atom.pointer != scope:
                # It sees only what its own schema speaks of, and not those it is merged with.
                raise refusal(
                    atom.pointer, "unevaluatedProperties", "cannot be merged with other schemas"
                )
            if any(isinstance(x.which, c.Others) for x in self._all_of):
                continue  # additionalProperties evaluates all
            names = frozenset(x.name for x in self._properties if x.declared)
            patterns = frozenset(x.which for x in self._all_of if isinstance(x.which, str))
            which = c.Others(names, patterns)
            self._all_of.append(c.AllOf(which, atom.schema, atom.pointer))

    @property
    def is_open(self) -> bool:
        """Whether properties may be written that no schema names."""
        return bool(self.extras())

    def is_about(self, which: str | c.Others, name: str) -> bool:
        """Whether a condition on some properties is about that of a name."""
        if isinstance(which, str):
            return self._matches(which, name)
        return name not in which.names and not any(
            self._matches(pattern, name) for pattern in which.patterns
        )

    def value(self, name: str) -> Key:
        """Return the schemas that the property of a name fits."""
        return self._cases.key(
            *(x.schema for x in self._properties if x.name == name),
            *(x.schema for x in self._all_of if self.is_about(x.which, name)),
        )

    def name_is_allowed(self, name: str) -> bool:
        """Whether conditions on names allow a name."""
        return all(self.name_fits(name, atom.schema) for atom in self._names_fit)

    def name_fits(self, name: str, schema: Literal) -> bool:
        """Whether a name, as a string, fits a schema."""
        for shape in self._cases.of_type(self._cases.key(schema), "string"):
            if isinstance(shape, Text):
                if name in shape.texts:
                    return True
            elif isinstance(shape, Fixed) and scalar_text(name) in shape.texts:
                return True
        return False

    def extras(self) -> tuple[Extra, ...]:
        """Return the properties that no schema names, by what their values fit."""
        opened = any(isinstance(x.which, c.Others) for x in self._all_of) or not self._closed
        patterns = self._patterns()
        if not opened and not any(isinstance(x.which, str) for x in self._all_of):
            return ()
        if len(patterns) > MAX_PATTERNS:
            raise SchemaError(
                f"more than {MAX_PATTERNS} patternProperties of one object are too complex",
                path=next(iter(patterns.values())),
                keyword="patternProperties",
                code="schema_too_complex",
            )
        known = frozenset(self.names) | self.lacking
        for x in self._all_of:
            if isinstance(x.which, c.Others):
                known |= x.which.names
        found = []
        for choice in product((True, False), repeat=len(patterns)):
            matched = {pattern for pattern, is_in in zip(patterns, choice, strict=True) if is_in}
            if not opened and not any(x.which in matched for x in self._all_of):
                continue
            asked = tuple(
                c.Matches(pattern, pointer, pattern in matched)
                for pattern, pointer in patterns.items()
            )
            value = self._value_of_others(matched)
            if not self._cases.is_empty(value):
                found += [Extra(texts, value) for texts in self._names_like(asked, known)]
        return tuple(found)

    def _patterns(self) -> dict[str, str]:
        """Return the expressions that conditions tell names apart by, and their places."""
        patterns: dict[str, str] = {}
        for atom in self._all_of:
            names = {atom.which} if isinstance(atom.which, str) else atom.which.patterns
            patterns |= dict.fromkeys(sorted(names), atom.pointer)
        return patterns

    def _value_of_others(self, matched: set[str]) -> Key:
        schemas = []
        for atom in self._all_of:
            if isinstance(atom.which, str):
                applies = atom.which in matched
            else:
                applies = not atom.which.patterns & matched
            if applies:
                schemas.append(atom.schema)
        return self._cases.key(*schemas)

    def _names_like(self, asked: tuple[c.Matches, ...], known: frozenset[str]) -> list[Texts]:
        """Return the names that are not known and that all conditions on names allow."""
        if not self._names_fit:
            texts = Texts(content_of(asked, known), ANY_LENGTH, asked, known)
            return [] if texts.is_empty else [texts]
        fitting = self._cases.of_type(
            self._cases.key(*(atom.schema for atom in self._names_fit)), "string"
        )
        found = []
        for shape in fitting:
            if isinstance(shape, Text):
                own = shape.texts
                all_asked = (*asked, *own.asked)
                without = known | own.without
                texts = Texts(content_of(all_asked, without), own.length, all_asked, without)
                if not texts.is_empty:
                    found.append(texts)
            elif isinstance(shape, Fixed):
                own_names = {json.loads(text) for text in shape.texts} - known
                content = content_of(asked, frozenset())
                fitting_names = [name for name in own_names if content.accepts(name.encode())]
                if fitting_names:
                    listed = literals(name.encode() for name in fitting_names)
                    found.append(Texts(listed, ANY_LENGTH, only=frozenset(fitting_names)))
        return found

    def _matches(self, pattern: str, name: str) -> bool:
        pointer = self._patterns().get(pattern, "")
        return search_of(c.Matches(pattern, pointer)).accepts(name.encode())

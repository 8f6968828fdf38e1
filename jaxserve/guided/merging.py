"""Atoms that all hold, merged into one shape.

Which of an object's properties are written is decided here: those that schemas name, in their
order, and others only where a schema speaks of them.
"""

import json
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Protocol

from jaxserve.errors import SchemaError
from jaxserve.guided import conditions as c
from jaxserve.guided import regex
from jaxserve.guided.automaton import (
    AutomatonTooLargeError,
    Dfa,
    difference,
    intersection,
    literals,
)
from jaxserve.guided.conditions import And, Atom, Formula, Literal, TypeName, refusal
from jaxserve.guided.formats import format_texts
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.numbers import ANY_NUMBER, NumberRange, number_texts, numbers
from jaxserve.guided.shapes import (
    Array,
    Counted,
    Entry,
    Extra,
    Fixed,
    Key,
    Number,
    Object,
    Shape,
    Text,
    Texts,
)
from jaxserve.guided.strings import ANY_LENGTH, Length

MAX_PATTERNS = 4
"""Of patternProperties that may hold of one name: each combination is a language of its own."""


class Knows(Protocol):
    """What is asked of the cases."""

    def shapes(self, key: Key) -> tuple[Shape, ...]:
        """Return the shapes of a set of schemas."""

    def of_type(self, key: Key, kind: TypeName) -> tuple[Shape, ...]:
        """Return the shapes of one type."""

    def is_empty(self, key: Key) -> bool:
        """Whether no value fits."""

    def key(self, *literals: Literal) -> Key:
        """Return a set of schemas."""


def merge_scalar(kind: TypeName, atoms: list[Atom]) -> Shape | None:
    """Return the shape of a null, boolean, number or string; None where no value is left."""
    if kind == "null":
        return Fixed(frozenset((b"null",)))
    if kind == "boolean":
        values = frozenset((True, False))
        for atom in atoms:
            if isinstance(atom, c.AmongBooleans):
                values &= atom.values
        texts = frozenset(b"true" if value else b"false" for value in values)
        return Fixed(texts) if texts else None
    return _merge_number(atoms) if kind == "number" else _merge_string(atoms)


def _merge_number(atoms: list[Atom]) -> Shape | None:
    wanted = ANY_NUMBER
    choices = None
    for atom in atoms:
        if isinstance(atom, c.AmongNumbers) and atom.positive:
            choices = atom.values if choices is None else choices & atom.values
        else:
            narrowed = _narrow(wanted, atom)
            if narrowed is None:
                return None
            wanted = narrowed
    if choices is not None:
        texts = [number_texts(value) for value in choices if value in wanted]
        return Fixed(frozenset().union(*texts)) if texts else None
    if wanted.is_empty or (wanted != ANY_NUMBER and numbers(wanted).is_empty):
        return None
    return Number(wanted)


def _narrow(wanted: NumberRange, atom: Atom) -> NumberRange | None:
    if isinstance(atom, c.IsInteger):
        if wanted.integer not in (None, atom.positive):
            return None
        return replace(wanted, integer=atom.positive)
    if isinstance(atom, c.Minimum):
        return wanted.at_least(atom.bound)
    if isinstance(atom, c.Maximum):
        return wanted.at_most(atom.bound)
    if isinstance(atom, c.MultipleOf):
        field = "multiples" if atom.positive else "not_multiples"
        return replace(wanted, **{field: getattr(wanted, field) | {atom.factor}})
    if isinstance(atom, c.AmongNumbers):
        return replace(wanted, excluded=wanted.excluded | atom.values)
    return wanted


def _merge_string(atoms: list[Atom]) -> Shape | None:
    choices = None
    without: frozenset[str] = frozenset()
    length = ANY_LENGTH
    asked: list[c.Matches | c.HasFormat] = []
    for atom in atoms:
        if isinstance(atom, c.AmongStrings):
            if not atom.positive:
                without |= atom.values
            else:
                choices = atom.values if choices is None else choices & atom.values
        elif isinstance(atom, c.Counts):
            length = length.meet(atom.length)
        elif isinstance(atom, c.Matches) or (
            isinstance(atom, c.HasFormat) and _format(atom) is not None
        ):
            asked.append(atom)
    if length.is_empty:
        return None
    texts = Texts(content_of(tuple(asked), without), length, tuple(asked), without)
    if choices is not None:
        left = [choice for choice in choices if choice in texts]
        return Fixed(frozenset(map(scalar_text, left))) if left else None
    return None if texts.is_empty else Text(texts)


@lru_cache(maxsize=256)
def content_of(asked: tuple[c.Matches | c.HasFormat, ...], without: frozenset[str]) -> Dfa:
    """Return the language of strings that conditions ask for, less some.

    Raises:
        SchemaError: an expression cannot be used, or all together are too large.
    """
    content = None
    try:
        for atom in asked:
            if isinstance(atom, c.HasFormat):
                texts = _format(atom)
                content = _both(content, texts)
            elif atom.positive:
                content = _both(content, _search(atom))
            else:
                content = difference(content or regex.any_text(), _search(atom))
        if without:
            excluded = literals(text.encode() for text in without)
            content = difference(content or regex.any_text(), excluded)
    except AutomatonTooLargeError:
        pointer = asked[0].pointer if asked else ""
        raise SchemaError(
            f"{pointer}: its expressions are too complex together",
            path=pointer,
            keyword="pattern",
            code="schema_too_complex",
        ) from None
    return content or regex.any_text()


def _both(left: Dfa | None, right: Dfa | None) -> Dfa | None:
    if left is None or right is None:
        return left or right
    return intersection(left, right)


def _search(atom: c.Matches) -> Dfa:
    try:
        return regex.search(atom.pattern)
    except SchemaError as error:
        raise SchemaError(
            f"{atom.pointer}: {error.message}",
            path=atom.pointer,
            keyword="pattern",
            code=error.code,
        ) from error


def _format(atom: c.HasFormat) -> Dfa | None:
    try:
        return format_texts(atom.name)
    except SchemaError as error:
        raise refusal(atom.pointer, "format", error.message) from error


def merge_array(cases: Knows, atoms: list[Atom]) -> Shape | None:
    """Return the shape of a list; None where no value is left."""
    length = ANY_LENGTH
    unique = None
    size = 0
    for atom in atoms:
        if isinstance(atom, c.Counts):
            length = length.meet(atom.length)
        elif isinstance(atom, c.Unique):
            unique = atom.pointer
        elif isinstance(atom, c.Item):
            size = max(size, atom.index + 1)
        elif isinstance(atom, c.Items):
            size = max(size, atom.start)
    prefix = []
    for index in range(size):
        key = cases.key(
            *(x.schema for x in atoms if isinstance(x, c.Item) and x.index == index),
            *(x.schema for x in atoms if isinstance(x, c.Items) and x.start <= index),
        )
        if cases.is_empty(key):
            length = length.meet(Length(0, index))
            break
        prefix.append(key)
    rest = cases.key(*(x.schema for x in atoms if isinstance(x, c.Items)))
    if len(prefix) == size and cases.is_empty(rest):
        length = length.meet(Length(0, size))
    if length.is_empty:
        return None
    return Array(
        prefix=tuple(prefix[: length.most]),
        rest=rest,
        length=length,
        counted=tuple(
            Counted(start=x.start, schema=x.schema, length=x.length)
            for x in atoms
            if isinstance(x, c.Contains) and x.length != ANY_LENGTH
        ),
        unique=unique if length.most is None or length.most > 1 else None,
    )


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
        pointer = next(x.pointer for x in self._all_of) if self._all_of else ""
        return _search(c.Matches(pattern, pointer)).accepts(name.encode())

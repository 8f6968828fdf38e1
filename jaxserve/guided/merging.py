"""Atoms that all hold, merged into the shape of a single value or a list."""

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from jaxserve.errors import SchemaError
from jaxserve.guided import conditions as c
from jaxserve.guided import regex
from jaxserve.guided.automaton import (
    AutomatonTooLargeError,
    Dfa,
    difference,
    intersection,
)
from jaxserve.guided.composing import literals
from jaxserve.guided.conditions import Atom, Literal, TypeName, refusal
from jaxserve.guided.formats import format_texts
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.number_ranges import ANY_NUMBER, NumberRange, number_texts
from jaxserve.guided.numbers import numbers
from jaxserve.guided.shapes import (
    Array,
    Counted,
    Fixed,
    Key,
    Number,
    Shape,
    Text,
    Texts,
)
from jaxserve.guided.strings import ANY_LENGTH, Length


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
                content = _both(content, search_of(atom))
            else:
                content = difference(content or regex.any_text(), search_of(atom))
        if without:
            excluded = literals(text.encode() for text in without)
            content = difference(content or regex.any_text(), excluded)
    except AutomatonTooLargeError:
        pointer = asked[0].pointer if asked else ""
        raise SchemaError(
            f"{pointer or 'the schema'}: its expressions are too complex together",
            path=pointer,
            keyword="pattern",
            code="schema_too_complex",
        ) from None
    return content or regex.any_text()


def _both(left: Dfa | None, right: Dfa | None) -> Dfa | None:
    if left is None or right is None:
        return left or right
    return intersection(left, right)


def search_of(atom: c.Matches) -> Dfa:
    """Return the strings in which an expression matches; errors name its place."""
    try:
        return regex.search(atom.pattern)
    except SchemaError as error:
        raise SchemaError(
            f"{atom.pointer or 'the schema'}: {error.message}",
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

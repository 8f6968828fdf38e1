"""What a schema asks of a value of one type, as a formula: and, or, atoms, and other schemas.

Every condition knows its exact contrary, which holds where it does not. So `not`, `oneOf`, `if` and
their nesting need no code of their own. One without a contrary refuses to have it.
"""

# ruff: noqa: D102 - what `contrary` is stands above

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal as OneOf

from jaxserve.errors import SchemaError
from jaxserve.guided.number_ranges import Bound
from jaxserve.guided.strings import Length

TypeName = OneOf["null", "boolean", "number", "string", "array", "object"]
TYPES: tuple[TypeName, ...] = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Literal:
    """The value fits the schema at a place, or (`positive` False) does not."""

    pointer: str
    positive: bool = True

    def contrary(self) -> "Formula":
        return Literal(self.pointer, not self.positive)


@dataclass(frozen=True, slots=True)
class And:
    """All parts hold; without parts: true."""

    parts: tuple["Formula", ...] = ()

    def contrary(self) -> "Formula":
        return Or(tuple(part.contrary() for part in self.parts))


@dataclass(frozen=True, slots=True)
class Or:
    """One of the parts holds; without parts: false."""

    parts: tuple["Formula", ...] = ()

    def contrary(self) -> "Formula":
        return And(tuple(part.contrary() for part in self.parts))


TRUE = And()
FALSE = Or()


def _outside(length: Length, within: Callable[[Length], "Formula"]) -> "Formula":
    """Return the counts that are not within a length."""
    parts = []
    if length.least:
        parts.append(within(Length(0, length.least - 1)))
    if length.most is not None:
        parts.append(within(Length(length.most + 1)))
    return Or(tuple(parts))


@dataclass(frozen=True, slots=True)
class AmongBooleans:
    """A boolean is one of some."""

    values: frozenset[bool]

    def contrary(self) -> "Formula":
        return AmongBooleans(frozenset((True, False)) - self.values)


@dataclass(frozen=True, slots=True)
class IsInteger:
    """A number is an integer, or is none."""

    positive: bool = True

    def contrary(self) -> "Formula":
        return IsInteger(not self.positive)


@dataclass(frozen=True, slots=True)
class Minimum:
    """A number is at or above a bound."""

    bound: Bound

    def contrary(self) -> "Formula":
        return Maximum(Bound(self.bound.value, not self.bound.inclusive))


@dataclass(frozen=True, slots=True)
class Maximum:
    """A number is at or below a bound."""

    bound: Bound

    def contrary(self) -> "Formula":
        return Minimum(Bound(self.bound.value, not self.bound.inclusive))


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """A number is a multiple of a factor, or is none."""

    factor: Decimal
    positive: bool = True

    def contrary(self) -> "Formula":
        return MultipleOf(self.factor, not self.positive)


@dataclass(frozen=True, slots=True)
class AmongNumbers:
    """A number is one of some, or is none of them."""

    values: frozenset[Decimal]
    positive: bool = True

    def contrary(self) -> "Formula":
        return AmongNumbers(self.values, not self.positive)


@dataclass(frozen=True, slots=True)
class AmongStrings:
    """A string is one of some, or is none of them."""

    values: frozenset[str]
    positive: bool = True

    def contrary(self) -> "Formula":
        return AmongStrings(self.values, not self.positive)


@dataclass(frozen=True, slots=True)
class Matches:
    """An expression matches somewhere in a string, or nowhere."""

    pattern: str
    pointer: str
    positive: bool = True

    def contrary(self) -> "Formula":
        return Matches(self.pattern, self.pointer, not self.positive)


@dataclass(frozen=True, slots=True)
class HasFormat:
    """A string has a format."""

    name: str
    pointer: str

    def contrary(self) -> "Formula":
        """Refuse: whether texts of another form have a format is left open by the standard."""
        raise refusal(self.pointer, "format", "cannot be negated")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many characters, items or properties there are."""

    length: Length
    pointer: str = ""

    def contrary(self) -> "Formula":
        return _outside(self.length, lambda length: Counts(length, self.pointer))


@dataclass(frozen=True, slots=True)
class Item:
    """The item at an index, if there is one, fits."""

    index: int
    schema: Literal

    def contrary(self) -> "Formula":
        return And((Counts(Length(self.index + 1)), Item(self.index, _contrary(self.schema))))


@dataclass(frozen=True, slots=True)
class Items:
    """All items from an index on fit."""

    start: int
    schema: Literal

    def contrary(self) -> "Formula":
        return Contains(self.start, _contrary(self.schema), Length(1))


@dataclass(frozen=True, slots=True)
class Contains:
    """So many of the items from an index on fit."""

    start: int
    schema: Literal
    length: Length

    def contrary(self) -> "Formula":
        return _outside(self.length, lambda length: Contains(self.start, self.schema, length))


@dataclass(frozen=True, slots=True)
class Unique:
    """No two items are equal."""

    pointer: str

    def contrary(self) -> "Formula":
        """Refuse: two equal items somewhere need a memory."""
        raise refusal(self.pointer, "uniqueItems", "cannot be negated")


@dataclass(frozen=True, slots=True)
class Property:
    """The property of a name, if there is one, fits; `declared`: the schema offers it."""

    name: str
    schema: Literal
    declared: bool = True

    def contrary(self) -> "Formula":
        fits_not = Property(self.name, _contrary(self.schema), declared=False)
        return And((Has(self.name, declared=False), fits_not))


@dataclass(frozen=True, slots=True)
class Has:
    """There is a property of a name; `declared`: the schema asks for it in so many words."""

    name: str
    declared: bool = True

    def contrary(self) -> "Formula":
        return Lacks(self.name)


@dataclass(frozen=True, slots=True)
class Lacks:
    """There is no property of a name."""

    name: str

    def contrary(self) -> "Formula":
        return Has(self.name, declared=False)


@dataclass(frozen=True, slots=True)
class Others:
    """Which properties a condition is about: named otherwise, and matching no expression."""

    names: frozenset[str]
    patterns: frozenset[str]


@dataclass(frozen=True, slots=True)
class AllOf:
    """All properties that `which` is about fit: a pattern they match, or others they are not."""

    which: str | Others
    schema: Literal
    pointer: str

    def contrary(self) -> "Formula":
        return SomeOf(self.which, _contrary(self.schema), self.pointer)


@dataclass(frozen=True, slots=True)
class SomeOf:
    """There is a property that `which` is about, and it fits."""

    which: str | Others
    schema: Literal
    pointer: str

    def contrary(self) -> "Formula":
        return AllOf(self.which, _contrary(self.schema), self.pointer)


@dataclass(frozen=True, slots=True)
class NamesFit:
    """All names of properties fit."""

    schema: Literal
    pointer: str

    def contrary(self) -> "Formula":
        return SomeNameFits(_contrary(self.schema), self.pointer)


@dataclass(frozen=True, slots=True)
class SomeNameFits:
    """There is a property whose name fits."""

    schema: Literal
    pointer: str

    def contrary(self) -> "Formula":
        return NamesFit(_contrary(self.schema), self.pointer)


@dataclass(frozen=True, slots=True)
class Unevaluated:
    """What no other keyword of the object or of those it applies speaks of fits."""

    schema: Literal
    pointer: str

    def contrary(self) -> "Formula":
        """Refuse: what is evaluated depends on how the rest holds."""
        raise refusal(self.pointer, "unevaluatedProperties", "cannot be negated")


@dataclass(frozen=True, slots=True)
class Declares:
    """The schema lists its properties and does not say that there are others: there are none.

    No condition of the standard, but what is written under it; so its contrary never holds.
    """

    def contrary(self) -> "Formula":
        """Return false: it does not matter where the rest does not hold."""
        return FALSE


NumberAtom = IsInteger | Minimum | Maximum | MultipleOf | AmongNumbers
StringAtom = AmongStrings | Matches | HasFormat | Counts
ArrayAtom = Counts | Item | Items | Contains | Unique
ObjectAtom = (
    Counts
    | Property
    | Has
    | Lacks
    | AllOf
    | SomeOf
    | NamesFit
    | SomeNameFits
    | Unevaluated
    | Declares
)
Atom = AmongBooleans | NumberAtom | StringAtom | ArrayAtom | ObjectAtom
Formula = And | Or | Literal | Atom


def refusal(pointer: str, keyword: str, why: str) -> SchemaError:
    """Return the error of a keyword that cannot be enforced."""
    return SchemaError(
        f"{pointer}/{keyword}: {keyword} {why}",
        code="unsupported_schema",
        path=pointer,
        keyword=keyword,
    )


def _contrary(literal: Literal) -> Literal:
    return Literal(literal.pointer, not literal.positive)

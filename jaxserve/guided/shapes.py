"""What a value may look like: the forms that schemas come to once all is merged and decided."""

from dataclasses import dataclass
from typing import TypeAlias

from jaxserve.guided.automaton import AutomatonTooLargeError, Dfa
from jaxserve.guided.conditions import HasFormat, Literal, Matches
from jaxserve.guided.number_ranges import NumberRange
from jaxserve.guided.strings import ANY_LENGTH, Length, quoted

Key: TypeAlias = frozenset[Literal]
"""Schemas that one value fits, all of them; empty: any value."""

ANY: Key = frozenset()


@dataclass(frozen=True, slots=True)
class Texts:
    """A string as its content's language and length.

    Where the language came from, for who does without automata: all that is asked, less the strings
    in `without`; or only the strings in `only`, where that is not None.
    """

    content: Dfa
    length: Length
    asked: tuple[Matches | HasFormat, ...] = ()
    without: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no string is left; too long ones to count are taken to be there."""
        if self.length.is_empty or self.content.is_empty:
            return True
        try:
            return quoted(self.content, self.length).is_empty
        except AutomatonTooLargeError:
            return False

    def __contains__(self, text: str) -> bool:
        return len(text) in self.length and self.content.accepts(text.encode())


@dataclass(frozen=True, slots=True)
class Fixed:
    """One of some JSON texts."""

    texts: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Number:
    """A number within a range."""

    wanted: NumberRange


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""

    texts: Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """So many of the items from `start` on fit a schema."""

    start: int
    schema: Literal
    length: Length


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A list: `prefix` by index, then `rest`.

    `unique` is the place that asks for items of which no two are equal, None where none does.
    """

    prefix: tuple[Key, ...]
    rest: Key
    length: Length
    counted: tuple[Counted, ...] = ()
    unique: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A property that a schema names."""

    name: str
    value: Key
    required: bool


@dataclass(frozen=True, slots=True)
class Extra:
    """Properties that no schema names."""

    names: Texts
    value: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """An object: entries in this order, extras behind them, `length` properties in all."""

    entries: tuple[Entry, ...]
    extras: tuple[Extra, ...] = ()
    length: Length = ANY_LENGTH


Shape: TypeAlias = Fixed | Number | Text | Array | Object

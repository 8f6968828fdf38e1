"""From JSON to typed values, one value at a time.

A reader takes a decoded JSON value and its path (`messages[2].content`) and returns a typed value
or raises a 400 naming that path; it also gives the JSON Schema of what it takes.
"""

# ruff: noqa: D102 - what a reader reads is its class's docstring

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeGuard, TypeVar

import orjson

from jaxserve.errors import InvalidRequestError, UnsupportedFieldError
from jaxserve.logs import MAX_REQUEST_ID_CHARS, REQUEST_ID, is_request_id

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Schema = dict[str, object]
"""A JSON Schema."""

MAX_DEPTH = 64
"""Levels of a free object: what walks it later, a template for one, recurses."""

NAME_PATTERN = "^[^\ufffd]*$"
_TOKEN_ID = re.compile(r"(?:0|[1-9][0-9]{0,8})")
_MAX_TOKEN_ID = 999_999_999


class Reader(Protocol[T_co]):
    """Turns the JSON value found at `path` into a typed one, or raises InvalidRequestError."""

    def __call__(self, value: object, path: str, /) -> T_co: ...

    def schema(self) -> Schema:
        """Return the JSON Schema of what it takes."""


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    def __call__(self, value: object, path: str) -> bool:
        if not isinstance(value, bool):
            raise wrong_type(path, "a boolean", value)
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}


def _is_integer(value: object) -> TypeGuard[int]:
    """Say whether a JSON value is an integer; to Python a boolean is one too."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Integer:
    """A JSON integer in [minimum, maximum]; neither a boolean nor 5.0."""

    minimum: int
    maximum: int

    def __call__(self, value: object, path: str) -> int:
        # orjson gives integers beyond 64 bits as floats.
        is_beyond = isinstance(value, float) and abs(value) >= 1 << 63
        if is_beyond or (_is_integer(value) and not self.minimum <= value <= self.maximum):
            limits = f"between {self.minimum} and {self.maximum}"
            raise InvalidRequestError(f"{path} must be {limits}, not {value}.", param=path)
        if not _is_integer(value):
            raise wrong_type(path, "an integer", value)
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True)
class Number:
    """A JSON number in [minimum, maximum], or in (minimum, maximum] where `above_minimum`."""

    minimum: float
    maximum: float
    above_minimum: bool = False

    def __call__(self, value: object, path: str) -> float:
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            raise wrong_type(path, "a number", value)
        too_low = value <= self.minimum if self.above_minimum else value < self.minimum
        if too_low or value > self.maximum:
            low = "greater than" if self.above_minimum else "at least"
            limits = f"{low} {self.minimum:g} and at most {self.maximum:g}"
            raise InvalidRequestError(f"{path} must be {limits}, not {value}.", param=path)
        return float(value)

    def schema(self) -> Schema:
        minimum = "exclusiveMinimum" if self.above_minimum else "minimum"
        return {"type": "number", minimum: self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True)
class Text:
    """A string of [min_length, max_length] characters."""

    min_length: int = 0
    max_length: int | None = None

    def __call__(self, value: object, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, "a string", value)
        if len(value) < self.min_length:
            raise InvalidRequestError(f"{path} must not be empty.", param=path)
        if self.max_length is not None and len(value) > self.max_length:
            raise InvalidRequestError(
                f"{path} must have at most {self.max_length} characters, not {len(value)}.",
                param=path,
            )
        return value

    def schema(self) -> Schema:
        schema: Schema = {"type": "string"}
        if self.min_length:
            schema["minLength"] = self.min_length
        if self.max_length is not None:
            schema["maxLength"] = self.max_length
        return schema


@dataclass(frozen=True, slots=True)
class Name:
    """A string that identifies something: not empty, and without U+FFFD.

    That is what an unpaired surrogate was made of, so that two names might have become one.
    """

    max_length: int = 512

    def __call__(self, value: object, path: str) -> str:
        name = Text(1, self.max_length)(value, path)
        if "\ufffd" in name:
            raise InvalidRequestError(
                f"{path} holds an unpaired surrogate or U+FFFD, which no name may.", param=path
            )
        return name

    def schema(self) -> Schema:
        return {**Text(1, self.max_length).schema(), "pattern": NAME_PATTERN}


@dataclass(frozen=True, slots=True)
class RequestId:
    """What a header and a line of a log can hold: 1 to 128 visible ASCII characters."""

    def __call__(self, value: object, path: str) -> str:
        request_id = Name(MAX_REQUEST_ID_CHARS)(value, path)
        if not is_request_id(request_id):
            raise InvalidRequestError(
                f"{path} must hold visible ASCII characters only, and no space.", param=path
            )
        return request_id

    def schema(self) -> Schema:
        return {
            "type": "string",
            "pattern": f"^{REQUEST_ID.pattern}$",
            "maxLength": MAX_REQUEST_ID_CHARS,
        }


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few strings."""

    options: tuple[str, ...]

    def __call__(self, value: object, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, "a string", value)
        if value not in self.options:
            raise InvalidRequestError(
                f"{path} must be one of {', '.join(self.options)}, not {show(value)}.", param=path
            )
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.options)}


@dataclass(frozen=True, slots=True)
class ListOf(Generic[T]):
    """A list of [min_items, max_items] values, each read by `item` at `path[i]`."""

    item: Reader[T]
    min_items: int = 0
    max_items: int | None = None

    def __call__(self, value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise wrong_type(path, "a list", value)
        if len(value) < self.min_items:
            raise InvalidRequestError(
                f"{path} must hold at least {self.min_items}, not {len(value)}.", param=path
            )
        if self.max_items is not None and len(value) > self.max_items:
            raise InvalidRequestError(
                f"{path} must hold at most {self.max_items}, not {len(value)}.", param=path
            )
        return tuple(self.item(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    def schema(self) -> Schema:
        schema: Schema = {"type": "array", "items": self.item.schema()}
        if self.min_items:
            schema["minItems"] = self.min_items
        if self.max_items is not None:
            schema["maxItems"] = self.max_items
        return schema


@dataclass(frozen=True, slots=True)
class OneOrMany(Generic[T]):
    """One bare value, or a list of at most `max_items`; a tuple either way."""

    item: Reader[T]
    max_items: int

    def __call__(self, value: object, path: str) -> tuple[T, ...]:
        if isinstance(value, list):
            return ListOf(self.item, max_items=self.max_items)(value, path)
        return (self.item(value, path),)

    def schema(self) -> Schema:
        many = ListOf(self.item, max_items=self.max_items).schema()
        return {"anyOf": [self.item.schema(), many]}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of [min_items, max_items] token ids."""

    min_items: int = 0
    max_items: int | None = None

    def __call__(self, value: object, path: str) -> tuple[int, ...]:
        # An id list may hold a whole context: one pass where it is right, and no path for each id.
        if (
            not isinstance(value, list)
            or len(value) < self.min_items
            or (self.max_items is not None and len(value) > self.max_items)
            or not value
        ):
            return self._list()(value, path)
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_TOKEN_ID:
            return tuple(value)
        is_right = [type(entry) is int and 0 <= entry <= _MAX_TOKEN_ID for entry in value]
        wrong = is_right.index(False)
        return (Integer(0, _MAX_TOKEN_ID)(value[wrong], f"{path}[{wrong}]"),)

    def schema(self) -> Schema:
        return self._list().schema()

    def _list(self) -> ListOf[int]:
        return ListOf(Integer(0, _MAX_TOKEN_ID), self.min_items, self.max_items)


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """An object from token ids, as decimal strings, to numbers in [-limit, limit].

    Gives pairs in ascending order of ids.
    """

    limit: float
    max_items: int

    def __call__(self, value: object, path: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise wrong_type(path, "an object", value)
        if len(value) > self.max_items:
            raise InvalidRequestError(
                f"{path} must hold at most {self.max_items}, not {len(value)}.", param=path
            )
        biases = {}
        for key, bias in value.items():
            if not _TOKEN_ID.fullmatch(key):
                raise InvalidRequestError(
                    f"{path}: the key {show(key)} is not a token id.", param=path
                )
            biases[int(key)] = Number(-self.limit, self.limit)(bias, f"{path}.{key}")
        return tuple(sorted(biases.items()))

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
            "additionalProperties": Number(-self.limit, self.limit).schema(),
            "maxProperties": self.max_items,
        }


@dataclass(frozen=True, slots=True)
class Mapped:
    """Any JSON object of at most MAX_DEPTH levels."""

    def __call__(self, value: object, path: str) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise wrong_type(path, "an object", value)
        level: list[dict[str, object] | list[object]] = [value]
        for _ in range(MAX_DEPTH):
            level = [
                child
                for entry in level
                for child in (entry.values() if isinstance(entry, dict) else entry)
                if isinstance(child, dict | list)
            ]
            if not level:
                return value
        raise InvalidRequestError(f"{path} is nested deeper than {MAX_DEPTH} levels.", param=path)

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value."""

    def __call__(self, value: object, path: str) -> object:
        return value

    def schema(self) -> Schema:
        return {}


@dataclass(frozen=True, slots=True)
class Neutral:
    """Accepts the values that ask for nothing, and refuses every other one as not supported."""

    values: tuple[object, ...] = ()

    def __call__(self, value: object, path: str) -> None:
        if not any(_same_json(value, neutral) for neutral in self.values):
            others = " or ".join(orjson.dumps(neutral).decode() for neutral in self.values)
            raise UnsupportedFieldError(
                f"{path} is not supported by this server{others and f', except as {others}'};"
                f" it was {show(value)}.",
                param=path,
            )

    def schema(self) -> Schema:
        return {"enum": [*self.values, None]}


@dataclass(frozen=True, slots=True)
class Inert:
    """Accepts what `reader` accepts and drops it: the field changes no answer."""

    reader: Reader[object]

    def __call__(self, value: object, path: str) -> None:
        self.reader(value, path)

    def schema(self) -> Schema:
        return self.reader.schema()


def wrong_type(path: str, wanted: str, value: object) -> InvalidRequestError:
    """Return the refusal of a value that is not `wanted`."""
    what = f"{path} must be" if path else "The body must be"
    return InvalidRequestError(
        f"{what} {wanted}, not {show(value)}.", param=path or None, code="invalid_type"
    )


def show(value: object) -> str:
    """Return a value for a message: containers by kind, long texts cut."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        value = value[:60]  # of millions, perhaps
    shown = orjson.dumps(value).decode()
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _same_json(a: object, b: object) -> bool:
    """Equal as JSON: 0 is 0.0, but true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return a == b

"""A JSON Schema as a document: read within limits, places named by pointers, references solved.

It knows which keywords hold schemas, and nothing else of what they mean.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urljoin

from jaxserve.errors import SchemaError

MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMA_DEPTH = 128
MAX_ENUM_VALUES = 10_000

_ROOT_URI = "root:"
_OF_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("additionalProperties", "propertyNames", "items", "contains", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Document:
    """A schema that was read; places are added where the reading makes schemas of its own."""

    def __init__(self, source: str) -> None:
        """Read JSON text.

        Raises:
            SchemaError: it is not JSON, not a schema, or too large or deep.
        """
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
            raise SchemaError(
                f"the schema has more than {MAX_SCHEMA_BYTES} bytes", code="schema_too_complex"
            )
        if _depth(source) > MAX_SCHEMA_DEPTH:
            raise SchemaError(
                f"the schema is nested deeper than {MAX_SCHEMA_DEPTH}", code="schema_too_complex"
            )
        try:
            root = json.loads(source, parse_float=Decimal, parse_constant=_refuse_constant)
        except (ValueError, ArithmeticError) as error:
            raise SchemaError(f"the schema is not JSON: {error}") from error
        self._places: dict[str, Any] = {"": root}
        self._base_uris: dict[str, str] = {}
        self._resources: dict[str, str] = {_ROOT_URI: ""}
        self._anchors: dict[str, str] = {}
        check_schema(root, "")
        self._index("", root, _ROOT_URI)

    def at(self, pointer: str) -> Any:
        """Return the value at a place."""
        return self._places[pointer]

    def child(self, pointer: str, *steps: str | int) -> str:
        """Return the place below another one, where there is one."""
        value = self._places[pointer]
        base = self._base_uris.get(pointer)
        for step in steps:
            value = value[step]
            pointer = f"{pointer}/{_escaped(str(step))}"
            if base is not None:
                self._base_uris.setdefault(pointer, base)
            self._places[pointer] = value
        return pointer

    def add(self, pointer: str, value: Any) -> str:
        """Put a schema of our own making at a place that the text does not have."""
        self._places.setdefault(pointer, value)
        return pointer

    def resolve(self, pointer: str, reference: str) -> str:
        """Return the place that a `$ref` at a place means.

        Raises:
            SchemaError: there is none in this document.
        """
        base = self._base_uris.get(pointer, _ROOT_URI)
        absolute, _, fragment = _join(base, reference).partition("#")
        fragment = unquote(fragment)
        if f"{absolute}#{fragment}" in self._anchors:
            return self._anchors[f"{absolute}#{fragment}"]
        resource = self._resources.get(absolute)
        if resource is None or (fragment and not fragment.startswith("/")):
            raise SchemaError(
                f"{pointer}/$ref: {reference!r} is not in this schema",
                path=pointer,
                keyword="$ref",
                code="unsupported_schema",
            )
        target = resource
        try:
            for step in fragment.split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                target = self.child(
                    target, int(name) if isinstance(self._places[target], list) else name
                )
        except (KeyError, IndexError, ValueError, TypeError):
            raise SchemaError(
                f"{pointer}/$ref: {reference!r} is not in this schema", path=pointer, keyword="$ref"
            ) from None
        check_schema(self._places[target], target)
        return target

    def _index(self, pointer: str, schema: Any, base: str) -> None:
        """Note what references may name: resources by their `$id`, anchors, bases of places."""
        if not isinstance(schema, dict):
            return
        if isinstance(schema.get("$id"), str):
            base = _join(base, schema["$id"]).partition("#")[0]
            self._resources.setdefault(base, pointer)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors.setdefault(f"{base}#{schema[keyword]}", pointer)
        self._base_uris[pointer] = base
        for steps in _subschemas(schema):
            place = self.child(pointer, *steps)
            self._index(place, self._places[place], base)


def check_schema(value: Any, pointer: str) -> None:
    """Refuse what is no schema."""
    if not isinstance(value, (dict, bool)):
        raise SchemaError(
            f"{pointer or 'the schema'} must be an object or a boolean, not {kind_of(value)}",
            path=pointer,
        )


def kind_of(value: Any) -> str:
    """Return JSON's name of a value's type."""
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def has_lone_surrogate(text: str) -> bool:
    """Whether a text could not be written in UTF-8."""
    return _SURROGATE.search(text) is not None


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    for keyword in _OF_SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            yield from ((keyword, name) for name in schema[keyword])
    for keyword in (*_LISTS, "items"):
        if isinstance(schema.get(keyword), list):
            yield from ((keyword, index) for index in range(len(schema[keyword])))
    yield from ((keyword,) for keyword in _SINGLE if isinstance(schema.get(keyword), (dict, bool)))


def _join(base: str, reference: str) -> str:
    # urljoin knows nothing of urn: and of our own root.
    if reference.startswith("#") or not reference:
        return base.partition("#")[0] + reference
    return urljoin(base, reference) or reference


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _depth(source: str) -> int:
    """Return how deep brackets nest, those in strings left out."""
    depth = deepest = 0
    for mark in re.findall(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', source, re.DOTALL):
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

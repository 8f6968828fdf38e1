"""The keywords of JSON Schema (draft 2020-12, and what draft 07 spelled otherwise) as conditions.

Each is exact or refused. Annotations and unknown keywords are ignored, as the standard says.
"""

from decimal import Decimal
from typing import Any

from jaxserve.errors import SchemaError
from jaxserve.guided import conditions as c
from jaxserve.guided.conditions import FALSE, TRUE, And, Formula, Literal, Or, TypeName, refusal
from jaxserve.guided.document import (
    MAX_ENUM_VALUES,
    Document,
    has_lone_surrogate,
    kind_of,
)
from jaxserve.guided.number_ranges import Bound
from jaxserve.guided.objects import OBJECT_KEYWORDS
from jaxserve.guided.schema_place import Place, Reader
from jaxserve.guided.strings import Length

_REFUSED = {
    "$dynamicRef": "is not supported",
    "$recursiveRef": "is not supported",
    "unevaluatedItems": "is not supported",
}
_TYPE_NAMES = (*c.TYPES, "integer")


def schema_formula(document: Document, pointer: str, kind: TypeName) -> Formula:
    """Return what the schema at a place asks of a value of a type.

    Raises:
        SchemaError: a keyword's value is wrong, or it cannot be enforced; its place is named.
    """
    schema = document.at(pointer)
    if isinstance(schema, bool):
        return TRUE if schema else FALSE
    place = Place(document, pointer, schema, kind)
    parts = []
    for keyword in schema:
        if keyword in _REFUSED and schema[keyword] is not True:
            raise refusal(pointer, keyword, _REFUSED[keyword])
        kinds, read = _KEYWORDS.get(keyword, ((), None))
        if read is not None and kind in kinds:
            parts.append(read(place, keyword, schema[keyword]))
    return And(tuple(part for part in parts if part != TRUE))


def asserts_nothing(schema: Any) -> bool:
    """Whether every value fits a schema, as one sees at a glance."""
    if isinstance(schema, dict):
        return not any(keyword in _KEYWORDS or keyword in _REFUSED for keyword in schema)
    return schema is True


def _type(place: Place, keyword: str, value: Any) -> Formula:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in _TYPE_NAMES:
            raise place.wrong(keyword, f"one or more of {', '.join(_TYPE_NAMES)}")
    if place.kind in names:
        return TRUE
    return c.IsInteger() if place.kind == "number" and "integer" in names else FALSE


def _enum(place: Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, list):
        raise place.wrong(keyword, "a list")
    if len(value) > MAX_ENUM_VALUES:
        raise SchemaError(
            f"{place.pointer}/enum has more than {MAX_ENUM_VALUES} values",
            path=place.pointer,
            keyword=keyword,
            code="schema_too_complex",
        )
    steps: list[tuple[str | int, ...]] = [(keyword, index) for index in range(len(value))]
    return _one_of_values(place, list(zip(steps, value, strict=True)))


def _const(place: Place, keyword: str, value: Any) -> Formula:
    return _one_of_values(place, [((keyword,), value)])


def _one_of_values(place: Place, values: list[tuple[tuple[str | int, ...], Any]]) -> Formula:
    own = [(steps, value) for steps, value in values if kind_of(value) == place.kind]
    if place.kind == "null":
        return TRUE if own else FALSE
    if place.kind == "boolean":
        return c.AmongBooleans(frozenset(value for _, value in own))
    if place.kind == "number":
        return c.AmongNumbers(frozenset(Decimal(value) for _, value in own))
    if place.kind == "string":
        return c.AmongStrings(frozenset(value for _, value in own if not has_lone_surrogate(value)))
    return Or(tuple(_structure(place, steps, value) for steps, value in own))


def _structure(place: Place, steps: tuple[str | int, ...], value: Any) -> Literal:
    """Return that a value is one object or list, written as a schema of its parts."""
    pointer = place.document.child(place.pointer, *steps) + "/(value)"
    schema: dict[str, Any]
    if isinstance(value, dict):
        schema = {
            "properties": {name: {"const": part} for name, part in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    else:
        schema = {
            "prefixItems": [{"const": part} for part in value],
            "minItems": len(value),
            "maxItems": len(value),
        }
    return Literal(place.document.add(pointer, schema | {"type": kind_of(value)}))


def _ref(place: Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, str):
        raise place.wrong(keyword, "a string")
    return Literal(place.document.resolve(place.pointer, value))


def _all_of(place: Place, keyword: str, value: Any) -> Formula:
    return And(tuple(place.schema_list(keyword, value)))


def _any_of(place: Place, keyword: str, value: Any) -> Formula:
    return Or(tuple(place.schema_list(keyword, value)))


def _one_of(place: Place, keyword: str, value: Any) -> Formula:
    schemas = place.schema_list(keyword, value)
    return Or(
        tuple(
            And((one, *(other.contrary() for other in schemas if other != one))) for one in schemas
        )
    )


def _not(place: Place, keyword: str, value: Any) -> Formula:
    return place.subschema(keyword).contrary()


def _if(place: Place, keyword: str, value: Any) -> Formula:
    condition = place.subschema(keyword)
    then, otherwise = (
        place.subschema(name) if name in place.schema else TRUE for name in ("then", "else")
    )
    if then == otherwise == TRUE:
        return TRUE
    return Or((And((condition, then)), And((condition.contrary(), otherwise))))


def _bound(place: Place, keyword: str, value: Any) -> Formula:
    bound = Bound(place.number(keyword, value), inclusive="exclusive" not in keyword)
    return c.Minimum(bound) if keyword.lower().endswith("minimum") else c.Maximum(bound)


def _multiple_of(place: Place, keyword: str, value: Any) -> Formula:
    factor = place.number(keyword, value)
    if factor <= 0:
        raise place.wrong(keyword, "a number above 0")
    return c.MultipleOf(factor)


def _counts(place: Place, keyword: str, value: Any) -> Formula:
    count = place.count(keyword, value)
    length = Length(count) if keyword.startswith("min") else Length(0, count)
    return c.Counts(length, place.pointer)


def _pattern(place: Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, str):
        raise place.wrong(keyword, "a string")
    return c.Matches(value, place.pointer)


def _format(place: Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, str):
        raise place.wrong(keyword, "a string")
    return c.HasFormat(value, place.pointer)


def _prefix_items(place: Place, keyword: str, value: Any) -> Formula:
    schemas = place.schema_list(keyword, value)
    return And(tuple(c.Item(index, schema) for index, schema in enumerate(schemas)))


def _items(place: Place, keyword: str, value: Any) -> Formula:
    if isinstance(value, list):  # draft 07's way to write prefixItems
        parts = [_prefix_items(place, keyword, value)]
        if "additionalItems" in place.schema:
            parts.append(c.Items(len(value), place.subschema("additionalItems")))
        return And(tuple(parts))
    prefix = place.schema.get("prefixItems")
    return c.Items(len(prefix) if isinstance(prefix, list) else 0, place.subschema(keyword))


def _contains(place: Place, keyword: str, value: Any) -> Formula:
    least = place.count("minContains", place.schema.get("minContains", 1))
    most = place.schema.get("maxContains")
    length = Length(least, None if most is None else place.count("maxContains", most))
    return c.Contains(0, place.subschema(keyword), length)


def _unique_items(place: Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, bool):
        raise place.wrong(keyword, "a boolean")
    return c.Unique(place.pointer) if value else TRUE


_KEYWORDS: dict[str, tuple[tuple[TypeName, ...], Reader]] = {
    "$ref": (c.TYPES, _ref),
    "type": (c.TYPES, _type),
    "enum": (c.TYPES, _enum),
    "const": (c.TYPES, _const),
    "allOf": (c.TYPES, _all_of),
    "anyOf": (c.TYPES, _any_of),
    "oneOf": (c.TYPES, _one_of),
    "not": (c.TYPES, _not),
    "if": (c.TYPES, _if),
    "minimum": (("number",), _bound),
    "maximum": (("number",), _bound),
    "exclusiveMinimum": (("number",), _bound),
    "exclusiveMaximum": (("number",), _bound),
    "multipleOf": (("number",), _multiple_of),
    "minLength": (("string",), _counts),
    "maxLength": (("string",), _counts),
    "pattern": (("string",), _pattern),
    "format": (("string",), _format),
    "prefixItems": (("array",), _prefix_items),
    "items": (("array",), _items),
    "contains": (("array",), _contains),
    "minItems": (("array",), _counts),
    "maxItems": (("array",), _counts),
    "uniqueItems": (("array",), _unique_items),
    "minProperties": (("object",), _counts),
    "maxProperties": (("object",), _counts),
    **{keyword: (("object",), read) for keyword, read in OBJECT_KEYWORDS.items()},
}
SUPPORTED = tuple(_KEYWORDS)

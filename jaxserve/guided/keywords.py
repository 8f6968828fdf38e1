"""The keywords of JSON Schema (draft 2020-12, and what draft 07 spelled otherwise) as conditions.

Each is exact or refused. Annotations and unknown keywords are ignored, as the standard says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jaxserve.errors import SchemaError
from jaxserve.guided import conditions as c
from jaxserve.guided.conditions import FALSE, TRUE, And, Formula, Literal, Or, TypeName, refusal
from jaxserve.guided.document import (
    MAX_ENUM_VALUES,
    Document,
    check_schema,
    has_lone_surrogate,
    kind_of,
)
from jaxserve.guided.numbers import Bound
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
    place = _Place(document, pointer, schema, kind)
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a keyword stands."""

    document: Document
    pointer: str
    schema: dict[str, Any]
    kind: TypeName

    def wrong(self, keyword: str, wanted: str) -> SchemaError:
        """Return the error of a keyword whose value is not what it must be."""
        return SchemaError(
            f"{self.pointer}/{keyword} must be {wanted}", path=self.pointer, keyword=keyword
        )

    def subschema(self, *steps: str | int) -> Literal:
        """Return that a value fits the schema below a keyword."""
        pointer = self.document.child(self.pointer, *steps)
        check_schema(self.document.at(pointer), pointer)
        return Literal(pointer)

    def subschemas(self, keyword: str, value: Any) -> dict[str, Literal]:
        """Return the schemas of an object of schemas, by name."""
        if not isinstance(value, dict):
            raise self.wrong(keyword, "an object of schemas")
        for name in value:
            self.check_text(keyword, name)
        return {name: self.subschema(keyword, name) for name in value}

    def schema_list(self, keyword: str, value: Any) -> list[Literal]:
        """Return the schemas of a list of schemas."""
        if not isinstance(value, list):
            raise self.wrong(keyword, "a list of schemas")
        return [self.subschema(keyword, index) for index in range(len(value))]

    def count(self, keyword: str, value: Any) -> int:
        """Return a number of things."""
        number = self.number(keyword, value)
        if number < 0 or number != number.to_integral_value():
            raise self.wrong(keyword, "an integer, at least 0")
        return int(number)

    def number(self, keyword: str, value: Any) -> Decimal:
        """Return a number."""
        if kind_of(value) != "number":
            raise self.wrong(keyword, "a number")
        return Decimal(value)

    def names(self, keyword: str, value: Any) -> list[str]:
        """Return a list of names."""
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(keyword, "a list of strings")
        for name in value:
            self.check_text(keyword, name)
        return value

    def check_text(self, keyword: str, text: str) -> None:
        """Refuse what could not be written."""
        if has_lone_surrogate(text):
            raise self.wrong(keyword, "text without lone surrogates")


_Reader = Callable[[_Place, str, Any], Formula]


def _type(place: _Place, keyword: str, value: Any) -> Formula:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in _TYPE_NAMES:
            raise place.wrong(keyword, f"one or more of {', '.join(_TYPE_NAMES)}")
    if place.kind in names:
        return TRUE
    return c.IsInteger() if place.kind == "number" and "integer" in names else FALSE


def _enum(place: _Place, keyword: str, value: Any) -> Formula:
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


def _const(place: _Place, keyword: str, value: Any) -> Formula:
    return _one_of_values(place, [((keyword,), value)])


def _one_of_values(place: _Place, values: list[tuple[tuple[str | int, ...], Any]]) -> Formula:
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


def _structure(place: _Place, steps: tuple[str | int, ...], value: Any) -> Literal:
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


def _ref(place: _Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, str):
        raise place.wrong(keyword, "a string")
    return Literal(place.document.resolve(place.pointer, value))


def _all_of(place: _Place, keyword: str, value: Any) -> Formula:
    return And(tuple(place.schema_list(keyword, value)))


def _any_of(place: _Place, keyword: str, value: Any) -> Formula:
    return Or(tuple(place.schema_list(keyword, value)))


def _one_of(place: _Place, keyword: str, value: Any) -> Formula:
    schemas = place.schema_list(keyword, value)
    return Or(
        tuple(
            And((one, *(other.contrary() for other in schemas if other != one))) for one in schemas
        )
    )


def _not(place: _Place, keyword: str, value: Any) -> Formula:
    return place.subschema(keyword).contrary()


def _if(place: _Place, keyword: str, value: Any) -> Formula:
    condition = place.subschema(keyword)
    then, otherwise = (
        place.subschema(name) if name in place.schema else TRUE for name in ("then", "else")
    )
    if then == otherwise == TRUE:
        return TRUE
    return Or((And((condition, then)), And((condition.contrary(), otherwise))))


def _bound(place: _Place, keyword: str, value: Any) -> Formula:
    bound = Bound(place.number(keyword, value), inclusive="exclusive" not in keyword)
    return c.Minimum(bound) if keyword.lower().endswith("minimum") else c.Maximum(bound)


def _multiple_of(place: _Place, keyword: str, value: Any) -> Formula:
    factor = place.number(keyword, value)
    if factor <= 0:
        raise place.wrong(keyword, "a number above 0")
    return c.MultipleOf(factor)


def _counts(place: _Place, keyword: str, value: Any) -> Formula:
    count = place.count(keyword, value)
    length = Length(count) if keyword.startswith("min") else Length(0, count)
    return c.Counts(length, place.pointer)


def _pattern(place: _Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, str):
        raise place.wrong(keyword, "a string")
    return c.Matches(value, place.pointer)


def _format(place: _Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, str):
        raise place.wrong(keyword, "a string")
    return c.HasFormat(value, place.pointer)


def _prefix_items(place: _Place, keyword: str, value: Any) -> Formula:
    schemas = place.schema_list(keyword, value)
    return And(tuple(c.Item(index, schema) for index, schema in enumerate(schemas)))


def _items(place: _Place, keyword: str, value: Any) -> Formula:
    if isinstance(value, list):  # draft 07's way to write prefixItems
        parts = [_prefix_items(place, keyword, value)]
        if "additionalItems" in place.schema:
            parts.append(c.Items(len(value), place.subschema("additionalItems")))
        return And(tuple(parts))
    prefix = place.schema.get("prefixItems")
    return c.Items(len(prefix) if isinstance(prefix, list) else 0, place.subschema(keyword))


def _contains(place: _Place, keyword: str, value: Any) -> Formula:
    least = place.count("minContains", place.schema.get("minContains", 1))
    most = place.schema.get("maxContains")
    length = Length(least, None if most is None else place.count("maxContains", most))
    return c.Contains(0, place.subschema(keyword), length)


def _unique_items(place: _Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, bool):
        raise place.wrong(keyword, "a boolean")
    return c.Unique(place.pointer) if value else TRUE


def _properties(place: _Place, keyword: str, value: Any) -> Formula:
    schemas = place.subschemas(keyword, value)
    parts: list[Formula] = [c.Property(name, schema) for name, schema in schemas.items()]
    return And((*parts, *_closing(place)))


def _closing(place: _Place) -> tuple[Formula, ...]:
    opened = ("additionalProperties", "unevaluatedProperties")
    return () if any(keyword in place.schema for keyword in opened) else (c.Declares(),)


def _required(place: _Place, keyword: str, value: Any) -> Formula:
    return And(tuple(c.Has(name) for name in place.names(keyword, value)))


def _pattern_properties(place: _Place, keyword: str, value: Any) -> Formula:
    schemas = place.subschemas(keyword, value)
    parts: list[Formula] = [
        c.AllOf(pattern, schema, place.pointer) for pattern, schema in schemas.items()
    ]
    return And((*parts, *_closing(place)))


def _additional_properties(place: _Place, keyword: str, value: Any) -> Formula:
    names = place.subschemas("properties", place.schema.get("properties", {}))
    patterns = place.subschemas("patternProperties", place.schema.get("patternProperties", {}))
    which = c.Others(frozenset(names), frozenset(patterns))
    return c.AllOf(which, place.subschema(keyword), place.pointer)


def _property_names(place: _Place, keyword: str, value: Any) -> Formula:
    return c.NamesFit(place.subschema(keyword), place.pointer)


def _dependent_required(place: _Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, dict):
        raise place.wrong(keyword, "an object of lists of strings")
    return And(
        tuple(
            Or((c.Lacks(name), And((c.Has(name), _required(place, keyword, names)))))
            for name, names in value.items()
        )
    )


def _dependent_schemas(place: _Place, keyword: str, value: Any) -> Formula:
    schemas = place.subschemas(keyword, value)
    return And(
        tuple(Or((c.Lacks(name), And((c.Has(name), schema)))) for name, schema in schemas.items())
    )


def _dependencies(place: _Place, keyword: str, value: Any) -> Formula:
    """Read draft 07's one keyword for both."""
    if not isinstance(value, dict):
        raise place.wrong(keyword, "an object")
    parts = []
    for name, needed in value.items():
        then = (
            _required(place, keyword, needed)
            if isinstance(needed, list)
            else place.subschema(keyword, name)
        )
        parts.append(Or((c.Lacks(name), And((c.Has(name), then)))))
    return And(tuple(parts))


def _unevaluated_properties(place: _Place, keyword: str, value: Any) -> Formula:
    return c.Unevaluated(place.subschema(keyword), place.pointer)


_KEYWORDS: dict[str, tuple[tuple[TypeName, ...], _Reader]] = {
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
    "properties": (("object",), _properties),
    "patternProperties": (("object",), _pattern_properties),
    "additionalProperties": (("object",), _additional_properties),
    "required": (("object",), _required),
    "propertyNames": (("object",), _property_names),
    "minProperties": (("object",), _counts),
    "maxProperties": (("object",), _counts),
    "dependentRequired": (("object",), _dependent_required),
    "dependentSchemas": (("object",), _dependent_schemas),
    "dependencies": (("object",), _dependencies),
    "unevaluatedProperties": (("object",), _unevaluated_properties),
}
SUPPORTED = tuple(_KEYWORDS)

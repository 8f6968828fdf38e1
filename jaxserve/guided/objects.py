"""The keywords of JSON Schema about objects as conditions; `keywords` has the others."""

from typing import Any

from jaxserve.guided import conditions as c
from jaxserve.guided.conditions import And, Formula, Or
from jaxserve.guided.schema_place import Place, Reader


def _properties(place: Place, keyword: str, value: Any) -> Formula:
    schemas = place.subschemas(keyword, value)
    parts: list[Formula] = [c.Property(name, schema) for name, schema in schemas.items()]
    return And((*parts, *_closing(place)))


def _closing(place: Place) -> tuple[Formula, ...]:
    opened = ("additionalProperties", "unevaluatedProperties")
    return () if any(keyword in place.schema for keyword in opened) else (c.Declares(),)


def _required(place: Place, keyword: str, value: Any) -> Formula:
    return And(tuple(c.Has(name) for name in place.names(keyword, value)))


def _pattern_properties(place: Place, keyword: str, value: Any) -> Formula:
    schemas = place.subschemas(keyword, value)
    parts: list[Formula] = [
        c.AllOf(pattern, schema, place.pointer) for pattern, schema in schemas.items()
    ]
    return And((*parts, *_closing(place)))


def _additional_properties(place: Place, keyword: str, value: Any) -> Formula:
    names = place.subschemas("properties", place.schema.get("properties", {}))
    patterns = place.subschemas("patternProperties", place.schema.get("patternProperties", {}))
    which = c.Others(frozenset(names), frozenset(patterns))
    return c.AllOf(which, place.subschema(keyword), place.pointer)


def _property_names(place: Place, keyword: str, value: Any) -> Formula:
    return c.NamesFit(place.subschema(keyword), place.pointer)


def _dependent_required(place: Place, keyword: str, value: Any) -> Formula:
    if not isinstance(value, dict):
        raise place.wrong(keyword, "an object of lists of strings")
    return And(
        tuple(
            Or((c.Lacks(name), And((c.Has(name), _required(place, keyword, names)))))
            for name, names in value.items()
        )
    )


def _dependent_schemas(place: Place, keyword: str, value: Any) -> Formula:
    schemas = place.subschemas(keyword, value)
    return And(
        tuple(Or((c.Lacks(name), And((c.Has(name), schema)))) for name, schema in schemas.items())
    )


def _dependencies(place: Place, keyword: str, value: Any) -> Formula:
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


def _unevaluated_properties(place: Place, keyword: str, value: Any) -> Formula:
    return c.Unevaluated(place.subschema(keyword), place.pointer)


OBJECT_KEYWORDS: dict[str, Reader] = {
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "required": _required,
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependencies,
    "unevaluatedProperties": _unevaluated_properties,
}

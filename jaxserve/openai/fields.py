"""Fields, and tables of them, which read whole objects.

A field is a name, a reader, a default and a description. What a server accepts, refuses or ignores
is therefore data, from which the API's pages are made as well. In an object null means absent, and
of two equal keys the last one counts.
"""

# ruff: noqa: D102 - what a reader reads is its class's docstring

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.readers import Reader, Schema, show, wrong_type

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One key of an object; `default` stands in where it is absent or null.

    Where it is required, absent and null are refused. `about` is for the API's pages; fields that
    are refused or change nothing say so by themselves.
    """

    name: str
    read: Reader[T]
    default: T
    about: str = ""
    required: bool = False


FieldTable = Mapping[str, Field[Any]]


def table(fields: Iterable[Field[Any]]) -> FieldTable:
    """Index fields by name, in the order given."""
    return {field.name: field for field in fields}


class Values:
    """What a table read from an object: `values[FIELD]` has the field's type."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __getitem__(self, field: Field[T]) -> T:
        return cast(T, self._values.get(field.name, field.default))


def read_object(value: object, path: str, fields: FieldTable) -> Values:
    """Read every key of an object by its field; `path` is "" for the body itself."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    values: dict[str, object] = {}
    for name, entry in value.items():
        where = f"{path}.{name}" if path else name
        field = fields.get(name)
        if field is None:
            raise InvalidRequestError(
                f"Unknown field: {show(where)}.", param=where, code="unknown_parameter"
            )
        if entry is not None:
            values[name] = field.read(entry, where)
    for field in fields.values():
        if field.required and field.name not in values:
            where = f"{path}.{field.name}" if path else field.name
            raise InvalidRequestError(
                f"{where} is required.", param=where, code="missing_required_parameter"
            )
    return Values(values)


@dataclass(frozen=True, slots=True)
class Object:
    """An object read by a table of its own."""

    fields: FieldTable

    def __call__(self, value: object, path: str) -> Values:
        return read_object(value, path, self.fields)

    def schema(self) -> Schema:
        return object_schema(self.fields)


def object_schema(fields: FieldTable) -> Schema:
    """Return the JSON Schema of an object that a table reads."""
    schema: Schema = {
        "type": "object",
        "properties": {
            field.name: {
                **(field.read.schema() if field.required else _or_null(field.read.schema())),
                **({"description": field.about} if field.about else {}),
            }
            for field in fields.values()
        },
        "additionalProperties": False,
    }
    required = [field.name for field in fields.values() if field.required]
    return {**schema, "required": required} if required else schema


def _or_null(schema: Schema) -> Schema:
    """Return the schema of a field that null leaves out."""
    enum = schema.get("enum")
    if isinstance(enum, list) and None in enum:
        return schema
    return {"anyOf": [schema, {"type": "null"}]}

"""A place in a schema, and what stands there: values of keywords, checked as they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jaxserve.errors import SchemaError
from jaxserve.guided.conditions import Formula, Literal, TypeName
from jaxserve.guided.document import Document, check_schema, has_lone_surrogate, kind_of


@dataclass(frozen=True, slots=True)
class Place:
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


Reader = Callable[[Place, str, Any], Formula]
"""Returns the condition of a keyword with its value, at a place."""

"""Schemas of tools, made fit for chat templates.

Templates show the model a few keywords only: types, properties, required, items, enums of strings,
descriptions. The rest of JSON Schema is said in these, as far as they can, and in words behind the
description otherwise, so that nothing that a client wrote is hidden from the model. Pure.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.readers import MAX_DEPTH

# References multiply: a few of them can stand for millions of schemas.
MAX_NODES = 10_000

Schema = Mapping[str, Any]

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Shown by themselves, or of no use to the model.
_SHOWN = frozenset(
    {
        *("type", "properties", "required", "items", "enum", "description", "nullable"),
        *("title", "$ref", "$defs", "definitions", "$schema", "$id", "$comment", "const"),
        *("anyOf", "oneOf", "allOf", "additionalProperties", "discriminator"),
    }
)
_WORDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "pattern": "matches {}",
    "format": "format {}",
    "default": "default {}",
}


def fit_tool(name: str, description: str, parameters: Schema, path: str) -> dict[str, Any]:
    """Return a tool as templates show it: its parameters are an object with typed properties.

    Raises:
        InvalidRequestError: a reference leads nowhere, or the schema is too large; `path` names it.
    """
    fitted: dict[str, Any] = {}
    if parameters:
        fitted = _Fitter(parameters, path).fit({"type": "object", **parameters}, ())
        # Templates show no description of the whole.
        description = f"{description} {fitted.pop('description', '')}".strip()
    function = {"name": name, "description": description, "parameters": fitted}
    return {"type": "function", "function": function}


def argument_types(parameters: Schema) -> dict[str, str]:
    """Return the types of those arguments that have exactly one, null left aside."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    types = {name: _only_type(schema) for name, schema in properties.items()}
    return {name: kind for name, kind in types.items() if kind is not None}


def _only_type(schema: object) -> str | None:
    if not isinstance(schema, Mapping):
        return None
    options = schema.get("anyOf")
    if isinstance(options, list) and "type" not in schema:
        kinds = [_only_type(option) for option in options if not _is_null(option)]
    else:
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
    kinds = [kind for kind in kinds if kind != "null"]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], str) else None


class _Fitter:
    """Fits the schemas of one tool."""

    def __init__(self, root: Schema, path: str) -> None:
        self._root = root
        self._path = path
        self._num_nodes = 0
        self._depth = 0

    def fit(self, schema: object, parents: tuple[str, ...]) -> dict[str, Any]:
        """Return one schema fitted; `parents` are the references that it lies in."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise InvalidRequestError(
                f"{self._path} stands for more than {MAX_NODES} schemas", param=self._path
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidRequestError(
                f"{self._path} is nested deeper than {MAX_DEPTH} levels", param=self._path
            )
        fitted = self._fit(schema, parents)
        self._depth -= 1
        return fitted

    def _fit(self, schema: object, parents: tuple[str, ...]) -> dict[str, Any]:
        notes: list[str] = []
        schema, parents = self._resolve(schema, parents, notes)
        schema = self._merge_all(schema, parents)
        schema, is_nullable = self._choose(schema, parents, notes)
        kinds = _types(schema)
        if "null" in kinds and len(kinds) > 1:
            kinds.remove("null")
            is_nullable = True
        if len(kinds) > 1:
            notes.append(f"of type {' or '.join(kinds)}")
        kind = kinds[0]
        fitted: dict[str, Any] = {}
        enum = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(enum, list):
            is_nullable |= None in enum
            values = [value for value in enum if value is not None]
            if kind == "string" and all(isinstance(value, str) for value in values):
                fitted["enum"] = values
            else:
                notes.append(f"one of {', '.join(map(_show, values))}")
        self._fit_children(schema, kind, fitted, parents, notes)
        if is_nullable or schema.get("nullable") is True:
            fitted["nullable"] = True
        notes += [_note(name, value) for name, value in schema.items() if name not in _SHOWN]
        fitted["type"] = kind
        description = schema.get("description")
        text = description if isinstance(description, str) else ""
        if notes:
            text = f"{text} ({'; '.join(notes)})".strip()
        return {"description": text, **fitted} if text else fitted

    def _fit_children(
        self,
        schema: Schema,
        kind: str,
        fitted: dict[str, Any],
        parents: tuple[str, ...],
        notes: list[str],
    ) -> None:
        properties = schema.get("properties")
        if kind == "object":
            if isinstance(properties, Mapping):
                fitted["properties"] = {
                    name: self.fit(child, parents) for name, child in properties.items()
                }
            required = schema.get("required")
            if isinstance(required, list):
                names = [name for name in required if isinstance(name, str)]
                if names:
                    fitted["required"] = names
            values = schema.get("additionalProperties")
            if isinstance(values, Mapping) and values:
                notes.append(f"a map from names to {_show(self.fit(values, parents))}")
            if "properties" not in fitted:
                # Without them a template shows the keywords as if they were properties.
                fitted["properties"] = {}
        elif kind == "array":
            items = schema.get("items")
            if isinstance(items, Mapping) and items:
                fitted["items"] = self.fit(items, parents)
            elif isinstance(items, list):
                notes.append(f"items {_show(items)}")

    def _resolve(
        self, schema: object, parents: tuple[str, ...], notes: list[str]
    ) -> tuple[Schema, tuple[str, ...]]:
        """Follow references; what stands beside one goes before what it refers to."""
        if not isinstance(schema, Mapping):
            return {}, parents  # true: anything
        while isinstance(reference := schema.get("$ref"), str):
            beside = {name: value for name, value in schema.items() if name != "$ref"}
            if reference in parents:
                notes.append(f"again {reference.rsplit('/', 1)[-1]}")
                return {"type": "object", **beside}, parents
            parents = (*parents, reference)
            target = self._look_up(reference)
            schema = {**target, **beside} if isinstance(target, Mapping) else beside
        return schema, parents

    def _look_up(self, reference: str) -> object:
        found: object = self._root
        head, *keys = reference.split("/")
        for key in keys:
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                head = ""
        if head != "#":
            raise InvalidRequestError(
                f"{self._path}: $ref {_show(reference)} leads nowhere in the schema",
                param=self._path,
            )
        return found

    def _merge_all(self, schema: Schema, parents: tuple[str, ...]) -> Schema:
        """Put the parts of allOf together."""
        parts = schema.get("allOf")
        if not isinstance(parts, list):
            return schema
        merged: dict[str, Any] = {}
        for part in (*parts, {name: v for name, v in schema.items() if name != "allOf"}):
            resolved, _ = self._resolve(part, parents, [])
            for name, value in resolved.items():
                if name == "properties" and isinstance(value, Mapping):
                    merged[name] = {**merged.get(name, {}), **value}
                elif name == "required" and isinstance(value, list):
                    merged[name] = [*merged.get(name, []), *value]
                else:
                    merged[name] = value
        return merged

    def _choose(
        self, schema: Schema, parents: tuple[str, ...], notes: list[str]
    ) -> tuple[Schema, bool]:
        """Take the one alternative that is not null, or describe them all."""
        options = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(options, list) or not options:
            return schema, False
        beside = {name: v for name, v in schema.items() if name not in ("anyOf", "oneOf")}
        others = [option for option in options if not _is_null(option)]
        is_nullable = len(others) < len(options)
        if len(others) == 1:
            inner_notes: list[str] = []
            option, _ = self._resolve(others[0], parents, inner_notes)
            notes += inner_notes
            return {**option, **beside}, is_nullable
        fitted = [self.fit(option, parents) for option in others]
        kinds = {option["type"] for option in fitted}
        if len(kinds) == 1 and "type" not in beside:
            beside["type"] = kinds.pop()
        if all(option.keys() == {"type", "enum"} for option in fitted):
            return {"enum": [v for option in fitted for v in option["enum"]], **beside}, is_nullable
        notes.append("either " + " or ".join(map(_show, fitted)))
        return beside, is_nullable


def _types(schema: Schema) -> list[str]:
    """Return the types that a schema allows, one at least."""
    kind = schema.get("type")
    kinds = [k for k in (kind if isinstance(kind, list) else [kind]) if k in _TYPES]
    return kinds or [_inferred_type(schema)]


def _inferred_type(schema: Schema) -> str:
    """Return the type of a schema that names none."""
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        kinds = {type(value) for value in values if value is not None}
        names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
        if len(kinds) == 1:
            return names.get(kinds.pop(), "string")
    if {"minimum", "maximum", "multipleOf"} & schema.keys():
        return "number"
    return "string"


def _is_null(option: object) -> bool:
    return isinstance(option, Mapping) and (
        option.get("type") == "null" or option.get("const", 0) is None
    )


def _note(name: str, value: object) -> str:
    words = _WORDS.get(name)
    return words.format(_show(value)) if words else f"{name} {_show(value)}"


def _show(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

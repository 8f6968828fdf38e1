"""Schemas as the model is shown them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.tool_schemas import argument_types, fit_tool
from jaxserve.text.chat_template import ChatTemplate

DATA = Path(__file__).parents[2] / "data"
TEMPLATE = ChatTemplate.load(DATA / "gemma4_chat")
TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


def fit(**parameters: Any) -> dict[str, Any]:
    fitted: dict[str, Any] = fit_tool("f", "Do it.", parameters, "tools[0]")["function"]
    return fitted


def fit_property(schema: Any, **others: Any) -> dict[str, Any]:
    fitted = fit(properties={"x": schema}, **others)["parameters"]["properties"]["x"]
    assert isinstance(fitted, dict)
    return fitted


def shown(**parameters: Any) -> str:
    tool = fit_tool("f", "Do it.", parameters, "tools[0]")
    text = TEMPLATE.render([{"role": "user", "content": "hi"}], tools=[tool])
    return text.partition("declaration:")[2].partition("<tool|>")[0].replace('<|"|>', "'")


def test_a_schema_that_is_fit_stays() -> None:
    properties = {
        "room": {"type": "string", "description": "Which.", "enum": ["attic", "hall"]},
        "levels": {"type": "array", "items": {"type": "integer"}},
        "who": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        "days": {"type": "integer", "nullable": True},
    }
    parameters = {"type": "object", "properties": properties, "required": ["room"]}
    assert fit(**parameters)["parameters"] == parameters


def test_the_whole_is_an_object() -> None:
    text = "f{description:'Do it.',parameters:{properties:{x:{type:'STRING'}},type:'OBJECT'}}"
    assert shown(properties={"x": {"type": "string"}}) == text
    assert shown() == "f{description:'Do it.'}"
    assert shown(type="object") == "f{description:'Do it.',parameters:{type:'OBJECT'}}"


@pytest.mark.parametrize(
    ("schema", "fitted"),
    [
        ({}, {"type": "string"}),
        (True, {"type": "string"}),
        ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
        (
            {"type": ["string", "integer"]},
            {"type": "string", "description": "(of type string or integer)"},
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "integer", "nullable": True}),
        (
            {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "D"},
            {"type": "integer", "nullable": True, "description": "D"},
        ),
        (
            {"oneOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]},
            {
                "type": "string",
                "description": '(either {"type": "string"}'
                ' or {"description": "(at least 1)", "type": "integer"})',
            },
        ),
        ({"anyOf": [{"const": "a"}, {"const": "b"}]}, {"type": "string", "enum": ["a", "b"]}),
        ({"const": "a"}, {"type": "string", "enum": ["a"]}),
        ({"const": 5}, {"type": "integer", "description": "(one of 5)"}),
        ({"enum": [1, 2.5]}, {"type": "string", "description": "(one of 1, 2.5)"}),
        ({"enum": ["a", None]}, {"type": "string", "enum": ["a"], "nullable": True}),
        (
            {"type": "integer", "minimum": 0, "maximum": 9, "default": 5, "description": "D"},
            {"type": "integer", "description": "D (at least 0; at most 9; default 5)"},
        ),
        (
            {"type": "string", "pattern": "^a", "format": "date", "minLength": 1},
            {
                "type": "string",
                "description": '(matches "^a"; format "date"; at least 1 characters)',
            },
        ),
        (
            {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True},
            {
                "type": "array",
                "items": {"type": "string", "description": "(at most 3 characters)"},
                "description": "(uniqueItems true)",
            },
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            {
                "type": "object",
                "properties": {},
                "description": '(a map from names to {"type": "integer"})',
            },
        ),
        ({"type": "object", "additionalProperties": False}, {"type": "object", "properties": {}}),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "string"}}},
                    {"properties": {"b": {"type": "string"}}, "required": ["b"]},
                ]
            },
            {
                "type": "object",
                "required": ["b"],
                "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            },
        ),
        (
            {"properties": {"a": {"title": "A", "type": "string"}}},
            {"type": "object", "properties": {"a": {"type": "string"}}},
        ),
        (
            {"not": {"type": "string"}},
            {"type": "string", "description": '(not {"type": "string"})'},
        ),
    ],
)
def test_what_templates_do_not_show_is_said(schema: Any, fitted: dict[str, Any]) -> None:
    assert fit_property(schema) == fitted


def test_notes_on_the_whole_go_to_the_tools_description() -> None:
    fitted = fit(description="All of it.", minProperties=1, properties={})
    assert fitted["description"] == "Do it. All of it. (at least 1 entries)"


def test_references_are_followed() -> None:
    definitions = {
        "a/b~ c": {"type": "integer", "description": "D"},
        "again": {"$ref": "#/$defs/x"},
    }
    schema = {"$ref": "#/$defs/a~1b~0%20c", "description": "E"}
    assert fit_property(schema, **{"$defs": definitions}) == {"type": "integer", "description": "E"}
    tree = {"properties": {"child": {"$ref": "#/$defs/tree"}, "v": {"type": "string"}}}
    fitted = fit_property({"$ref": "#/$defs/tree"}, **{"$defs": {"tree": tree}})
    again = {"type": "object", "properties": {}, "description": "(again tree)"}
    assert fitted["properties"]["child"] == again
    loop = fit_property({"$ref": "#/properties/x"})
    assert loop["description"] == "(again x)"


@pytest.mark.parametrize("reference", ["#/$defs/none", "other.json", "#/$defs/0", ""])
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        fit_property({"$ref": reference}, **{"$defs": {}})
    assert refused.value.param == "tools[0]"


def test_references_cannot_multiply() -> None:
    definitions = {
        f"d{i}": {"properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "abcdefgh"}}
        for i in range(20)
    }
    with pytest.raises(InvalidRequestError, match="more than"):
        fit_property({"$ref": "#/$defs/d0"}, **{"$defs": {**definitions, "d20": {}}})


def test_references_cannot_nest_without_end() -> None:
    definitions: dict[str, Any] = {
        f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)
    }
    with pytest.raises(InvalidRequestError, match="deeper than 64"):
        fit_property({"$ref": "#/$defs/d0"}, **{"$defs": {**definitions, "d3000": {}}})
    # A chain of references is no nesting.
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(300)}
    fitted = fit_property(
        {"$ref": "#/$defs/d0"}, **{"$defs": {**chain, "d300": {"type": "integer"}}}
    )
    assert fitted == {"type": "integer"}


def test_types_of_arguments() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"]},
        "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "d": {"type": ["string", "integer"]},
        "e": {},
        "f": True,
        "g": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    }
    types = {"a": "string", "b": "integer", "c": "boolean"}
    assert argument_types({"properties": properties}) == types
    assert argument_types({}) == argument_types({"properties": 5}) == {}


WORDS = st.sampled_from(
    [
        *("type", "properties", "items", "enum", "const", "anyOf", "allOf", "oneOf", "$ref"),
        *("required", "additionalProperties", "description", "minimum", "nullable", "$defs", "not"),
    ]
)
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 3)
    | st.sampled_from([*TYPES, "a", "#", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.just("a"), inner, max_size=4)
    ),
    max_leaves=12,
)


def check(schema: Any) -> None:
    assert schema["type"] in TYPES
    assert isinstance(schema.get("description", ""), str)
    assert (schema["type"] == "object") == ("properties" in schema)
    for child in [
        *schema.get("properties", {}).values(),
        *([schema["items"]] if "items" in schema else []),
    ]:
        check(child)


@settings(max_examples=300, deadline=None)
@given(parameters=st.dictionaries(WORDS, VALUES, max_size=5))
def test_any_schema_is_shown_or_refused(parameters: dict[str, Any]) -> None:
    argument_types(parameters)
    try:
        tool = fit_tool("f", "", parameters, "tools[0]")
    except InvalidRequestError:
        return
    if parameters:
        check(tool["function"]["parameters"])
        TEMPLATE.render([{"role": "user", "content": "hi"}], tools=[tool])

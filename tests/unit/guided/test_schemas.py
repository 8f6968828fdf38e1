"""What JSON Schemas come to: texts that fit and texts that do not, and what is refused."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided.checking import TextChecker, byte_vocabulary
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.keywords import SUPPORTED
from jaxserve.guided.tables import GrammarSpec, HostGrammar, TokenTables

ROOT = Path(__file__).parents[3]
CASES = json.loads((ROOT / "tests/data/guided/schemas.json").read_text())


@lru_cache(maxsize=512)
def checker(schema_text: str, compact: bool = False) -> TextChecker:
    return TextChecker.of(GrammarSpec(kind="json_schema", source=schema_text, compact=compact))


def accepts(schema: Any, text: str) -> bool:
    return checker(json.dumps(schema)).judge(text.encode()).accepted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_texts_that_fit_are_accepted_and_others_are_not(case: dict[str, Any]) -> None:
    for text in case["valid"]:
        assert accepts(case["schema"], text), text
    for text in case["invalid"]:
        assert not accepts(case["schema"], text), text


NOT_TO_BE_SATISFIED = {"type": "object", "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "code", "path", "keyword"),
    [
        ({"type": "banana"}, "invalid_schema", "", "type"),
        ({"properties": {"a": {"type": ["string", 3]}}}, "invalid_schema", "/properties/a", "type"),
        ({"pattern": "("}, "invalid_schema", "", "pattern"),
        ({"properties": {"a/b": {"pattern": "(?=x)"}}}, None, "/properties/a~1b", "pattern"),
        ({"minLength": -1}, "invalid_schema", "", "minLength"),
        ({"minimum": "3"}, "invalid_schema", "", "minimum"),
        ({"multipleOf": 0}, "invalid_schema", "", "multipleOf"),
        ({"required": "a"}, "invalid_schema", "", "required"),
        ({"items": 3}, "invalid_schema", "/items", None),
        ({"$ref": "#/$defs/x"}, "invalid_schema", "", "$ref"),
        ({"$ref": "https://example.org/x"}, "unsupported_schema", "", "$ref"),
        ({"$dynamicRef": "#a"}, "unsupported_schema", "", "$dynamicRef"),
        ({"format": "iri"}, "unsupported_schema", "", "format"),
        ({"not": {"format": "date"}}, "unsupported_schema", "/not", "format"),
        ({"uniqueItems": True}, "unsupported_schema", "", "uniqueItems"),
        ({"minProperties": 3, "type": "object"}, "unsupported_schema", "", "minProperties"),
        ({"multipleOf": 123457}, "schema_too_complex", None, None),
        (False, "invalid_schema", "", None),
        ({"type": "string", "const": 3}, "invalid_schema", "", None),
        (NOT_TO_BE_SATISFIED, None, None, None),
        (
            {"allOf": [{"patternProperties": {"a": {}}}, {"patternProperties": {"(": {}}}]},
            *("invalid_schema", "/allOf/1", None),
        ),
        ([], "invalid_schema", "", None),
        ("string", "invalid_schema", "", None),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_with_its_place(
    schema: Any, code: str | None, path: str | None, keyword: str | None
) -> None:
    with pytest.raises(SchemaError) as refused:
        checker(json.dumps(schema))

    assert refused.value.status == 400
    assert code in (None, refused.value.code)
    assert path in (None, refused.value.path)
    assert keyword in (None, refused.value.keyword)


@pytest.mark.parametrize("source", ["{", "", "NaN", '{"minimum": 1e999999999}', "[" * 500])
def test_what_is_no_schema_is_refused(source: str) -> None:
    with pytest.raises(SchemaError):
        checker(source)


def test_limits_are_told() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    for schema, limit in (
        (deep, "deeper than 128"),
        ({"enum": list(range(10_001))}, "more than 10000 values"),
        ({"description": "x" * (1 << 20)}, "more than 1048576 bytes"),
    ):
        with pytest.raises(SchemaError, match=limit) as refused:
            checker(json.dumps(schema))
        assert refused.value.code == "schema_too_complex"


def test_spaces_follow_commas_and_colons_one_at_most_or_none() -> None:
    schema = json.dumps({"type": "object", "additionalProperties": {"items": {"type": "integer"}}})
    spaced, tight = '{"a": [1, 2], "b": []}', '{"a":[1,2],"b":[]}'

    assert checker(schema).judge(spaced.encode()).accepted
    assert checker(schema).judge(tight.encode()).accepted
    assert checker(schema, compact=True).judge(tight.encode()).accepted
    assert not checker(schema, compact=True).judge(spaced.encode()).accepted
    for text in ('{ "a":[]}', '{"a" :[]}', '{"a":  []}', '{"a":[]} ', '{"a":[1 ]}', '\n{"a":[]}'):
        assert not checker(schema).judge(text.encode()).accepted, text


def test_annotations_and_unknown_keywords_say_nothing() -> None:
    plain = {"type": "integer", "maximum": 9}
    noise = {"title": "t", "description": "d", "default": "x", "examples": [{}], "x-own": [1]}

    assert accepts(plain | noise | {"format": "int32", "$comment": "c", "readOnly": True}, "7")
    assert not accepts(plain | noise, '"x"')


def test_properties_come_in_their_order_and_undeclared_ones_only_where_asked_for() -> None:
    properties = {"b": {"type": "integer"}, "a": {"type": "integer"}}

    assert accepts({"properties": properties}, '{"b": 1, "a": 2}')
    assert not accepts({"properties": properties}, '{"a": 2, "b": 1}')
    assert not accepts({"properties": properties}, '{"a": 2, "c": 1}')
    opened = {"properties": properties, "additionalProperties": {"type": "null"}}
    assert accepts(opened, '{"a": 2, "c": null, "d": null}')
    assert not accepts(opened, '{"a": 2, "\\u0062": null}')  # b, spelled otherwise


def test_free_values_nest_to_a_depth_that_is_told() -> None:
    schema = {"type": "object"}

    assert accepts(schema, '{"a": [[[[[1]]]]]}')
    assert not accepts(schema, '{"a": [[[[[[1]]]]]]}')


def test_many_optional_properties_stay_small() -> None:
    properties = {f"m_{n:02}": {"type": "boolean"} for n in range(60)}
    schema = {"type": "object", "properties": properties}
    spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))

    grammar = compile_grammar(spec, byte_vocabulary())

    assert isinstance(grammar, TokenTables)
    assert grammar.stats.num_states < 1_200


def test_an_enum_of_thousands_has_tables() -> None:
    words = [f"word{n * 7919 % 100_003:06}" for n in range(5_000)]
    spec = GrammarSpec(kind="json_schema", source=json.dumps({"enum": words}))

    grammar = compile_grammar(spec, byte_vocabulary())

    assert isinstance(grammar, TokenTables)


def test_a_schema_within_itself_runs_on_the_host() -> None:
    pytest.importorskip("llguidance")
    tree = {"type": "object", "properties": {"sub": {"$ref": "#"}}, "required": ["sub"]}
    with pytest.raises(SchemaError, match="no value fits"):  # it would have to go on for ever
        checker(json.dumps(tree))
    tree["required"] = []

    grammar = compile_grammar(
        GrammarSpec(kind="json_schema", source=json.dumps(tree)), byte_vocabulary()
    )

    assert isinstance(grammar, HostGrammar)
    checked = TextChecker(grammar)
    text = b'{"sub": ' * 30 + b"{}" + b"}" * 30
    assert checked.judge(text).accepted
    assert checked.judge(b'{"sub": 3}').offset == 8
    assert checked.judge(b'{"sub":  {}}').offset == 8
    assert not checked.judge(b'{"other": {}}').accepted


def test_what_the_host_cannot_do_is_refused_by_name() -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"$ref": "#"}, "contains": {"maxItems": 0}}

    with pytest.raises(SchemaError, match="contains"):
        checker(json.dumps(schema))


def test_regexes_and_choices_are_grammars_too() -> None:
    date = TextChecker.of(GrammarSpec(kind="regex", source=r"\d{4}-\d\d"))
    assert date.judge(b"2031-07").accepted
    assert date.judge(b"2031-x").offset == 5
    words = TextChecker.of(GrammarSpec(kind="choice", source='["a", "ab", "\\n"]'))
    assert words.judge(b"ab").accepted
    assert words.judge(b"a").may_end
    for source in ("[]", '[""]', "[1]", "{", '"a"'):
        with pytest.raises(SchemaError):
            TextChecker.of(GrammarSpec(kind="choice", source=source))


def test_lark_grammars_run_on_the_host_and_bad_ones_are_refused() -> None:
    pytest.importorskip("llguidance")
    nested = TextChecker.of(GrammarSpec(kind="lark", source='start: "(" start? ")"'))

    assert nested.judge(b"((()))").accepted
    assert nested.judge(b"(()").offset == 3
    with pytest.raises(SchemaError, match="grammar"):
        TextChecker.of(GrammarSpec(kind="lark", source="start: ((("))


def test_every_keyword_is_in_the_documents() -> None:
    page = (ROOT / "docs/guided.md").read_text()

    assert [keyword for keyword in SUPPORTED if f"`{keyword}`" not in page] == []

"""The document at /openapi.json: true to OpenAPI, to the routes, and to what the parsers take."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.http.config import HttpConfig
from jaxserve.http.routes import Endpoints
from jaxserve.metrics import Metrics
from jaxserve.openai.fields import FieldTable
from jaxserve.openai.pages import api_page, openapi_document
from jaxserve.openai.readers import Inert, Neutral
from jaxserve.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    FLUSH_FIELDS,
    GRAMMAR_CHECK_FIELDS,
    RELEASE_FIELDS,
    TOKENIZE_CHAT_FIELDS,
    TOKENIZE_FIELDS,
    parse_chat_completion,
    parse_completion,
    parse_detokenize,
    parse_explain,
    parse_flush,
    parse_grammar_check,
    parse_release,
    parse_tokenize,
)
from tests.fake_engine import FakeEngine

Parse = Callable[[bytes], object]

DOCUMENT: Any = json.loads(json.dumps(openapi_document("1.2.3")))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARSERS: dict[str, Parse] = {
    CHAT: parse_chat_completion,
    "/v1/chat/completions/render": parse_chat_completion,
    COMPLETIONS: parse_completion,
    "/tokenize": parse_tokenize,
    "/detokenize": parse_detokenize,
    "/v1/cache/explain": parse_explain,
    "/v1/cache/release": parse_release,
    "/v1/cache/flush": parse_flush,
    "/v1/grammar/check": parse_grammar_check,
}
TABLES = {
    CHAT: [CHAT_FIELDS],
    "/v1/chat/completions/render": [CHAT_FIELDS],
    COMPLETIONS: [COMPLETION_FIELDS],
    "/tokenize": [TOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS],
    "/detokenize": [DETOKENIZE_FIELDS],
    "/v1/cache/explain": [CHAT_FIELDS, COMPLETION_FIELDS],
    "/v1/cache/release": [RELEASE_FIELDS],
    "/v1/cache/flush": [FLUSH_FIELDS],
    "/v1/grammar/check": [GRAMMAR_CHECK_FIELDS],
}
USER: dict[str, Any] = {"role": "user", "content": "go"}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
NEEDED: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"messages": [USER]}],
    COMPLETIONS: [{"prompt": "go"}],
    "/tokenize": [{"prompt": "go"}, {"messages": [USER]}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/v1/cache/release": [{"session": "s"}],
    "/v1/cache/flush": [{}],
    "/v1/grammar/check": [{"guided_regex": "a"}],
}


def body_schema(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    return schema


VALIDATORS = {path: jsonschema.Draft202012Validator(body_schema(path)) for path in PARSERS}


def fits(path: str, body: object) -> bool:
    return bool(VALIDATORS[path].is_valid(body))


def is_read(path: str, body: object) -> bool:
    try:
        PARSERS[path](json.dumps(body).encode())
    except InvalidRequestError:
        return False
    return True


def test_it_has_every_route_and_no_other() -> None:
    routes = Endpoints(FakeEngine(), lambda: None, config=HttpConfig(), metrics=Metrics()).routes()
    expected = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {
        (path, method) for path, item in DOCUMENT["paths"].items() for method in item
    } == expected


def test_its_form() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"] == {"title": "jaxserve", "version": "1.2.3"}
    for path, item in DOCUMENT["paths"].items():
        for operation in item.values():
            assert operation["summary"]
            assert set(operation["responses"]) == {"200", "default"}
            parameters = [parameter["name"] for parameter in operation.get("parameters", [])]
            assert parameters == (["id"] if "{id}" in path else [])
    assert "Error" in DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize("path", PARSERS)
def test_schemas_are_schemas_with_all_fields_of_the_tables(path: str) -> None:
    schema = body_schema(path)
    jsonschema.Draft202012Validator.check_schema(schema)
    for each, fields in zip(schema.get("anyOf", [schema]), TABLES[path], strict=True):
        assert list(each["properties"]) == list(fields)


@pytest.mark.parametrize(
    "fields",
    [CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, RELEASE_FIELDS],
)
def test_every_field_is_on_the_page_and_applied_ones_say_what_they_do(fields: FieldTable) -> None:
    page = api_page()
    for field in fields.values():
        assert f"`{field.name}`" in page
        assert field.about or isinstance(field.read, Inert | Neutral)


# What is accepted at all, one value at a time.
EXAMPLES: list[tuple[str, list[Any]]] = [
    ("model", ["org/name"]),
    ("min_tokens", [0, 1]),
    ("temperature", [0, 0.5, 2, 2.0]),
    ("top_p", [1, 1e-6]),
    ("top_k", [-1, 0, 1 << 20]),
    ("min_p", [0, 1]),
    ("presence_penalty", [-2, 2]),
    ("frequency_penalty", [-2.0, 0]),
    ("repetition_penalty", [0.5, 10]),
    ("logit_bias", [{}, {"0": 1, "5": -100, "999999999": 100}]),
    ("allowed_token_ids", [[0], [5, 5]]),
    ("bad_words", [[], ["a", " b"]]),
    ("seed", [-(1 << 63), (1 << 64) - 1]),
    ("stop", ["a", [], ["a", "b"]]),
    ("stop_token_ids", [[], [7]]),
    ("include_stop_str_in_output", [True]),
    ("skip_special_tokens", [False]),
    ("n", [1, 128]),
    ("priority", [-5, 5]),
    ("stream", [True]),
    ("ignore_eos", [True]),
    ("return_token_ids", [True]),
    ("return_tokens_as_token_ids", [True]),
    ("prompt_logprobs", [0, 20]),
    ("truncate_prompt_tokens", [-1, 1]),
    ("request_id", ["a-1"]),
    ("max_tokens", [1]),
    ("echo", [True]),
    ("user", ["", "u"]),
    ("metadata", [{}, {"a": {"b": [1]}}]),
    ("store", [True, False]),
    ("service_tier", ["auto"]),
    ("safety_identifier", ["s"]),
    ("prompt_cache_key", ["k"]),
    ("cache_salt", ["s"]),
    ("spaces_between_special_tokens", [True, False]),
    ("length_penalty", [1, 1.0]),
    ("use_beam_search", [False]),
    ("early_stopping", [False]),
    ("logits_processors", [[]]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}]),
    ("response_format", [{"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}]),
    ("structured_outputs", [{"json": {}, "disable_any_whitespace": True}, {"choice": ["a"]}]),
    ("structured_outputs", [{"regex": "a"}, {"grammar": "start: X"}, {"json_object": True}]),
    ("guided_json", [{}, True, "{}"]),
    ("guided_regex", ["a"]),
    ("guided_choice", [["a", "b"]]),
    ("guided_grammar", ["start: X"]),
    ("guided_decoding_backend", ["auto"]),
    ("ensure_complete", [False]),
    ("vllm_xargs", [{}]),
    ("timeout_s", [0.5, 86400]),
    ("repetition_detection", [{"max_pattern_size": 1, "min_count": 2}]),
]
OWN_EXAMPLES: dict[str, list[tuple[str, list[Any]]]] = {
    CHAT: [
        ("messages", [[USER, {"role": "assistant", "content": [{"type": "text", "text": ""}]}]]),
        ("messages", [[{**USER, "name": None, "tool_calls": [], "refusal": None}]]),
        ("add_generation_prompt", [True, False]),
        ("continue_final_message", [True, False]),
        ("chat_template", ["x"]),
        ("chat_template_kwargs", [{}, {"enable_thinking": True}]),
        ("add_special_tokens", [True, False]),
        ("messages", [[{**USER, "content": None}], [{**USER, "content": []}]]),
        ("messages", [[USER, {**CALLING, "content": None}, RESULT]]),
        ("tools", [[], [{"type": "function", "function": {"name": "f", "strict": True}}]]),
        ("documents", [[]]),
        ("mm_processor_kwargs", [{}]),
        ("max_completion_tokens", [1]),
        ("logprobs", [True, False]),
        ("top_logprobs", [0]),
        ("tool_choice", ["none", "auto"]),
        ("parallel_tool_calls", [True, False]),
        ("max_tool_calls", [1, 128]),
        ("functions", [[]]),
        ("function_call", ["none"]),
        ("modalities", [["text"]]),
        ("reasoning_effort", ["none", "high"]),
        ("include_reasoning", [True, False]),
        ("thinking_token_budget", [-1, 0, 100]),
        ("verbosity", ["medium"]),
        ("prompt_cache_retention", ["24h"]),
    ],
    COMPLETIONS: [
        ("prompt", ["", [0], [1, 2], ["a", "b"], [[1], [2, 3]], ["a", [1]]]),
        ("add_special_tokens", [True, False]),
        ("best_of", [1]),
        ("logprobs", [0, 20]),
        ("suffix", [""]),
    ],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_accepted_values_fit_and_null_is_as_good_as_absent(path: str) -> None:
    [needed] = NEEDED[path]
    examples = [*EXAMPLES, *OWN_EXAMPLES[path]]
    for name, values in examples:
        for value in values:
            body = {**needed, name: value}
            assert is_read(path, body), body
            assert fits(path, body), body
    [fields] = TABLES[path]
    nulls = {**dict.fromkeys(fields, None), **needed}
    assert is_read(path, nulls)
    assert fits(path, nulls)
    # Every field that can be given a value has one above, or in the test of streams.
    refused = {
        name
        for name, field in fields.items()
        if isinstance(field.read, Neutral) and not field.read.values
    }
    assert set(fields) - {name for name, _ in examples} == refused | {"stream_options"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_options_fit(path: str) -> None:
    [needed] = NEEDED[path]
    for options in (
        {},
        {"include_usage": True},
        {"include_usage": None, "continuous_usage_stats": True, "include_obfuscation": False},
    ):
        body = {**needed, "stream": True, "stream_options": options}
        assert is_read(path, body)
        assert fits(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, []),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"prompt": "a", "other": 1}),
        (COMPLETIONS, {"prompt": "a", "n": 0}),
        (COMPLETIONS, {"prompt": "a", "n": True}),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}),
        (COMPLETIONS, {"prompt": "a", "temperature": "1"}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": 0}),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"0a": 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x5": 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"05": 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}),
        (COMPLETIONS, {"prompt": "a", "request_id": "a b"}),
        (COMPLETIONS, {"prompt": "a", "request_id": "a" * 129}),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{**USER, "role": "tool"}]}),
        (CHAT, {"messages": [{**USER, "name": "ann"}]}),
        (CHAT, {"messages": [{"role": "user", "tool_calls": CALLING["tool_calls"]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": [USER], "tools": [{}]}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [USER]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/v1/cache/explain", {"prompt": "a", "messages": [USER]}),
        ("/v1/cache/release", {}),
        ("/v1/cache/release", {"session": ""}),
        ("/v1/cache/flush", {"session": "s"}),
    ],
)
def test_what_is_refused_does_not_fit(path: str, body: object) -> None:
    assert not is_read(path, body)
    assert not fits(path, body)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.floats(-3, 3), st.text(max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
PLAUSIBLE = {
    name: st.sampled_from(values)
    for name, values in [*EXAMPLES, *OWN_EXAMPLES[COMPLETIONS], *OWN_EXAMPLES[CHAT]]
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(NEEDED)))
    index = draw(st.integers(0, len(NEEDED[path]) - 1))
    body = dict(NEEDED[path][index])
    names = st.sampled_from(sorted(TABLES[path][index]) or ["none"])
    for name in draw(st.lists(names, max_size=6)):
        body[name] = draw(st.one_of(PLAUSIBLE.get(name, SCALARS), VALUES))
    return path, body


@given(bodies())
@settings(max_examples=300)
def test_whatever_is_read_fits(case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    with contextlib.suppress(InvalidRequestError):
        PARSERS[path](json.dumps(body).encode())
        VALIDATORS[path].validate(body)


@pytest.mark.parametrize(
    "row",
    [
        "| `truncate_prompt_tokens` | `-1` or integer, 1 to 2147483647 |",
        "| `stop` | text, 1 to 1024 or list of at most 16 (text, 1 to 1024) |",
        "| `bad_words` | list of at most 32 (text, 1 to 256) |",
        "| `cache_salt` | name, 1 to 512 |",
        "| `logit_bias` | object of at most 1024 (token id: number, -100 to 100) |",
        "| `allowed_token_ids` | list of 1 to 4096 (integer, 0 to 999999999) |",
        "| `request_id` | visible ASCII characters, 1 to 128 |",
        "`role` (`system`, `developer`, `user`",
        "not add_generation_prompt, continue_final_message, documents, messages, tools, nor a name",
    ],
)
def test_the_page_tells_what_is_enforced(row: str) -> None:
    assert row in api_page()

"""What answers have to be, over the wire: whatever the model likes, finished texts are valid."""

import json
import random
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.checkpoints import END_TOKEN_IDS
from tests.e2e.server import ServerProcess

Body = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "go"}]
RECURSIVE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "v": {"enum": [1, "two", None]},
                "k": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def random_schema(rng: random.Random, depth: int = 2) -> Body:
    """Make a schema whose texts are short, so that noise gets to their end."""
    kinds = ["string", "pattern", "integer", "number", "enum", "const", "boolean", "null"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * depth)
    if kind == "object":
        names = rng.sample(["a", "b c", 'q"', "ü", "long_name"], rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    simple: dict[str, Body] = {
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 5},
        "pattern": {"type": "string", "pattern": "^[a-f]{1,3}-[0-9]$"},
        "integer": {"type": "integer", "minimum": rng.randint(-99, 0), "maximum": 99},
        "number": {"type": "number", "minimum": 0, "maximum": 1},
        "enum": {"enum": ["x", 1, [2, {"y": None}], rng.randint(0, 9)]},
        "const": {"const": {"k": [rng.randint(0, 9), "ü\n"]}},
    }
    return simple.get(kind, {"type": kind})


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def choices_of(http: httpx.Client, path: str, body: Body) -> list[Body]:
    needed = {"messages": MESSAGES} if path == CHAT else {"prompt": "go"}
    response = http.post(path, json={**needed, "temperature": 1, **body})
    assert response.status_code == 200, response.text
    choices: list[Body] = response.json()["choices"]
    return choices


def text_of(choice: Body) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_finished_texts_follow_their_schemas(http: httpx.Client, server: ServerProcess) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(40)]
    hostile = {str(token_id): 100 for token_id in END_TOKEN_IDS}

    def run(index: int) -> tuple[Body, Body]:
        schema = schemas[index]
        format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        ways: list[Body] = [
            {"response_format": format_},
            {"guided_json": schema, "logit_bias": hostile},
            {"structured_outputs": {"json": schema}, "frequency_penalty": 2, "top_p": 0.9},
            {"guided_json": json.dumps(schema), "logit_bias": hostile, "min_tokens": 4},
        ]
        body = {"max_tokens": 300, "seed": index, **ways[index % 4]}
        [choice] = choices_of(http, (CHAT, COMPLETIONS)[index % 2], body)
        return schema, choice

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(len(schemas))))
    for schema, choice in results:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(text_of(choice)), schema)
        else:
            assert choice["finish_reason"] == "length"
    assert sum(choice["finish_reason"] == "stop" for _, choice in results) >= 35
    assert server.metric("jaxserve_serving_compiles_total") == 0


def test_a_complete_answer_fits_its_budget(http: httpx.Client) -> None:
    for max_tokens in (25, 26, 28, 31, 40):
        body = {"guided_json": PERSON, "max_tokens": max_tokens, "ensure_complete": True, "n": 3}
        for choice in choices_of(http, COMPLETIONS, {**body, "seed": max_tokens}):
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(text_of(choice)), PERSON)
    refused = http.post(COMPLETIONS, json={"prompt": "a", **body, "max_tokens": 2})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "ensure_complete"


def test_each_kind_of_grammar(http: httpx.Client) -> None:
    kinds: list[tuple[Body, str]] = [
        ({"guided_regex": "[ab]{3,9}@x\\.(com|org)"}, "[ab]{3,9}@x\\.(com|org)"),
        ({"structured_outputs": {"regex": "\\d{2}-\\d{2}"}}, "[0-9]{2}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no, never"]}, "yes|no, never"),
        ({"structured_outputs": {"choice": ["ü", "x y"]}}, "ü|x y"),
    ]
    for body, pattern in kinds:
        for path in (CHAT, COMPLETIONS):
            for choice in choices_of(http, path, {**body, "n": 2, "max_tokens": 40}):
                assert choice["finish_reason"] == "stop"
                assert re.fullmatch(pattern, text_of(choice))
    for body in ({"response_format": {"type": "json_object"}}, {"guided_json": {}}):
        for choice in choices_of(http, CHAT, {**body, "n": 4, "max_tokens": 100}):
            if choice["finish_reason"] == "stop":
                json.loads(text_of(choice))


def test_forced_text_and_the_path_are_told_in_timings(
    http: httpx.Client, server: ServerProcess
) -> None:
    before = server.metric("jaxserve_guided_forced_tokens_total")
    body: Body = {"prompt": "go", "max_tokens": 60, "temperature": 1, "seed": 3, "n": 2}
    answers = [
        http.post(COMPLETIONS, json={**body, **grammar}).json()
        for grammar in (
            {"guided_choice": ["only this, word for word"]},
            {"guided_json": PERSON},
            {},
        )
    ]
    paths = [answer["timings"]["grammar_path"] for answer in answers]
    assert paths == ["device", "device", None]
    told = [answer["timings"]["forced_n"] for answer in answers]
    assert told[0] == answers[0]["usage"]["completion_tokens"] - 2  # all but both end ids
    assert (told[1] > 0, told[2]) == (True, 0)
    assert server.metric("jaxserve_guided_forced_tokens_total") - before == sum(told)
    # What stops within forced text stops there, and counts no further.
    [cut] = choices_of(http, COMPLETIONS, {"guided_choice": ["one two three"], "stop": ["two"]})
    assert (text_of(cut), cut["finish_reason"]) == ("one ", "stop")
    first = http.post("/tokenize", json={"prompt": "one two three"}).json()["tokens"][1]
    [whole] = choices_of(
        http, COMPLETIONS, {"guided_choice": ["one two three"], "stop_token_ids": [first]}
    )
    assert text_of(whole) == "one two three"


def test_the_compiler_starts_without_a_fork(http: httpx.Client, server: ServerProcess) -> None:
    unheard = str(uuid.uuid4())  # kept by no earlier server
    [choice] = choices_of(http, COMPLETIONS, {"guided_choice": [unheard], "max_tokens": 60})
    assert text_of(choice) == unheard
    assert "compiled a grammar: choice" in server.log
    assert "RuntimeWarning" not in server.log
    assert "cannot compile a grammar to be warmed" not in server.log


def test_grammars_that_need_a_stack(http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    body: Body = {"guided_json": RECURSIVE, "n": 6, "max_tokens": 200}
    whole = complete(choices_of(http, CHAT, body))
    for text in whole:
        jsonschema.validate(json.loads(text), RECURSIVE)
    body = {"guided_grammar": 'start: "a" start "b" | "ab"', "n": 4, "max_tokens": 60}
    nested = complete(choices_of(http, COMPLETIONS, body))
    for text in nested:
        half = len(text) // 2
        assert text == "a" * half + "b" * half
    assert whole
    assert nested


def complete(choices: list[Any]) -> list[str]:
    """The texts of those that were not cut."""
    return [text_of(choice) for choice in choices if choice["finish_reason"] == "stop"]


def test_streams_and_company_get_the_same(http: httpx.Client) -> None:
    body: Body = {"guided_json": PERSON, "max_tokens": 80, "seed": 7, "logprobs": 1}
    [alone] = choices_of(http, COMPLETIONS, body)
    first, *others = choices_of(http, COMPLETIONS, {**body, "n": 5})
    assert text_of(first) == text_of(alone)
    assert first["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
    assert len({text_of(other) for other in others}) > 1
    with http.stream(
        "POST", COMPLETIONS, json={"prompt": "go", "temperature": 1, "stream": True, **body}
    ) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(event)["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == text_of(alone)
    assert chunks[-1]["finish_reason"] == alone["finish_reason"]
    [stopped] = choices_of(http, COMPLETIONS, {**body, "stop": ['":']})
    assert text_of(stopped) == text_of(alone).partition('":')[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": {"type": "object", "properties": {"y": {"type": "foo"}}}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"const": 10**30}}, "guided_json.const"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": 3}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"ensure_complete": True}, "ensure_complete"),
    ],
)
def test_what_cannot_be_enforced_is_refused(http: httpx.Client, body: Body, param: str) -> None:
    refused = http.post(COMPLETIONS, json={"prompt": "a", **body})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    message = refused.json()["error"]["message"]
    if "properties" in str(body):
        assert "/properties/y" in message


def test_a_grammar_can_be_checked(http: httpx.Client) -> None:
    texts = ['{"name":"a","age":3}', '{"name": 3}', ""]
    report = http.post("/v1/grammar/check", json={"guided_json": PERSON, "texts": texts}).json()
    assert report["path"] == "device"
    assert report["num_states"] > 10
    assert [text["accepted"] for text in report["texts"]] == [True, False, False]
    assert [text["offset"] for text in report["texts"]] == [len(texts[0]), 9, 0]
    assert report["texts"][1]["allowed"] == '"'
    assert http.post("/v1/grammar/check", json={"texts": texts}).status_code == 400

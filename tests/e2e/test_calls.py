"""Calls by grammar on the real engine: whatever a random model likes, its calls are good ones."""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.checkpoints import END_TOKEN_IDS
from tests.e2e.conftest import MODEL, Setup, fast_compiles
from tests.e2e.server import ServerProcess

pytestmark = pytest.mark.timeout(300)

CHAT = "/v1/chat/completions"
TEMPLATE = Path(__file__).parents[1] / "data/gemma4_chat/chat_template.jinja"
LAMP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "maxLength": 5},
        "level": {"type": "integer", "minimum": 1, "maximum": 9},
        "Mode": {"enum": ["on", "off", None]},
    },
    "required": ["room", "level"],
}
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    "required": ["at"],
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "v": {"enum": [1, "two"]},
        "k": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}},
    },
    "required": ["v"],
}
SCHEMAS = {"set_lamp": LAMP, "draw": POINT, "grow": TREE}
CALL_START, CALL_END, THOUGHT_START, QUOTE = 48, 49, 100, 52
USER = [{"role": "user", "content": "go"}]
SEED = {"seed": 11, "temperature": 1.0}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "description": name, "parameters": SCHEMAS[name], **fields}
    return {"type": "function", "function": function}


TOOLS = [tool("set_lamp"), tool("draw")]


@pytest.fixture(scope="module")
def http(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The shared server's checkpoint, with a template that knows tools."""
    folder = tmp_path_factory.mktemp("calls")
    checkpoint = folder / "model"
    shutil.copytree(setup.checkpoint, checkpoint)
    shutil.copy(TEMPLATE, checkpoint)
    flags = [*setup.flags, "--model", str(checkpoint)]
    with ServerProcess(folder, flags, environment=fast_compiles()) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield client
        assert server.metric("jaxserve_serving_compiles_total") == 0


def ask(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    reply = http.post(CHAT, json={"messages": USER, "tools": TOOLS, "max_tokens": 150, **body})
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def checked(choice: dict[str, Any]) -> list[str]:
    """Check a choice's calls, the last of which may be cut; returns their names."""
    calls = choice["message"].get("tool_calls", [])
    for i, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if i == len(calls) - 1 and choice["finish_reason"] == "length":
            break
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
    return [call["function"]["name"] for call in calls]


def test_required_calls_are_made_and_fit(http: httpx.Client) -> None:
    rng = random.Random(5)
    hostile = {str(i): rng.choice([-100, 100]) for i in rng.sample(range(1000), 60)}
    hostile |= dict.fromkeys(map(str, END_TOKEN_IDS), 100)
    hostile |= dict.fromkeys(map(str, (QUOTE, CALL_START, CALL_END)), -100)
    bodies: list[dict[str, Any]] = [
        {"n": 4},
        {"n": 4, "parallel_tool_calls": False, "temperature": 2.0},
        {"n": 3, "logit_bias": hostile, "min_tokens": 30},
        {"n": 3, "ignore_eos": True, "max_tokens": 60, "frequency_penalty": 2.0},
        {"n": 2, "max_tool_calls": 2, "stop": ["a", "}"]},
        {"n": 2, "tools": [*TOOLS, tool("grow")], "stop_token_ids": [CALL_END]},
    ]

    def forced(body: dict[str, Any]) -> list[dict[str, Any]]:
        return ask(http, **{**SEED, **body, "tool_choice": "required"})

    with ThreadPoolExecutor(6) as pool:
        answers = [choice for choices in pool.map(forced, bodies) for choice in choices]
    for choice in answers:
        assert checked(choice) or choice["finish_reason"] == "length"
        assert not choice["message"]["content"] or choice["finish_reason"] == "length"
        assert choice["finish_reason"] in ("tool_calls", "length")
    assert sum(choice["finish_reason"] == "tool_calls" for choice in answers) >= 12


def test_a_named_call(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "draw"}}
    for choice in ask(http, **SEED, n=3, tool_choice=named, parallel_tool_calls=False):
        assert checked(choice) == ["draw"]
        assert choice["finish_reason"] == "stop"
    # One that contains itself is guided from the host.
    named["function"] = {"name": "grow"}
    for choice in ask(http, n=2, tools=[tool("grow")], tool_choice=named, max_tokens=200):
        assert set(checked(choice)) == {"grow"}


def test_streams_say_the_same(http: httpx.Client) -> None:
    body = {"tool_choice": "required", "messages": USER, "tools": TOOLS, "model": MODEL, **SEED}
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        for fields in ({"max_tokens": 100}, {"max_tokens": 9}, {"max_tokens": 1}):
            whole = client.chat.completions.create(**body, **fields).choices[0]  # type: ignore[call-overload]
            calls: dict[int, list[str]] = {}
            content, reason = "", None
            for chunk in client.chat.completions.create(**body, **fields, stream=True):  # type: ignore[call-overload]
                choice = chunk.choices[0]
                content += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or ():
                    if call.function.name:
                        calls[call.index] = [call.function.name, ""]
                    calls[call.index][1] += call.function.arguments
            told = [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or ()]
            assert [calls[i] for i in range(len(calls))] == told
            assert (content, reason) == (whole.message.content or "", whole.finish_reason)


def test_calls_under_auto_fit_once_they_begin(http: httpx.Client) -> None:
    before = faults(http)
    for offered in (TOOLS, [*TOOLS, tool("grow", strict=True)]):
        bias = {str(CALL_START): 100}
        choices = ask(http, **SEED, tools=offered, n=3, logit_bias=bias, max_tokens=120)
        assert all(len(checked(choice)) > 1 for choice in choices)
    assert faults(http) == before


def faults(http: httpx.Client) -> list[str]:
    """Return the counts of repairs; a head that was cut is none."""
    lines = http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("jaxserve_turn_faults_total")]
    return [line for line in found if "not_a_call" not in line]


def test_what_is_forced_follows_a_thought(http: httpx.Client) -> None:
    thinking = {
        "chat_template_kwargs": {"enable_thinking": True},
        "logit_bias": {str(THOUGHT_START): 100},
        "thinking_token_budget": 6,
    }
    for choice in ask(http, **SEED, **thinking, n=2, tool_choice="required"):
        assert choice["message"]["reasoning"]
        assert checked(choice) or choice["finish_reason"] == "length"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": LAMP}}
    for choice in ask(http, **SEED, **thinking, n=3, tools=[], response_format=form):
        assert choice["message"]["reasoning"]
        jsonschema.validate(json.loads(choice["message"]["content"]), LAMP)
    # A thought that nobody closes is all there is.
    del thinking["thinking_token_budget"]
    thinking["logit_bias"] = {str(THOUGHT_START): 100, "101": -100}
    [choice] = ask(http, **SEED, **thinking, tools=[], response_format=form, max_tokens=30)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_an_answer_or_calls(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": LAMP}}
    kinds = set()
    for bias in (0, 100):
        choices = ask(http, **SEED, n=3, response_format=form, logit_bias={str(CALL_START): bias})
        for choice in choices:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), LAMP)
            else:
                assert checked(choice)
            kinds.add(choice["finish_reason"])
    assert len(kinds) > 1


def test_the_next_turn_finds_the_call_in_the_cache(http: httpx.Client) -> None:
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    fields = {"parallel_tool_calls": False, "return_token_ids": True, "max_tokens": 150}
    first = http.post(CHAT, json={**body, **fields}).json()
    message = first["choices"][0]["message"]
    call = message["tool_calls"][0]
    assert checked(first["choices"][0])
    answered = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    rendered = http.post(CHAT + "/render", json={"messages": answered, "tools": TOOLS}).json()
    assert f"<|tool_call>call:{call['function']['name']}{{" in rendered["prompt"]
    reply = http.post(CHAT, json={**body, "messages": answered, "max_tokens": 4}).json()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]

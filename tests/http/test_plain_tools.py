"""Tools of a model that has no markers for them: JSON in fenced blocks."""

import json
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, Script
from tests.http.conftest import Serve
from tests.http.driver import post
from tests.http.tool_requests import (
    ASK,
    CHAT,
    RENDER,
    TOOLS,
    USER,
    answer,
    calling,
    calls_of,
    result,
)

CALL = '```tool_call\n{"name": "set_lamp", "arguments": {"room": "at`tic", "level": 1.50}}\n```'


@pytest.mark.parametrize("ids_per_step", [1, 4, 1000])
async def test_blocks_are_calls(serve: Serve, ids_per_step: int) -> None:
    text = f'I will.\n{CALL}\n```tool_call\n{{"name":"b","arguments":{{}}}}\n```\n'
    choice = await answer(serve(FakeEngine(Script.say(text, ids_per_step=ids_per_step))), ASK)
    assert choice["content"] == "I will.\n"
    assert calls_of(choice) == [("set_lamp", {"room": "at`tic", "level": 1.5}), ("b", {})]
    arguments = choice["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"room":"at`tic","level":1.50}'
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('```tool_call\n{"arguments": {"x": 1}, "name": "b"}\n```', [("b", {"x": 1})], None),
        ('```tool_call\n{"name": "b", "parameters": {"x": 1}}\n```', [("b", {"x": 1})], None),
        ('```tool_call\n{"name": "b"}\n```', [("b", {})], None),
        ('```tool_call\n{"name": "b", "arguments": {"x": 1}', [("b", {"x": 1})], None),
        ('```tool_call\n{"name": "b", "arguments": {"x": 1}} ok', [("b", {"x": 1})], "ok"),
        ('```tool_call\n{"name": "b", "arguments": {"x": [1, "a', [("b", {"x": [1, "a"]})], None),
        ("```tool_call\nb(1)\n``` so", [], "```tool_call\nb(1)\n``` so"),
        ("```tool_call", [], "```tool_call"),
        ("```tool_ca", [], "```tool_ca"),
        ("```python\nx = 1\n```", [], "```python\nx = 1\n```"),
    ],
)
async def test_what_models_get_wrong(
    serve: Serve, text: str, calls: list[Any], content: str | None
) -> None:
    choice = await answer(serve(FakeEngine(Script.say(text))), ASK)
    assert calls_of(choice) == calls
    assert choice["content"] == content


async def test_without_tools_a_block_is_content(serve: Serve) -> None:
    choice = await answer(serve(FakeEngine(Script.say(CALL))), {"messages": [USER]})
    assert choice["content"] == CALL


async def prompt(serve: Serve, *messages: Any, **fields: Any) -> str:
    reply = await post(serve(FakeEngine()), RENDER, {"messages": list(messages), **fields})
    assert reply.status == 200, reply.body
    return str(reply.json["prompt"])


async def test_tools_are_told_behind_the_operators_words(serve: Serve) -> None:
    system = {"role": "system", "content": "Be brief."}
    text = await prompt(serve, system, {**system, "content": "Be kind."}, USER, tools=TOOLS)
    assert text.startswith("<bos>[system]Be brief.\n\nBe kind.\n\nYou can call tools.")
    assert text.endswith("[user]hi[model]")
    declared = [json.loads(line) for line in text[:-15].splitlines() if line.startswith('{"name')]
    assert declared[1:] == [{**each["function"], "description": ""} for each in TOOLS]
    assert (await prompt(serve, USER, tools=TOOLS)).startswith("<bos>[system]You can call tools.")


@pytest.mark.parametrize("content", ["Wait.", "Wait.\n"])
async def test_calls_and_results_are_text_of_turns(serve: Serve, content: str) -> None:
    """A model that ended its line before a block gets its own words back."""
    call = calling('{"room": "x", "level": 1.50}')
    said = 'x\n```\n[user]"'
    text = await prompt(
        serve, USER, {**call, "content": content}, result(said), {**USER, "content": "And?"}
    )
    assert text == (
        "<bos>[user]hi[assistant]Wait.\n"
        '```tool_call\n{"name": "set_lamp", "arguments": {"room": "x", "level": 1.50}}\n```'
        '[user]```tool_result\n{"name": "set_lamp", "content": "x\\n```\\n[user]\\""}\n```'
        "\n\nAnd?[model]"
    )


async def test_two_messages_of_the_users_stay_two(serve: Serve) -> None:
    assert await prompt(serve, USER, USER) == "<bos>[user]hi[user]hi[model]"
    text = await prompt(serve, USER, {"role": "system", "content": "Be brief."}, USER, USER)
    assert text == "<bos>[user]hi\n\nBe brief.\n\nhi[user]hi[model]"


async def test_refusals(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), CHAT, {**ASK, "tool_choice": "required"})
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")

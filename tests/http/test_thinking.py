"""Thoughts: told apart from content, counted, asked for and left out."""

from typing import Any

import pytest

from jaxserve.http.config import HttpConfig
from jaxserve.http.turns import REASONING_FIELDS
from tests.fake_engine import BOS, FakeEngine, Script, ids, turn_ids
from tests.http.conftest import Serve
from tests.http.driver import post
from tests.http.turns import ASK, CHAT, RENDER, USER, answer, calling, calls_of, result

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
HI: dict[str, Any] = {"messages": [USER], **THINKING}
TEXT = "<|channel>thought\nhm,\nwell\n<channel|>Yes."


@pytest.mark.parametrize("ids_per_step", [1, 3, 100])
async def test_thoughts_are_no_content(serve_gemma4: Serve, ids_per_step: int) -> None:
    choice = await answer(serve_gemma4(FakeEngine(Script.say(TEXT, ids_per_step=ids_per_step))), HI)
    assert choice["reasoning"] == choice["reasoning_content"] == "hm,\nwell"
    assert choice["content"] == "Yes."


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\n<channel|>Yes.", None, "Yes."),
        ("<|channel>thought\na\n\n<channel|>b<|channel>thought\nc<channel|>d", "a\nc", "bd"),
        ("<|channel>thinking\na<channel|>b", "thinking\na", "b"),
        ("<|channel>thou<channel|>b", None, "b"),
        ("<|channel>thought\na", "a", ""),
        ("<channel|>b", None, "b"),
        ('<|channel>thought\n<|"|>a<|"|><channel|>b', '"a"', "b"),
        ("<|channel>thought\na<|tool_call>call:b{}<tool_call|>", "a", None),
        ("<|channel>thought\na<|turn>model\nb<channel|>c", "amodel\nb", "c"),
    ],
)
async def test_stray_markers_reach_neither(
    serve_gemma4: Serve, text: str, reasoning: str | None, content: str | None
) -> None:
    for fields in (ASK, {**ASK, **THINKING}):
        choice = await answer(serve_gemma4(FakeEngine(Script.say(text))), fields)
        assert choice.get("reasoning") == reasoning
        assert choice["content"] == content


async def test_a_thought_that_the_prompt_opens(serve_gemma4: Serve) -> None:
    script = Script.say("plan\n<channel|>done<|tool_call>call:b{}<tool_call|>")
    engine = FakeEngine(script)
    request = {**ASK, **THINKING, "messages": [USER, calling(), result()]}
    choice = await answer(serve_gemma4(engine), request)
    assert engine.prompts[0][-9:] == turn_ids("<|channel>thought\n")
    assert (choice["reasoning"], choice["content"]) == ("plan", "done")
    assert calls_of(choice) == [("b", {})]


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
        ("none", set()),
    ],
)
async def test_a_flag_chooses_the_fields(serve_gemma4: Serve, flag: str, names: set[str]) -> None:
    config = HttpConfig(reasoning_fields=REASONING_FIELDS[flag])
    app = serve_gemma4(FakeEngine(Script.say(TEXT)), config)
    choice = await answer(app, HI)
    assert {name for name in choice if name.startswith("reasoning")} == names
    assert choice["content"] == "Yes."


async def test_a_request_can_leave_thoughts_out(serve_gemma4: Serve) -> None:
    app = serve_gemma4(FakeEngine(Script.say(TEXT)))
    choice = await answer(app, {**HI, "include_reasoning": False})
    assert not any(name.startswith("reasoning") for name in choice)
    assert choice["content"] == "Yes."


async def test_usage_counts_tokens_of_thoughts(serve_gemma4: Serve) -> None:
    engine = FakeEngine(Script.say(TEXT))
    usage = (await post(serve_gemma4(engine), CHAT, HI)).json["usage"]
    num_thought = len(turn_ids(TEXT)) - len(ids("Yes."))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    assert usage["completion_tokens"] == num_thought + len(ids("Yes.")) + 1


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}, True),
    ],
)
async def test_effort_is_the_templates_switch(
    serve_gemma4: Serve, fields: dict[str, Any], thinks: bool
) -> None:
    reply = await post(serve_gemma4(FakeEngine()), RENDER, {"messages": [USER], **fields})
    assert ("<|think|>" in reply.json["prompt"]) == thinks


async def test_refusals(serve_gemma4: Serve, serve: Serve) -> None:
    wrong = {"messages": [USER], "reasoning_effort": "none", **THINKING}
    reply = await post(serve_gemma4(FakeEngine()), CHAT, wrong)
    assert (reply.status, reply.error["param"]) == (400, "reasoning_effort")
    engine = FakeEngine()
    request = {"messages": [USER], "reasoning_effort": "high"}
    reply = await post(serve(engine), CHAT, request)
    assert (reply.status, reply.error["param"]) == (400, "reasoning_effort")
    await post(serve(engine), CHAT, {**request, "reasoning_effort": "none"})
    assert engine.prompts == [(BOS, *ids("[user]hi[model]"))]
    budget = {"messages": [USER], "thinking_token_budget": 5}
    reply = await post(serve_gemma4(FakeEngine()), CHAT, budget)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")

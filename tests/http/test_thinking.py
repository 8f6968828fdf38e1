"""Thoughts: told apart from content, counted, asked for and left out."""

from typing import Any

import pytest

from jaxserve.errors import EngineError, OverloadedError
from jaxserve.http.answer_parts import REASONING_FIELDS
from jaxserve.http.config import HttpConfig
from tests.fake_engine import BOS, MARKER_IDS, FakeEngine, Script, ids, turn_ids
from tests.http.conftest import Serve
from tests.http.driver import post
from tests.http.tool_requests import ASK, CHAT, RENDER, USER, answer, calling, calls_of, result

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
    reply = await post(serve(engine), CHAT, budget)
    assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
    reply = await post(serve_gemma4(engine), CHAT, {**budget, "logprobs": True})
    assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")


# Budgets: tokens are bytes, "thought\n" is eight of them.


@pytest.mark.parametrize("ids_per_step", [1, 4, 50])
async def test_a_thought_is_closed_when_it_has_had_its_tokens(
    serve_gemma4: Serve, ids_per_step: int
) -> None:
    first = Script.say("<|channel>thought\nhmm, well, so", ids_per_step=ids_per_step)
    scripts = (first, Script.say("Yes.", ids_per_step=ids_per_step))
    fields = {**HI, "thinking_token_budget": 11, "max_tokens": 50, "min_tokens": 20}
    engine = FakeEngine(*scripts, *scripts)
    choice = await answer(serve_gemma4(engine), fields)

    assert (choice["reasoning"], choice["content"]) == ("hmm", "Yes.")
    assert choice["finish_reason"] == "stop"
    before, after = engine.requests[:2]
    thought = turn_ids("<|channel>thought\nhmm\n<channel|>")
    assert after.prompt_ids == (*before.prompt_ids, *thought)
    assert after.request_id != before.request_id
    assert after.sampling.seed == before.sampling.seed
    assert after.sampling.max_tokens == 50 - len(thought)
    assert after.sampling.min_tokens == 20 - len(thought)
    assert after.sampling.logit_bias == ((MARKER_IDS["<|channel>"], -1e30),)
    assert engine.abort_reasons == ["stop"] * 2
    assert not engine.live

    engine = FakeEngine(*scripts)
    usage = (await post(serve_gemma4(engine), CHAT, fields)).json["usage"]
    assert usage["completion_tokens"] == len(thought) + len("Yes.") + 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    assert usage["prompt_tokens"] == len(before.prompt_ids)


@pytest.mark.parametrize("budget", [11, 12, -1])
async def test_a_thought_that_keeps_to_its_budget_is_left_alone(
    serve_gemma4: Serve, budget: int
) -> None:
    engine = FakeEngine(Script.say("<|channel>thought\nhm<channel|>Yes."))
    choice = await answer(serve_gemma4(engine), {**HI, "thinking_token_budget": budget})
    assert (choice["reasoning"], choice["content"]) == ("hm", "Yes.")
    assert len(engine.requests) == 2


async def test_no_thought_at_all(serve_gemma4: Serve) -> None:
    scripts = (Script.say("<|channel>though"), Script.say("Yes."))
    engine = FakeEngine(*scripts, *scripts)
    choice = await answer(serve_gemma4(engine), {**HI, "thinking_token_budget": 0})
    assert "reasoning" not in choice
    assert choice["content"] == "Yes."

    engine = FakeEngine(Script.say("Yes."))
    request = {**ASK, **THINKING, "messages": [USER, calling(), result()]}
    choice = await answer(serve_gemma4(engine), {**request, "thinking_token_budget": 0})
    assert (choice.get("reasoning"), choice["content"]) == (None, "Yes.")
    assert engine.prompts[0][-10:] == turn_ids("<|channel>thought\n<channel|>")


async def test_a_full_engine_lets_the_thought_go_on(serve_gemma4: Serve) -> None:
    engine = FakeEngine(Script.say("<|channel>thought\nhmm, well"), Script.say("Yes."))
    engine.refusals.extend([None, OverloadedError("full"), OverloadedError("full")])
    reply = await post(serve_gemma4(engine), CHAT, {**HI, "thinking_token_budget": 9})
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hmm", "Yes.")


async def test_a_budget_that_would_leave_nothing_is_the_answers_own(serve_gemma4: Serve) -> None:
    script = Script.say("<|channel>thought\nhmm", end="length")
    fields = {**HI, "thinking_token_budget": 10, "max_tokens": 12}
    engine = FakeEngine(script)
    choice = await answer(serve_gemma4(engine), fields)
    assert (choice["reasoning"], choice["finish_reason"]) == ("hmm", "length")
    assert len(engine.requests) == 2


@pytest.mark.parametrize("stage", [0, 1])
async def test_faults_of_either_sequence_are_told(serve_gemma4: Serve, stage: int) -> None:
    thought = turn_ids("<|channel>thought\nhmm")
    fault = EngineError("lost")
    scripts = [
        Script(steps=(thought,), end=fault if stage == 0 else None),
        Script(steps=(ids("a"),), end=fault if stage == 1 else "stop"),
    ]
    fields = {**HI, "thinking_token_budget": 20 if stage == 0 else 9}
    engine = FakeEngine(*scripts)
    reply = await post(serve_gemma4(engine), CHAT, fields)
    assert (reply.status, reply.error["message"]) == (500, "lost")
    assert not engine.live


async def test_a_timeout_ends_the_second_sequence_too(serve_gemma4: Serve) -> None:
    scripts = (Script.say("<|channel>thought\nhmm"), Script(steps=(ids("a"),), end=None))
    engine = FakeEngine(*scripts)
    fields = {**HI, "thinking_token_budget": 9, "timeout_s": 0.05}
    reply = await post(serve_gemma4(engine), CHAT, fields)
    choice = reply.json["choices"][0]
    assert choice["finish_details"] == {"type": "timeout"}
    assert choice["message"]["content"] == "a"
    assert not engine.live

"""Calls by grammar over HTTP: what each request asks of the engine, and what its answer says.

The engine plays a script, so what it says is checked against the grammar that it was given.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from jaxserve.errors import SchemaError
from jaxserve.guided.tables import Grammar, GrammarSpec
from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from tests.fake_engine import (
    EOS,
    MARKER_IDS,
    FakeEngine,
    Script,
    byte_model,
    ids,
    turn_ids,
)
from tests.http.driver import post
from tests.http.inline_grammars import InlineCompiler, Ways, with_grammars
from tests.http.tool_requests import (
    ASK,
    CHAT,
    FORCED,
    ONE,
    THINKING,
    USER,
    answer,
    answers,
    calling,
    calls_of,
    result,
    tool,
)

NAMED: dict[str, Any] = {**ASK, "tool_choice": {"type": "function", "function": {"name": "b"}}}
LAMP = '<|tool_call>call:set_lamp{level:3,room:<|"|>attic<|"|>}<tool_call|>'
B = "<|tool_call>call:b{}<tool_call|>"
RESPONSE = MARKER_IDS["<|tool_response>"]
UNENFORCEABLE = tool("u", x={"type": "array", "uniqueItems": True})


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("gemma4")
    return with_grammars(byte_model(folder, max_model_len=100_000, is_gemma4=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return with_grammars(byte_model(tmp_path_factory.mktemp("plain"), max_model_len=100_000))


def serve(model: ServedModel, engine: FakeEngine, **config: Any) -> Starlette:
    return build_app(engine, lambda: model, config=HttpConfig(**config), metrics=Metrics())


async def ways(model: ServedModel, request: dict[str, Any], **config: Any) -> Ways:
    """Return what the grammar of a request lets through."""
    engine = FakeEngine(Script.say(""))
    reply = await post(serve(model, engine, **config), CHAT, request)
    assert reply.status == 200, reply.body
    return Ways(engine.requests[0])


async def test_a_call_is_required(gemma4: ServedModel) -> None:
    may = await ways(gemma4, FORCED)
    assert may(LAMP) is may(B + LAMP) is True
    assert may("") is may("<|tool_call>call:set_lamp{level:3") is False
    assert may("Hi") is may(B + "Hi") is may("<|tool_call>call:c{") is None
    assert may("<|tool_call>call:set_lamp{room:1") is None
    assert may.end_ids == {RESPONSE, EOS, MARKER_IDS["<turn|>"]}
    ending = await ways(gemma4, {**FORCED, "ignore_eos": True})
    assert ending.end_ids == {RESPONSE}

    choice = await answer(serve(gemma4, FakeEngine(Script.say(LAMP + B))), FORCED)
    assert calls_of(choice) == [("set_lamp", {"level": 3, "room": "attic"}), ("b", {})]
    assert (choice["content"], choice["finish_reason"]) == (None, "tool_calls")


async def test_one_function_is_named(gemma4: ServedModel) -> None:
    may = await ways(gemma4, NAMED)
    assert may(B) is may(B + B) is True
    assert may("<|tool_call>call:s") is None

    choices = await answers(serve(gemma4, FakeEngine(Script.say(B))), {**NAMED, "n": 2})
    assert [calls_of(choice) for choice in choices] == [[("b", {})]] * 2
    # As OpenAI has it.
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2


async def test_one_call_is_all(gemma4: ServedModel) -> None:
    for fields in ({"parallel_tool_calls": False}, {"max_tool_calls": 1}):
        may = await ways(gemma4, {**FORCED, **fields})
        assert may(B) is True
        assert may(B + "<|tool_call>") is None
    # More than one are counted as they come.
    engine = FakeEngine(Script.say(B * 5))
    choice = await answer(serve(gemma4, engine), {**FORCED, "max_tool_calls": 2})
    assert calls_of(choice) == [("b", {})] * 2
    assert choice["finish_details"] == {"type": "max_tool_calls"}


@pytest.mark.parametrize("num_tokens", range(1, len(turn_ids(LAMP)) + 1, 4))
async def test_a_call_that_is_cut_is_told_as_such(gemma4: ServedModel, num_tokens: int) -> None:
    steps = tuple((token_id,) for token_id in turn_ids(LAMP)[:num_tokens])
    script = Script(steps=steps, end="length")
    choice = await answer(serve(gemma4, FakeEngine(script)), FORCED)
    assert choice["finish_reason"] == "length"
    if num_tokens <= len(turn_ids("<|tool_call>call:set_lamp")):
        assert "tool_calls" not in choice


async def test_calls_under_auto_are_held_from_their_opening_token(gemma4: ServedModel) -> None:
    may = await ways(gemma4, ASK)
    assert may("Hi") is may("") is may(LAMP) is may(f"Hi {LAMP} and {B}.") is True
    assert may("<|channel>thought\nhm<channel|>Hi") is True
    assert may("Hi <|tool_call>") is False
    assert may("<|tool_call>call:c{") is may("<|tool_call>call:b{a") is None
    assert may('<|tool_call>call:set_lamp{room:<|"|>a<|"|>,level:3') is None
    nothing = await ways(gemma4, {**ASK, "tool_choice": "none"})
    assert nothing.guidance is None


async def test_strictness_is_a_tool_s_or_the_server_s(gemma4: ServedModel) -> None:
    odd = "<|tool_call>call:set_lamp{zone:1}<tool_call|>"
    strict = {**ASK["tools"][0]["function"], "strict": True}
    loose = {**strict, "strict": False}
    for tools, config, expected in (
        (ASK["tools"], {}, None),
        (ASK["tools"], {"strict_tools": False}, True),
        ([{"function": strict}], {"strict_tools": False}, None),
        ([{"function": loose}], {}, True),
    ):
        for choice in ("auto", "required"):
            may = await ways(gemma4, {**ASK, "tools": tools, "tool_choice": choice}, **config)
            assert may(odd) is expected
            assert may("<|tool_call>call:set_lamp{zone 1}") is None


async def test_what_cannot_be_enforced(gemma4: ServedModel) -> None:
    tools = [*ASK["tools"], UNENFORCEABLE]
    metrics = Metrics()
    app = build_app(
        engine := FakeEngine(Script.say("")), lambda: gemma4, config=HttpConfig(), metrics=metrics
    )
    assert (await post(app, CHAT, {**ASK, "tools": tools})).status == 200
    assert b"jaxserve_loosened_tools_total 1.0" in metrics.render()
    may = Ways(engine.requests[0])
    assert may("<|tool_call>call:u{x:[1,1],y:2}<tool_call|>") is True
    assert may("<|tool_call>call:set_lamp{zone") is None

    strict = {"function": {**UNENFORCEABLE["function"], "strict": True}}
    for fields in (
        {"tools": tools, "tool_choice": "required"},
        {"tools": [*ASK["tools"], strict]},
        {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "u"}}},
    ):
        reply = await post(app, CHAT, {**ASK, **fields})
        assert (reply.status, reply.error["code"]) == (400, "unsupported_schema")
        assert reply.error["param"] == "tools[2].function.parameters"
        assert "'u'" in reply.error["message"]
        assert "/properties/x" in reply.error["message"]
    large = tool("v", x={"const": 10**30})
    reply = await post(app, CHAT, {**FORCED, "tools": [large]})
    assert reply.error["param"] == "tools[0].function.parameters.properties.x.const"
    assert (await post(app, CHAT, {**ASK, "tools": [large]})).status == 200


async def test_odd_tools_do_not_stand_in_each_other_s_way(gemma4: ServedModel) -> None:
    tools = [
        {"function": {"name": "any", "parameters": {"type": "object"}}},
        tool("long", x={"type": "string", "maxLength": 50_000}),
        {"function": {"name": "none"}},
        {"function": {"name": "empty", "parameters": {}}},
    ]
    texts = {
        "<|tool_call>call:any{a:[1]}<tool_call|>": True,
        '<|tool_call>call:long{x:<|"|>a<|"|>}<tool_call|>': True,
        "<|tool_call>call:none{}<tool_call|>": True,
        "<|tool_call>call:empty{}<tool_call|>": True,
        "<|tool_call>call:none{a": None,
    }
    for choice in ("auto", "required"):
        may = await ways(gemma4, {**ASK, "tools": tools, "tool_choice": choice})
        assert {text: may(text) for text in texts} == texts


# Beside thoughts and other grammars


async def test_a_thought_goes_before_what_is_forced(gemma4: ServedModel) -> None:
    for request, wanted in (
        ({**FORCED, **THINKING}, B),
        ({"messages": [USER], **ONE, **THINKING}, "1"),
    ):
        may = await ways(gemma4, request)
        assert may(wanted) is may(f"<|channel>thought\nhm\n<channel|>{wanted}") is True
        assert may("<|channel>thought\nhm") is may("<|channel>a<channel|>") is False
        assert may("Hi") is may(f"<|channel>hm{B}") is may("<|channel>hm<channel|>Hi") is None
    # Where the prompt has begun it, it is to be ended.
    may = await ways(gemma4, {**FORCED, **THINKING, "messages": [USER, calling(), result()]})
    assert may(f"plan\n<channel|>{B}") is True
    assert may("plan") is False
    assert may(B) is may("<channel|>Hi") is None


async def test_a_thought_that_is_closed_in_time_is_followed_by_the_grammar(
    gemma4: ServedModel,
) -> None:
    request = {**FORCED, **THINKING, "thinking_token_budget": 3}
    scripts = (Script.say("<|channel>abcdef"), Script.say(B))
    engine = FakeEngine(*scripts, *scripts)
    choice = await answer(serve(gemma4, engine), request)
    assert (choice["reasoning"], calls_of(choice)) == ("abc", [("b", {})])
    first, second = (Ways(request) for request in engine.requests[:2])
    assert first(f"<|channel>abc\n<channel|>{B}") is True
    assert second(B) is True
    assert second("<|channel>") is None


@pytest.mark.parametrize(
    "fields", [{}, {"tools": ASK["tools"]}, FORCED], ids=["free", "auto", "required"]
)
async def test_the_marker_that_closes_a_thought_is_scored(
    gemma4: ServedModel, fields: dict[str, Any]
) -> None:
    scripts = (Script.say("<|channel>abcdef"), Script.say(f"\n<channel|>{B}"))
    engine = FakeEngine(*scripts, *scripts)
    scored = {"logprobs": True, "prompt_logprobs": 0, "thinking_token_budget": 3}
    request = {"messages": [USER], **fields, **THINKING, **scored}
    reply = await post(serve(gemma4, engine), CHAT, request)
    assert reply.status == 200, reply.body
    told = reply.json["choices"][0]["logprobs"]["content"]
    text = f"<|channel>abc\n<channel|>{B if fields else ''}"
    assert [entry["token"] for entry in told[:6]] == ["<|channel>", *"abc\n", "<channel|>"]
    assert len(told) == len(turn_ids(text if fields else f"{text}{B}")) + 1
    before, after = engine.requests
    assert after.prompt_ids == (*before.prompt_ids, *turn_ids("<|channel>abc"))
    assert (before.sampling.num_prompt_logprobs, after.sampling.num_prompt_logprobs) == (0, None)
    may = Ways(after)
    assert may(f"\n<channel|>{B}") is True
    assert may("<channel|>") is may("\n\n") is may("b") is None
    assert may("\n<channel|>Hi") is (None if "tool_choice" in fields else True)
    # A thought that the prompt has begun, and that may not be.
    engine = FakeEngine(Script.say(f"<channel|>{B}"))
    history = {"messages": [USER, calling(), result()], "tools": ASK["tools"]}
    closed = {**request, **history, "thinking_token_budget": 0, "prompt_logprobs": None}
    reply = await post(serve(gemma4, engine), CHAT, closed)
    told = reply.json["choices"][0]["logprobs"]["content"]
    assert told[0]["token"] == "<channel|>"
    assert Ways(engine.requests[0])(f"<channel|>{B}") is True
    assert Ways(engine.requests[0])("x") is None


async def test_an_answer_or_calls(gemma4: ServedModel) -> None:
    may = await ways(gemma4, {**ASK, **ONE})
    assert may("1") is may(LAMP) is may(B + B) is True
    assert may("2") is may("1" + B) is may(B + "1") is None
    assert (await ways(gemma4, {**FORCED, **ONE}))("1") is None
    assert (await ways(gemma4, {**ASK, "guided_regex": "x+"}))("xx") is True

    app = serve(gemma4, FakeEngine())
    for fields in ({"guided_grammar": 'start: "a"'}, {"guided_regex": "("}):
        reply = await post(app, CHAT, {**ASK, **fields})
        assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))
        assert ("tools" in reply.error["message"]) == ("guided_grammar" in fields)


# Without markers


def block(text: str) -> str:
    return f"```tool_call\n{text}\n```"


async def test_calls_as_json(plain: ServedModel) -> None:
    b = block('{"name": "b", "arguments": {}}')
    lamp = block('{"name": "set_lamp", "arguments": {"room": "attic", "level": 3}}')
    may = await ways(plain, FORCED)
    assert may.takes(ids(b)) is may.takes(ids(f"{lamp}\n{b}")) is True
    assert may.takes(ids("Hi")) is may.takes(ids("```json")) is None
    choice = await answer(serve(plain, FakeEngine(Script.say(f"{lamp}\n{b}"))), FORCED)
    assert calls_of(choice) == [("set_lamp", {"room": "attic", "level": 3}), ("b", {})]
    assert (choice["content"], choice["finish_reason"]) == (None, "tool_calls")
    # No token tells that a call begins.
    assert (await ways(plain, ASK)).guidance is None
    either = await ways(plain, {**ASK, **ONE})
    assert either.takes(ids("1")) is either.takes(ids(b)) is True


async def check(model: ServedModel, fields: Mapping[str, Any]) -> Any:
    reply = await post(serve(model, FakeEngine()), "/v1/grammar/check", fields)
    assert reply.status == 200, reply.body
    return reply.json


async def test_a_check_is_of_the_same_grammar(gemma4: ServedModel, plain: ServedModel) -> None:
    texts = [LAMP, B + LAMP, "Hi", LAMP.replace("3", "x")]
    fields = {"tools": ASK["tools"], "texts": texts}
    report = await check(gemma4, {**fields, "tool_choice": "required"})
    assert report["path"] == "device"
    assert [verdict["accepted"] for verdict in report["texts"]] == [True, True, False, False]
    assert report["texts"][2] == {"accepted": False, "offset": 0, "allowed": "<|tool_call>"}
    assert report["texts"][3]["offset"] == LAMP.index("3")
    # Where the model may as well say something else.
    report = await check(gemma4, {**fields, "texts": [*texts, f"a {B} b", "a <|tool_call>b"]})
    accepted = [verdict["accepted"] for verdict in report["texts"]]
    assert accepted == [True, True, True, False, True, False]
    assert report["texts"][5] == {"accepted": False, "offset": 14, "allowed": "c"}
    report = await check(gemma4, {**fields, **ONE, "texts": ["1", B + B, "2", f"1{B}"]})
    assert [verdict["accepted"] for verdict in report["texts"]] == [True, True, False, False]
    unsure = {"tools": [*ASK["tools"], UNENFORCEABLE], "texts": [B, "Hi"]}
    report = await check(gemma4, unsure)
    assert report["loosened"] == [UNENFORCEABLE["function"]["name"]]
    assert [verdict["accepted"] for verdict in report["texts"]] == [True, True]

    fields["texts"] = [block('{"name": "b", "arguments": {}}'), LAMP]
    report = await check(plain, {**fields, "tool_choice": "required"})
    assert [verdict["accepted"] for verdict in report["texts"]] == [True, False]
    report = await check(plain, fields)
    assert report["path"] is None
    assert [verdict["accepted"] for verdict in report["texts"]] == [True, True]

    app = serve(gemma4, FakeEngine())
    for body, param in (
        ({**unsure, "tool_choice": "required"}, "tools[2].function.parameters"),
        ({"tools": ASK["tools"], "guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"tools": []}, "response_format"),
        ({"tools": ASK["tools"], "tool_choice": "none"}, "response_format"),
    ):
        reply = await post(app, "/v1/grammar/check", body)
        assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("schema", [{"type": "nope"}, {"properties": {"a": {"type": "int"}}}])
async def test_a_wrong_schema_of_an_answer_is_no_tools_fault(
    gemma4: ServedModel, schema: dict[str, Any]
) -> None:
    app = serve(with_grammars(gemma4), FakeEngine())
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = await post(app, CHAT, {**ASK, "response_format": wanted})
    assert reply.status == 400
    assert reply.error["param"] == "response_format.json_schema.schema"


async def test_a_wrong_tool_is_no_answers_fault(gemma4: ServedModel) -> None:
    strict = {"type": "function", "function": {**UNENFORCEABLE["function"], "strict": True}}
    app = serve(with_grammars(gemma4), FakeEngine())
    reply = await post(app, CHAT, {**ASK, **ONE, "tools": [*ASK["tools"], strict]})
    assert (reply.status, reply.error["param"]) == (400, "tools[2].function.parameters")


async def test_a_compiler_that_fails_leaves_calls_free(
    gemma4: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: object, spec: GrammarSpec) -> Grammar:
        raise SchemaError("it takes too long", code="schema_too_complex")

    monkeypatch.setattr(InlineCompiler, "compile", fail)
    model = with_grammars(gemma4)
    assert (await ways(model, ASK)).guidance is None
    app = serve(model, FakeEngine())
    reply = await post(app, CHAT, FORCED)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    strict = {"function": {**ASK["tools"][0]["function"], "strict": True}}
    reply = await post(app, CHAT, {**ASK, "tools": [strict]})
    assert (reply.status, reply.error["param"]) == (400, "tools")

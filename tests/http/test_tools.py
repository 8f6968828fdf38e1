"""Calls on the wire: what a scripted model writes, and what its client reads."""

from typing import Any

import pytest

from jaxserve.metrics import Metrics
from tests.fake_engine import MARKER_IDS, FakeEngine, Script, turn_ids
from tests.http.conftest import Serve
from tests.http.driver import post
from tests.http.tool_requests import ASK, CHAT, TOOLS, USER, answer, answers, calls_of

Q = '<|"|>'
LAMP = f"<|tool_call>call:set_lamp{{level:3,room:{Q}attic{Q}}}<tool_call|>"
LAMP_CALL = ("set_lamp", {"level": 3, "room": "attic"})


@pytest.mark.parametrize("ids_per_step", [1, 2, 3, 7, 1000])
async def test_calls_are_the_same_however_steps_cut_them(
    serve_gemma4: Serve, ids_per_step: int
) -> None:
    text = f"I will.{LAMP}<|tool_call>call:b{{}}<tool_call|>"
    engine = FakeEngine(Script.say(text, ids_per_step=ids_per_step))
    choice = await answer(serve_gemma4(engine), ASK)
    assert choice["content"] == "I will."
    assert [call["function"]["arguments"] for call in choice["tool_calls"]] == [
        '{"level":3,"room":"attic"}',
        "{}",
    ]
    assert calls_of(choice) == [LAMP_CALL, ("b", {})]
    assert choice["finish_reason"] == "tool_calls"


async def test_content_is_null_beside_calls_and_choices_have_ids_of_their_own(
    serve_gemma4: Serve,
) -> None:
    first, second = await answers(serve_gemma4(FakeEngine(Script.say(LAMP))), {**ASK, "n": 2})
    assert first["content"] is None
    assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        # Values
        (
            f'<|tool_call>call:b{{x:{Q}say "hi", {{[1]}} \\ end{Q}}}<tool_call|>',
            [("b", {"x": 'say "hi", {[1]} \\ end'})],
            None,
        ),
        (
            "<|tool_call>call:b{x:[\"plain\",'single'],y:None}<tool_call|>",
            [("b", {"x": ["plain", "single"], "y": None})],
            None,
        ),
        (
            f"<|tool_call>call:b{{a:{{b:[{{c:{Q}}}{Q}}}]}}}}<tool_call|>",
            [("b", {"a": {"b": [{"c": "}"}]}})],
            None,
        ),
        (
            "<|tool_call>call:b{note:one, two,n:2}<tool_call|>",
            [("b", {"note": "one, two", "n": 2})],
            None,
        ),
        (
            "<|tool_call>call:b{n:123456789012345678901234567890}<tool_call|>",
            [("b", {"n": 123456789012345678901234567890})],
            None,
        ),
        # Openers and closers
        ("<|tool_call>set_lamp{}<tool_call|>", [("set_lamp", {})], None),
        ("<channel|>call:set_lamp{}", [("set_lamp", {})], None),
        ("call:set_lamp{room:attic}", [("set_lamp", {"room": "attic"})], None),
        (
            "<|tool_call>call:set_lamp(level=1)<tool_call|><|tool_call>call:set_lamp{}<tool_call|>",
            [("set_lamp", {"level": 1}), ("set_lamp", {})],
            None,
        ),
        (
            f"<|tool_call>call:set_lamp{{room:{Q}attic}}<tool_call|>",
            [("set_lamp", {"room": "attic"})],
            None,
        ),
        (f"<|tool_call>call:set_lamp{{room:{Q}attic{Q}", [("set_lamp", {"room": "attic"})], None),
        (
            f"<|tool_call>call:set_lamp{{room:{Q}attic{Q}}}Done.",
            [("set_lamp", {"room": "attic"})],
            "Done.",
        ),
        ("<|tool_call>call:set_lamp<tool_call|>", [("set_lamp", {})], None),
        ("<|tool_call>call:default_api.Set_Lamp{}<tool_call|>", [("set_lamp", {})], None),
        ('<|tool_call>{"name":"b","arguments":{"x":1}}<tool_call|>', [("b", {"x": 1})], None),
        # By the schema
        ("<|tool_call>call:set_lamp{room:5}<tool_call|>", [("set_lamp", {"room": "5"})], None),
        (
            f"<|tool_call>call:set_lamp{{level:{Q}3{Q}}}<tool_call|>",
            [("set_lamp", {"level": 3})],
            None,
        ),
        # None of the client's tools, but clearly a call
        ("<|tool_call>call:other{}<tool_call|>", [("other", {})], None),
        # What is no call comes back
        ("<|tool_call>hello there<tool_call|>", [], "hello there"),
        ("<|tool_call>", [], ""),
        ("call:unknown{}", [], "call:unknown{}"),
        (f"a{Q}b", [], 'a"b'),
        ("so<tool_call|> it is", [], "so it is"),
        ("calling: b{}", [], "calling: b{}"),
    ],
)
async def test_what_models_get_wrong_is_put_right_or_given_back(
    serve_gemma4: Serve, text: str, calls: list[Any], content: str | None
) -> None:
    choice = await answer(serve_gemma4(FakeEngine(Script.say(text))), ASK)
    assert calls_of(choice) == calls
    assert choice["content"] == content
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_faults_and_calls_are_counted(serve_gemma4: Serve) -> None:
    metrics = Metrics()
    text = f"{LAMP}<|tool_call>set_lamp{{}}<tool_call|><|tool_call>hm<tool_call|>"
    app = serve_gemma4(FakeEngine(Script.say(text)), None, metrics)
    await post(app, CHAT, ASK)
    lines = metrics.render().decode().splitlines()
    assert "jaxserve_tool_calls_total 2.0" in lines
    assert 'jaxserve_turn_faults_total{fault="label_of_call"} 1.0' in lines
    assert 'jaxserve_turn_faults_total{fault="not_a_call"} 1.0' in lines


async def test_a_long_argument_streams_as_it_comes(serve_gemma4: Serve) -> None:
    body = "\tline “é🙂”\r\n```py\nx = {'a': [1]}\n```\n" * 1500
    script = Script.say(f"<|tool_call>call:b{{body:{Q}{body}{Q}}}<tool_call|>", ids_per_step=50)
    engine = FakeEngine(script)
    choice = await answer(serve_gemma4(engine), ASK)
    assert calls_of(choice) == [("b", {"body": body})]

    streamed = await post(serve_gemma4(FakeEngine(script)), CHAT, {**ASK, "stream": True})
    deltas = [
        call["function"]["arguments"]
        for chunk in streamed.chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert max(map(len, deltas)) < 200
    assert len(deltas) > 1000


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<|tool_call>", 0, ""),
        ("<|tool_call>call:set_l", 0, "call:set_l"),
        (f"<|tool_call>call:set_lamp{{room:{Q}att", 1, None),
        (f"{LAMP}<|tool_call>call:b{{x:1", 2, None),
        (f"{LAMP} and", 1, " and"),
    ],
)
async def test_a_cut_call_is_told_as_far_as_it_came(
    serve_gemma4: Serve, text: str, calls: int, content: str | None
) -> None:
    choice = await answer(serve_gemma4(FakeEngine(Script.say(text, end="length"))), ASK)
    assert choice["finish_reason"] == "length"
    assert len(choice.get("tool_calls", [])) == calls
    assert choice["content"] == content
    if calls:
        arguments = choice["tool_calls"][-1]["function"]["arguments"]
        assert arguments in ('{"room":"att', '{"x":', '{"level":3,"room":"attic"}')


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_there_are_no_calls(
    serve_gemma4: Serve, fields: dict[str, Any]
) -> None:
    choice = await answer(
        serve_gemma4(FakeEngine(Script.say(f"Well. {LAMP}"))), {"messages": [USER], **fields}
    )
    assert "tool_calls" not in choice
    assert choice["content"] == 'Well. call:set_lamp{level:3,room:"attic"}'
    assert choice["finish_reason"] == "stop"


async def test_tool_choice_none_keeps_the_prompt_and_bans_calls(serve_gemma4: Serve) -> None:
    engine = FakeEngine()
    await post(serve_gemma4(engine), CHAT, ASK)
    bias = {"logit_bias": {str(MARKER_IDS["<|tool_call>"]): 5, "7": 1}}
    await post(serve_gemma4(engine), CHAT, {**ASK, "tool_choice": "none", **bias})
    auto, none = engine.requests
    assert none.prompt_ids == auto.prompt_ids
    assert auto.sampling.logit_bias == ()
    assert none.sampling.logit_bias == ((7, 1), (MARKER_IDS["<|tool_call>"], -1e30))


async def test_an_opened_response_ends_the_turn_even_where_end_ids_do_not(
    serve_gemma4: Serve,
) -> None:
    end = MARKER_IDS["<|tool_response>"]
    script = Script(steps=(turn_ids(LAMP), (end,)))
    engine = FakeEngine(script)
    choice = await answer(serve_gemma4(engine), {**ASK, "ignore_eos": True})
    assert engine.requests[0].sampling.stop_token_ids == {end}
    assert (choice["finish_reason"], choice["content"]) == ("tool_calls", None)
    await post(serve_gemma4(engine), CHAT, {"messages": [USER], "ignore_eos": True})
    assert engine.requests[-1].sampling.stop_token_ids == frozenset()


async def test_stop_strings_end_content_and_no_argument(serve_gemma4: Serve) -> None:
    stop = {**ASK, "stop": ["}"]}
    choice = await answer(serve_gemma4(FakeEngine(Script.say("a}b"))), stop)
    assert (choice["content"], choice["finish_reason"]) == ("a", "stop")
    script = Script.say(f"<|tool_call>call:b{{x:{Q}a}}b{Q}}}<tool_call|>c}}d")
    choice = await answer(serve_gemma4(FakeEngine(script)), stop)
    assert calls_of(choice) == [("b", {"x": "a}b"})]
    assert (choice["content"], choice["finish_reason"]) == ("c", "tool_calls")


async def test_one_call_at_a_time(serve_gemma4: Serve) -> None:
    engine = FakeEngine(Script.say(f"{LAMP}<|tool_call>call:b{{}}<tool_call|>", ids_per_step=99))
    choice = await answer(serve_gemma4(engine), {**ASK, "parallel_tool_calls": False})
    assert calls_of(choice) == [LAMP_CALL]
    assert (choice["finish_reason"], choice["finish_details"]) == ("tool_calls", None)


async def test_logprobs_and_ids_come_with_every_part(serve_gemma4: Serve) -> None:
    text = f"<|channel>thought\nhm<channel|>ok{LAMP}"
    fields = {**ASK, "logprobs": True, "return_token_ids": True}
    engine = FakeEngine(Script.say(text))
    whole = (await post(serve_gemma4(engine), CHAT, fields)).json["choices"][0]
    chunks = (await post(serve_gemma4(engine), CHAT, {**fields, "stream": True})).chunks
    deltas = [chunk["choices"][0] for chunk in chunks]
    token_ids = [i for delta in deltas for i in delta.get("token_ids", [])]
    assert token_ids == whole["token_ids"] == [*turn_ids(text), 1]
    told = [e for delta in deltas if delta["logprobs"] for e in delta["logprobs"]["content"]]
    assert told == whole["logprobs"]["content"]
    assert len(told) == len(token_ids)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
            "unsupported_parameter",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "c"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "invalid_value"),
        ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"$ref": "#/x"}}}]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
        ({"functions": [{"name": "a"}]}, "functions", "unsupported_parameter"),
    ],
)
async def test_refusals(serve_gemma4: Serve, fields: dict[str, Any], param: str, code: str) -> None:
    reply = await post(serve_gemma4(FakeEngine()), CHAT, {**ASK, **fields})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, code)

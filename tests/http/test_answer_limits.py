"""What cuts an answer beside its budget, and how the answer tells."""

from typing import Any

import pytest

from jaxserve.http.limits import LoopDetector
from jaxserve.openai.options import Repetition
from tests.fake_engine import FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import post
from tests.http.tool_requests import ASK, CHAT, USER, answer, answers, calls_of

HI: dict[str, Any] = {"messages": [USER]}
CALL = "<|tool_call>call:b{}<tool_call|>"


async def test_a_timeout_tells_what_there_is(serve_gemma4: Serve) -> None:
    script = Script(steps=(ids("ab"),), end=None)
    engine = FakeEngine(script)
    choice = await answer(serve_gemma4(engine), {**HI, "timeout_s": 0.05})
    assert (choice["content"], choice["finish_reason"]) == ("ab", "length")
    assert choice["finish_details"] == {"type": "timeout"}
    assert set(engine.abort_reasons) == {"stop"}
    assert not engine.live


async def test_a_timeout_in_the_queue_was_all_waiting(serve: Serve) -> None:
    reply = await post(serve(FakeEngine(Script(end=None))), CHAT, {**HI, "timeout_s": 0.01})
    timings = reply.json["timings"]
    assert (timings["queue_ms"], timings["prompt_ms"], timings["predicted_ms"]) == (3, 0, 0)
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 0, 0)


async def test_a_timeout_spares_what_has_ended(serve_gemma4: Serve) -> None:
    engine = FakeEngine(Script.say("a"), Script(steps=(ids("b"),), end=None))
    choices = (await post(serve_gemma4(engine), CHAT, {**HI, "n": 2, "timeout_s": 0.05})).json[
        "choices"
    ]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert "finish_details" not in choices[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HI, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "a long one", "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "a long one", "echo": True, "logprobs": 1, "stream": True}),
    ],
)
async def test_a_timeout_does_not_wait_for_scores(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    """The first sequence would tell them; the second had ended, and waited for them."""
    engine = FakeEngine(Script(delay_s=0.03, scores_per_event=1), Script.say("a"))
    body = {**body, "n": 2, "timeout_s": 0.05}
    reply = await post(serve(engine), path, body)
    assert reply.status == 200
    if body.get("stream"):
        choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
        choices = [choice for choice in choices if choice["finish_reason"] is not None]
    else:
        choices = reply.json["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1]
    for choice in choices:
        assert choice["finish_reason"] == "length"
        assert choice["finish_details"] == {"type": "timeout"}


async def test_a_timeout_that_does_not_come_changes_nothing(serve: Serve) -> None:
    engine = FakeEngine(Script.say("a"))
    reply = await post(serve(engine), "/v1/completions", {"prompt": "x", "timeout_s": 60})
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted == []


@pytest.mark.parametrize(("limit", "details"), [(1, True), (2, True), (3, False)])
async def test_so_many_calls(serve_gemma4: Serve, limit: int, details: bool) -> None:
    engine = FakeEngine(Script.say(CALL + CALL, ids_per_step=5))
    choice = await answer(serve_gemma4(engine), {**ASK, "max_tool_calls": limit})
    assert calls_of(choice) == [("b", {})] * min(limit, 2)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["finish_details"] == ({"type": "max_tool_calls"} if details else None)


async def test_a_loop_is_cut(serve_gemma4: Serve, serve: Serve) -> None:
    loop = {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}
    script = Script.say("oh abcabcabcabcabc")
    choice = await answer(serve_gemma4(FakeEngine(script)), {**HI, **loop})
    assert (choice["content"], choice["finish_reason"]) == ("oh abcabcabc", "length")
    assert choice["finish_details"] == {"type": "repetition"}
    reply = await post(serve(FakeEngine(script)), "/v1/completions", {"prompt": "x", **loop})
    assert reply.json["choices"][0]["text"] == "oh abcabcabc"
    assert reply.json["choices"][0]["finish_details"] == {"type": "repetition"}


async def test_a_loop_in_a_call_leaves_it_cut(serve_gemma4: Serve) -> None:
    loop = {"repetition_detection": {"max_pattern_size": 1, "min_count": 4}}
    script = Script.say('<|tool_call>call:b{x:<|"|>no aaaaaaa')
    for choice in await answers(serve_gemma4(FakeEngine(script)), {**ASK, **loop}):
        assert choice["tool_calls"][0]["function"]["arguments"] == '{"x":"no aaaa'
        assert choice["finish_reason"] == "length"


def in_loop(token_ids: list[int], repetition: Repetition) -> bool:
    """Say it by the definition."""
    return any(
        token_ids[-size * repetition.min_count :] == token_ids[-size:] * repetition.min_count
        for size in range(repetition.min_size, repetition.max_size + 1)
    )


@pytest.mark.parametrize("min_count", [2, 3])
@pytest.mark.parametrize(("min_size", "max_size"), [(1, 1), (1, 3), (2, 5)])
def test_loops_are_found_by_their_definition(min_size: int, max_size: int, min_count: int) -> None:
    repetition = Repetition(min_size=min_size, max_size=max_size, min_count=min_count)
    detector = LoopDetector(repetition)
    seen: list[int] = []
    state = 1
    for _ in range(3000):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        seen.append(state >> 16 & 1)
        assert detector.push(seen[-1]) == in_loop(seen, repetition)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count"),
        (
            {
                "repetition_detection": {
                    "max_pattern_size": 3,
                    "min_pattern_size": 4,
                    "min_count": 2,
                }
            },
            "repetition_detection.min_pattern_size",
        ),
    ],
)
async def test_refusals(serve: Serve, fields: dict[str, Any], param: str) -> None:
    reply = await post(serve(FakeEngine()), CHAT, {**HI, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)

import threading

import pytest

from jaxserve.errors import EngineError, OverloadedError
from jaxserve.http.config import HttpConfig
from jaxserve.text.tokenizer import Tokenizer
from tests.fake_engine import BOS, END_OF_TURN, EOS, FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import post

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_whole_answer(serve: Serve) -> None:
    engine = FakeEngine(Script.say("yes", cached_tokens=3))
    reply = await post(serve(engine), CHAT, {**HI, "model": "org/byte-model"})
    answer = reply.json
    assert reply.status == 200
    assert answer.pop("id") == f"chatcmpl-{reply.headers['x-request-id']}"
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("timings")["predicted_n"] == answer["usage"]["completion_tokens"]
    assert answer == {
        "object": "chat.completion",
        "model": "org/byte-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 16,
            "completion_tokens": 4,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


# The first line as an agent's command line sends it, and the last as another's does.
MOVING = """x-cli-billing: version=2.1.{0}; nonce={0}0aaa;
You are helpful.
Current date and time: Monday, March 9, 2026 at 06:00:{0} PM PDT"""
DROPPED = (r"^x-cli-billing:.*\n", r"^(Current date).*")


@pytest.mark.parametrize("path", [CHAT, CHAT + "/render", "/tokenize"])
@pytest.mark.parametrize("in_parts", [False, True])
async def test_what_moves_in_a_system_message_can_be_left_out(
    serve: Serve, path: str, in_parts: bool
) -> None:
    prompts = []
    for moment in ("07", "31"):
        content: object = MOVING.format(moment)
        if in_parts:
            content = [{"type": "text", "text": line} for line in str(content).splitlines(True)]
        messages = [
            {"role": "developer", "content": content},
            {"role": "user", "content": "Current date of this?\nCurrent date: 5"},
        ]
        engine = FakeEngine()
        app = serve(engine, HttpConfig(dropped_from_system=DROPPED))
        reply = await post(app, path, {"messages": messages})
        assert reply.status == 200
        field = "tokens" if path == "/tokenize" else "token_ids"
        prompts.append(engine.prompts[0] if path == CHAT else tuple(reply.json[field]))
    kept = "[system]You are helpful.\n[user]Current date of this?\nCurrent date: 5[model]"
    assert prompts == [(BOS, *ids(kept))] * 2


async def test_nothing_is_left_out_unasked(serve: Serve) -> None:
    engine = FakeEngine()
    content = MOVING.format("07")
    await post(serve(engine), CHAT, {"messages": [{"role": "system", "content": content}]})
    assert engine.prompts == [(BOS, *ids(f"[system]{content}[model]"))]


async def test_timings_of_several_sequences(serve: Serve) -> None:
    """From the first start over the first token to the last end, however they overlap."""
    engine = FakeEngine(Script.say("yes", cached_tokens=3))
    reply = await post(serve(engine), CHAT, {**HI, "n": 3})
    timings = reply.json["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (3, 13, 12)
    assert (timings["queue_ms"], timings["prompt_ms"], timings["predicted_ms"]) == (1, 1, 1)


async def test_prompt_is_the_template_with_one_bos(serve: Serve) -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    await post(serve(engine), CHAT, {"messages": messages})
    assert engine.prompts == [(BOS, *ids("[system]be brief[user]ab[assistant]c[user]d[model]"))]


async def test_sampling_fields_reach_the_engine(serve: Serve) -> None:
    engine = FakeEngine()
    fields = {
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
    }
    await post(serve(engine), CHAT, {**HI, **fields})
    sampling = engine.requests[0].sampling
    assert sampling.max_tokens == 7
    assert sampling.temperature == 0
    assert sampling.top_p == 0.5
    assert sampling.top_k == 40
    assert sampling.min_p == 0.1
    assert sampling.seed == 2**64 - 1
    assert sampling.stop_token_ids == {EOS, END_OF_TURN}


async def test_default_budget_is_the_rest_of_the_context(serve: Serve) -> None:
    engine = FakeEngine()
    await post(serve(engine), CHAT, HI)
    request = engine.requests[0]
    assert len(request.prompt_ids) + request.sampling.max_tokens == 1000


async def test_unseeded_requests_differ(serve: Serve) -> None:
    engine = FakeEngine()
    app = serve(engine)
    await post(app, CHAT, HI)
    await post(app, CHAT, HI)
    assert engine.requests[0].sampling.seed != engine.requests[1].sampling.seed


async def test_ignore_eos_lets_end_ids_pass_unseen(serve: Serve) -> None:
    script = Script(steps=(ids("a"), (EOS,), ids("b")), end="length")
    engine = FakeEngine(script)
    reply = await post(serve(engine), CHAT, {**HI, "ignore_eos": True})
    assert engine.requests[0].sampling.stop_token_ids == frozenset()
    assert reply.json["choices"][0]["message"]["content"] == "ab"
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.json["usage"]["completion_tokens"] == 3


async def test_return_token_ids(serve: Serve) -> None:
    engine = FakeEngine(Script.say("ab"))
    answer = (await post(serve(engine), CHAT, {**HI, "return_token_ids": True})).json
    assert answer["prompt_token_ids"] == [BOS, *ids("[user]hi[model]")]
    assert answer["choices"][0]["token_ids"] == [*ids("ab"), EOS]


async def test_n_choices_have_seeds_of_their_own_and_one_prompt(serve: Serve) -> None:
    engine = FakeEngine(Script.say("a", cached_tokens=2), Script.say("bb", cached_tokens=9))
    answer = (await post(serve(engine), CHAT, {**HI, "n": 2, "seed": 0})).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "bb"]
    assert answer["usage"]["prompt_tokens"] == 16
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    # SplitMix64's first output from state 0.
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [0, 0xE220A8397B1DCDAF]


async def test_engine_ids_differ_where_clients_repeat_theirs(serve: Serve) -> None:
    engine = FakeEngine()
    app = serve(engine)
    await post(app, CHAT, {**HI, "n": 2})
    await post(app, CHAT, {**HI, "n": 2})
    assert len({request.request_id for request in engine.requests}) == 4


async def test_refused_samples_leave_nothing_behind(serve: Serve) -> None:
    engine = FakeEngine(Script(end=None))
    engine.refusals.append(OverloadedError("full"))
    reply = await post(serve(engine), CHAT, {**HI, "n": 3})
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert reply.error["code"] == "queue_full"
    assert not engine.live


async def test_failed_sample_fails_the_request_and_aborts_the_others(serve: Serve) -> None:
    engine = FakeEngine(Script(end=None), Script(steps=(ids("a"),), end=EngineError("lost")))
    reply = await post(serve(engine), CHAT, {**HI, "n": 2})
    assert (reply.status, reply.error["message"]) == (500, "lost")
    assert len(engine.aborted) == 1
    assert not engine.live


async def test_abort_by_the_engine_is_an_error(serve: Serve) -> None:
    reply = await post(serve(FakeEngine(Script(steps=(ids("a"),), end="abort"))), CHAT, HI)
    assert (reply.status, reply.error["code"]) == (503, "unavailable")


@pytest.mark.parametrize(("length", "is_on_the_loop"), [(100, True), (3_000, False)])
async def test_a_long_conversation_is_encoded_off_the_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, length: int, is_on_the_loop: bool
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def spy(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    await post(serve(FakeEngine()), CHAT, {"messages": [{"role": "user", "content": "x" * length}]})
    assert [thread == threading.get_ident() for thread in threads] == [is_on_the_loop]


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(serve: Serve) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 3_000}]}
    reply = await post(serve(FakeEngine()), CHAT, long)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "3014" in reply.error["message"]
    assert "1000" in reply.error["message"]

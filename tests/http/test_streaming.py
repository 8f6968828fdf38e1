import asyncio
import json
import time
from collections.abc import AsyncGenerator

import pytest

from jaxserve.errors import EngineDeadError
from jaxserve.http.config import HttpConfig
from jaxserve.http.sse import EventStreamResponse
from tests.fake_engine import BOS, EOS, FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import open_connection, open_post, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
PROMPT = {"prompt": "hi", "stream": True}


# What the scripted engine's times are told as: a millisecond each.
def timings(num_prompt: int, num_predicted: int) -> str:
    return json.dumps(
        {
            "queue_ms": 1.0,
            "cache_n": 0,
            "prompt_n": num_prompt,
            "prompt_ms": 1.0,
            "prompt_per_token_ms": round(1 / num_prompt, 3),
            "prompt_per_second": num_prompt * 1e3,
            "predicted_n": num_predicted,
            "predicted_ms": 1.0,
            "predicted_per_token_ms": round(1 / num_predicted, 3),
            "predicted_per_second": num_predicted * 1e3,
            "forced_n": 0,
            "grammar_path": None,
        },
        separators=(",", ":"),
    )


async def test_chat_stream_byte_for_byte(serve: Serve) -> None:
    app = serve(FakeEngine(Script.say('"\n')))
    reply = await post(app, CHAT, {**HI, "stream_options": {"include_usage": True}})
    request_id, created = reply.headers["x-request-id"], reply.chunks[0]["created"]
    head = (
        f'data: {{"object":"chat.completion.chunk","id":"chatcmpl-{request_id}",'
        f'"created":{created},"model":"org/byte-model","choices":['
    )
    assert reply.body.decode() == (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},'
        f'"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"\\""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"\\n"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop",'
        f'"stop_reason":null}}]}}\n\n'
        f'{head}],"usage":{{"prompt_tokens":16,"completion_tokens":3,"total_tokens":19,'
        f'"prompt_tokens_details":{{"cached_tokens":0}},'
        f'"completion_tokens_details":{{"reasoning_tokens":0}}}},"timings":{timings(16, 3)}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_completion_stream_byte_for_byte(serve: Serve) -> None:
    reply = await post(serve(FakeEngine(Script.say("a"))), COMPLETIONS, PROMPT)
    request_id, created = reply.headers["x-request-id"], reply.chunks[0]["created"]
    head = (
        f'data: {{"object":"text_completion","id":"cmpl-{request_id}",'
        f'"created":{created},"model":"org/byte-model","choices":['
    )
    assert reply.body.decode() == (
        f'{head}{{"index":0,"text":"a","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"text":"","logprobs":null,"finish_reason":"stop",'
        f'"stop_reason":null}}],"timings":{timings(3, 2)}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_headers(serve: Serve) -> None:
    headers = (await post(serve(FakeEngine()), CHAT, HI)).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


async def test_one_chunk_per_step(serve: Serve) -> None:
    engine = FakeEngine(Script.say("abcdef", ids_per_step=3))
    reply = await post(serve(engine), COMPLETIONS, PROMPT)
    assert [chunk["choices"][0]["text"] for chunk in reply.chunks] == ["abc", "def", ""]


async def test_usage_only_where_asked(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), CHAT, HI)
    assert all("usage" not in chunk for chunk in reply.chunks)
    asked = {**HI, "stream_options": {"include_usage": True}, "n": 2}
    reply = await post(serve(FakeEngine()), CHAT, asked)
    assert ["usage" in chunk for chunk in reply.chunks].index(True) == len(reply.chunks) - 1
    assert reply.chunks[-1]["choices"] == []
    assert reply.chunks[-1]["usage"]["prompt_tokens"] == 16
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("include_usage", [True, False])
async def test_timings_come_once_and_last(serve: Serve, include_usage: bool) -> None:
    engine = FakeEngine(Script.say("abc"), Script.say("x"))
    request = {**PROMPT, "n": 2, "stream_options": {"include_usage": include_usage}}
    reply = await post(serve(engine), COMPLETIONS, request)
    assert ["timings" in chunk for chunk in reply.chunks].index(True) == len(reply.chunks) - 1
    assert reply.chunks[-1]["timings"]["predicted_n"] == 6


async def test_each_choice_opens_and_ends_once(serve: Serve) -> None:
    engine = FakeEngine(Script.say("abc"), Script.say("x"), Script(end="length"))
    reply = await post(serve(engine), CHAT, {**HI, "n": 3})
    choices = [chunk["choices"][0] for chunk in reply.chunks]
    texts = ["", "", ""]
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["abc", "x", ""]
    for index, reason in enumerate(["stop", "stop", "length"]):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [reason]


async def test_token_ids_per_chunk(serve: Serve) -> None:
    engine = FakeEngine(Script.say("éa"))
    reply = await post(serve(engine), CHAT, {**HI, "return_token_ids": True})
    assert reply.chunks[0]["prompt_token_ids"] == [BOS, *ids("[user]hi[model]")]
    choices = [chunk["choices"][0] for chunk in reply.chunks]
    # The bytes of é make no text yet, but they are tokens.
    assert [c["token_ids"] for c in choices[1:-1]] == [[i] for i in (*ids("éa"), EOS)]
    assert [c["delta"]["content"] for c in choices[1:-1]] == ["", "", "éa", ""]


async def test_completion_token_ids_per_chunk(serve: Serve) -> None:
    request = {**PROMPT, "return_token_ids": True}
    reply = await post(serve(FakeEngine(Script.say("a"))), COMPLETIONS, request)
    choices = [chunk["choices"][0] for chunk in reply.chunks]
    assert choices[0]["prompt_token_ids"] == [BOS, *ids("hi")]
    assert [c["token_ids"] for c in choices[1:-1]] == [list(ids("a")), [EOS]]


async def test_fault_after_the_first_byte_ends_the_stream(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a"),), end=EngineDeadError("gone")), Script(end=None))
    reply = await post(serve(engine), COMPLETIONS, {**PROMPT, "n": 2})
    assert reply.status == 200
    assert reply.chunks[-1]["error"] == {
        "message": "gone",
        "type": "server_error",
        "param": None,
        "code": "engine_dead",
    }
    assert b"[DONE]" not in reply.body
    assert not engine.live


async def test_bug_after_the_first_byte_tells_nothing_of_itself(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(Script(steps=(ids("a"),), end=KeyError("secret")))
    reply = await post(serve(engine), COMPLETIONS, PROMPT)
    assert reply.chunks[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in reply.body
    assert "KeyError" in caplog.text


async def test_bug_in_one_of_several_sequences(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a"),), end=KeyError("secret")), Script.say("b"))
    reply = await post(serve(engine), COMPLETIONS, {**PROMPT, "n": 2})
    assert reply.chunks[-1]["error"]["code"] == "internal_error"


async def test_heartbeat_while_silent(serve: Serve) -> None:
    app = serve(FakeEngine(Script(end=None)), HttpConfig(heartbeat_s=0.01))
    connection = open_post(app, CHAT, HI)
    assert await connection.receive_body(2) == [b": heartbeat\n", b": heartbeat\n"]
    connection.disconnect()
    await connection.finish()


async def test_no_heartbeat_while_busy() -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        end_s = time.monotonic() + 0.06
        while time.monotonic() < end_s:
            yield b"data: x\n\n"
            # The next frame is ready before any timer that a slow machine lets expire meanwhile.
            await asyncio.sleep(0)

    response = EventStreamResponse(frames(), on_end=lambda: None, heartbeat_s=0.02)
    reply = await open_connection(response, "POST", CHAT).finish()
    assert b"data: x" in reply.body
    assert b"heartbeat" not in reply.body


async def test_no_heartbeat_where_it_is_off(serve: Serve) -> None:
    script = Script(steps=(ids("a"),) * 3, end="stop", delay_s=0.01)
    reply = await post(serve(FakeEngine(script), HttpConfig(heartbeat_s=0)), CHAT, HI)
    assert b"heartbeat" not in reply.body


async def test_first_byte_does_not_wait_for_the_first_token(serve: Serve) -> None:
    connection = open_post(serve(FakeEngine(Script(end=None))), CHAT, HI)
    await connection.receive_start()
    assert connection.status == 200
    connection.disconnect()
    await connection.finish()


@pytest.mark.parametrize("text", ["", "plain", "é ✓ 🙂 …", "a\nb\r\n\t\x00", "x" * 50])
@pytest.mark.parametrize("stop", [None, ["✓"], [" …", "🙂"], ["lain", "xxxxx"]])
@pytest.mark.parametrize("ids_per_step", [1, 2, 7])
async def test_streamed_equals_whole(
    serve: Serve, text: str, stop: list[str] | None, ids_per_step: int
) -> None:
    script = Script.say(text, ids_per_step=ids_per_step)
    request = {"prompt": "hi", "stop": stop, "return_token_ids": True}
    whole = (await post(serve(FakeEngine(script)), COMPLETIONS, request)).json
    streaming = {**request, "stream": True, "stream_options": {"include_usage": True}}
    reply = await post(serve(FakeEngine(script)), COMPLETIONS, streaming)
    *chunks, usage = reply.chunks
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = whole["choices"][0]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    token_ids = [i for choice in choices for i in choice.get("token_ids", [])]
    assert token_ids == expected["token_ids"]
    assert choices[-1]["finish_reason"] == expected["finish_reason"]
    assert choices[-1]["stop_reason"] == expected["stop_reason"]
    assert usage["usage"] == whole["usage"]


async def test_every_event_is_one_line_of_json(serve: Serve) -> None:
    reply = await post(serve(FakeEngine(Script.say("a\nb\r\n\u2028c"))), CHAT, HI)
    events = reply.body.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: ")) for event in events)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_in_every_chunk_where_asked(serve: Serve, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {**(HI if path == CHAT else PROMPT), "stream_options": options}
    engine = FakeEngine(Script.say("abc", cached_tokens=2))
    *chunks, last = (await post(serve(engine), path, request)).chunks
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    # The role comes with the first token, and the end id has no chunk of its own but the finish.
    assert told == ([1, 1, 2, 3, 4] if path == CHAT else [1, 2, 3, 4])
    assert all(c["usage"]["prompt_tokens_details"] == {"cached_tokens": 2} for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}]
)
async def test_no_usage_unasked(serve: Serve, options: dict[str, bool] | None) -> None:
    reply = await post(serve(FakeEngine()), COMPLETIONS, {**PROMPT, "stream_options": options})
    assert b"usage" not in reply.body


async def test_no_usage_behind_a_fault(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a"),), end="abort"))
    request = {**PROMPT, "stream_options": {"include_usage": True}}
    reply = await post(serve(engine), COMPLETIONS, request)
    assert reply.chunks[-1]["error"]["code"] == "unavailable"
    assert b"usage" not in reply.body
    assert b"[DONE]" not in reply.body


async def test_every_event_ends_in_one_empty_line_and_has_no_id(serve: Serve) -> None:
    reply = await post(serve(FakeEngine(Script.say("a\r\nb"))), CHAT, {**HI, "n": 2})
    assert b"\r" not in reply.body
    events = reply.body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert {b.count(b"data: ") for b in events[:-1]} == {1}

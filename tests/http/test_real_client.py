"""The `openai` package against the application under uvicorn, on a loopback socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob
from starlette.applications import Starlette

from jaxserve.errors import EngineDeadError, OverloadedError
from jaxserve.http.config import HttpConfig
from tests.fake_engine import FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.sockets import running

MODEL = "org/byte-model"


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(app) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        yield client


async def test_chat(serve: Serve) -> None:
    async with client_of(serve(FakeEngine(Script.say("héllo")))) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    assert answer.choices[0].message.content == "héllo"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(serve: Serve) -> None:
    app = serve(
        FakeEngine(Script(steps=(ids("a"), ids("b")), delay_s=0.02)), HttpConfig(heartbeat_s=0.01)
    )
    async with client_of(app) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "ab"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_completion_and_models(serve: Serve) -> None:
    async with client_of(serve(FakeEngine(Script.say("a")))) as client:
        answer = await client.completions.create(model=MODEL, prompt=["x", "y"])
        models = await client.models.list()
        model = await client.models.retrieve(MODEL)
    assert [choice.text for choice in answer.choices] == ["a", "a"]
    assert models.data == [model]


async def test_errors_become_its_exceptions(serve: Serve) -> None:
    engine = FakeEngine()
    async with client_of(serve(engine)) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.completions.create(model="other", prompt="x")
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", suffix="s")
        assert bad.value.param == "suffix"
        engine.refusals.append(OverloadedError("full"))
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model=MODEL, prompt="x" * (33 << 20))
        assert large.value.status_code == 413
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "ok"


async def test_error_in_a_stream_is_raised(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a"),), end=EngineDeadError("gone")))
    async with client_of(serve(engine)) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_closed_socket_aborts(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(Script(end=None))
    async with running(serve(engine)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt":"x","stream":%s}' % (b"true" if stream else b"false")
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await engine.until_submitted()
        writer.close()
        await writer.wait_closed()
        await engine.until_aborted()
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_read(serve: Serve, stream: bool) -> None:
    async with client_of(serve(FakeEngine(Script.say("é")))) as client:
        create = client.chat.completions.create
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
        tokens: list[ChatCompletionTokenLogprob] = []
        if stream:
            chunks = await create(
                model=MODEL, messages=messages, logprobs=True, top_logprobs=2, stream=True
            )
            async for chunk in chunks:
                if (logprobs := chunk.choices[0].logprobs) is not None:
                    tokens += logprobs.content or []
        else:
            answer = await create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2)
            if (told := answer.choices[0].logprobs) is not None:
                tokens += told.content or []
    assert bytes(byte for token in tokens[:2] for byte in token.bytes or []).decode() == "é"
    assert [top.token for top in tokens[0].top_logprobs] == ["a", "b"]


async def test_echo_and_its_logprobs_are_read(serve: Serve) -> None:
    async with client_of(serve(FakeEngine())) as client:
        answer = await client.completions.create(
            model=MODEL, prompt="hi", echo=True, max_tokens=0, logprobs=1
        )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "hi"
    assert logprobs is not None
    assert logprobs.tokens == ["<bos>", "h", "i"]
    assert logprobs.text_offset == [0, 0, 1]


async def test_a_key_is_sent_as_it_is_wanted(serve: Serve) -> None:
    async with client_of(serve(FakeEngine(), HttpConfig(api_keys=("none",)))) as client:
        assert (await client.models.list()).data[0].id == MODEL
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key="other").models.list()
        assert refused.value.code == "invalid_api_key"

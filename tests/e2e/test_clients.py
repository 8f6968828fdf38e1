"""The clients that people have: OpenAI's, LangChain's, LiteLLM's and curl.

None of them may look for anything but this machine while it is tested.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import LOCAL_ONLY, MODEL, Setup, fast_compiles
from tests.e2e.server import ServerProcess, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("this_machine_only")]

KEY = "sesame"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    url = server.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def greedy_text(server: ServerProcess) -> str:
    """What every client must be told."""
    body = {"messages": MESSAGES, **GREEDY}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture
def closed(
    setup: Setup,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """A server that wants a key, and lets two sequences wait; perhaps not ready yet."""
    flags = [*setup.flags, "--api-key", KEY, "--max-waiting-requests", "2"]
    folder = tmp_path_factory.mktemp("closed")
    with ServerProcess(folder, flags, environment=fast_compiles()) as process:
        yield process


# OpenAI's client


def test_openai_reads_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data

    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 2048


def test_openai_reads_an_answer_and_its_request_id(client: openai.OpenAI, greedy_text: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=3,
        extra_headers={"x-request-id": "mine"},
        **GREEDY,
    )
    answer = raw.parse()

    assert answer._request_id == "mine"
    assert answer.choices[0].message.content == greedy_text
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [3] * 12
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_openai_streams_by_its_helper(client: openai.OpenAI, greedy_text: str) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        logprobs=True,
        stream_options={"include_usage": True},
        stop=[greedy_text[5:8]],  # the helper takes an answer cut by its budget for an error
        **GREEDY,
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()

    assert "".join(deltas) == greedy_text[:5] == answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens < 12


async def test_openai_streams_asynchronously(
    async_client: openai.AsyncOpenAI, greedy_text: str
) -> None:
    async def streamed() -> str:
        async with async_client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, **GREEDY
        ) as stream:
            return "".join([e.delta async for e in stream if e.type == "content.delta"])

    assert await asyncio.gather(*(streamed() for _ in range(8))) == [greedy_text] * 8


def test_openai_completes_text_with_all_its_options(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["Rain", "The sea is"],
        "n": 2,
        "seed": 3,
        "echo": True,
        "logprobs": 2,
        "stop": ["zz"],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"600": -1},
        "user": "somebody",
        "max_tokens": 6,
    }
    whole = client.completions.create(**options)
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == [choice.text for choice in whole.choices]
    assert [text.startswith(("Rain", "The sea is")) for text in texts] == [True] * 4
    assert whole.usage is not None
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) > 6


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"max_tokens": 4000}, "messages", "context_length_exceeded"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of", "unknown_parameter"),
    ],
)
def test_openai_raises_bad_requests(
    client: openai.OpenAI, options: dict[str, Any], param: str, code: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream, **options)
        assert (refusal.value.param, refusal.value.code) == (param, code)
        assert refusal.value.type == "invalid_request_error"
        assert refusal.value.request_id


def test_openai_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("gpt-4")
    assert refusal.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="a", encoding_format="float")


def test_openai_raises_what_a_server_of_others_says(closed: ServerProcess) -> None:
    def with_key(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=closed.url + "/v1", api_key=key, max_retries=0)

    with with_key("wrong") as stranger, pytest.raises(openai.AuthenticationError) as closed_door:
        stranger.models.list()
    assert closed_door.value.code == "invalid_api_key"

    with with_key(KEY) as early, pytest.raises(openai.InternalServerError) as starting:
        early.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert starting.value.status_code == 503

    closed.wait_ready()
    with with_key(KEY) as client:
        # Eight run, and two wait.
        stream = client.completions.create(
            model=MODEL,
            prompt="Rain",
            n=10,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model=MODEL, prompt="Rain", max_tokens=1)
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1
        stream.close()


# Others' clients


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="needs the extra `clients`")
async def test_langchain_chats_and_completes(server: ServerProcess, greedy_text: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import SecretStr

    question = "Tell me of the sea."
    # Its own are never closed.
    async with httpx.AsyncClient() as http_async_client:
        with httpx.Client() as http_client:
            options: dict[str, Any] = {
                "base_url": server.url + "/v1",
                "api_key": SecretStr("none"),
                "model": MODEL,
                "temperature": 0,
                "max_retries": 0,
                "http_client": http_client,
                "http_async_client": http_async_client,
            }
            chat = ChatOpenAI(max_completion_tokens=12, stream_usage=True, **options)
            scored = ChatOpenAI(max_completion_tokens=12, logprobs=True, top_logprobs=2, **options)
            text = OpenAI(max_tokens=12, **options)

            answer = chat.invoke(question)
            chunks = [chunk async for chunk in chat.astream(question)]
            stopped = chat.bind(stop=[greedy_text[5:8]]).invoke(question)
            batch = await chat.abatch([question] * 3)
            told = (await scored.ainvoke(question)).response_metadata["logprobs"]["content"]
            whole_text, streamed_text = text.invoke("Rain"), "".join(text.stream("Rain"))

    assert answer.content == greedy_text == "".join(str(chunk.content) for chunk in chunks)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usages[-1]["output_tokens"] == 12
    assert stopped.content == greedy_text[:5]
    assert [each.content for each in batch] == [greedy_text] * 3
    assert len(told) == 12
    assert whole_text == streamed_text


LITELLM = """
import asyncio, json, sys

import litellm

litellm.telemetry = False
url, model = sys.argv[1:]
where = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "max_retries": 0}
options = {**where, "messages": [{"role": "user", "content": "Tell me of the sea."}]}
options |= {"max_tokens": 12, "temperature": 0}

def joined(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

async def streamed():
    chunks = await litellm.acompletion(**options, stream=True)
    return joined([chunk async for chunk in chunks])

def fault(**changes):
    try:
        litellm.completion(**{**options, **changes})
    except Exception as error:
        return type(error).__name__

whole = litellm.completion(**options)
text = litellm.text_completion(
    **{**where, "model": f"text-completion-openai/{model}"}, prompt="Rain", max_tokens=5
)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "streamed": joined(litellm.completion(**options, stream=True)),
    "async": asyncio.run(streamed()),
    "text_tokens": text.usage.completion_tokens,
    "too_long": fault(max_tokens=4000),
    "unknown_model": fault(model="openai/other"),
    "wrong": fault(temperature=9),
    "asked": asked,
}))
"""


@pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra `clients`")
def test_litellm_chats_and_completes(server: ServerProcess, greedy_text: str) -> None:
    # A process of its own: importing it takes seconds, and it sets signal and exit handlers.
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOCAL_ONLY + LITELLM, server.url + "/v1", MODEL],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told == {
        "whole": greedy_text,
        "tokens": 12,
        "streamed": greedy_text,
        "async": greedy_text,
        "text_tokens": 5,
        "too_long": "ContextWindowExceededError",
        "unknown_model": "NotFoundError",
        "wrong": "BadRequestError",
        "asked": [],
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_answers_and_streams(server: ServerProcess, tmp_path: Path) -> None:
    def curl(path: str, *arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--max-time", "100", *arguments]
        return subprocess.run(
            [*command, server.url + path], check=True, capture_output=True, text=True, timeout=120
        ).stdout

    json_type = ("-H", "content-type: application/json")
    body = json.dumps({"prompt": "Rain", **GREEDY})
    file = tmp_path / "body.json"
    # Beyond 1 MiB curl sends `Expect: 100-continue` and waits for it.
    file.write_text(json.dumps({"prompt": "Rain", **GREEDY, "user": "x" * (1 << 21)}))

    whole = json.loads(curl("/v1/completions", *json_type, "-d", body))
    large = json.loads(curl("/v1/completions", *json_type, "--data-binary", f"@{file}"))
    chunked = json.loads(
        curl("/v1/completions", *json_type, "-H", "transfer-encoding: chunked", "-d", body)
    )
    streamed = json.dumps({"prompt": "Rain", **GREEDY, "stream": True})
    lines = curl("/v1/completions", "--no-buffer", *json_type, "-d", streamed).splitlines()
    refused = json.loads(curl("/v1/completions", "-d", body))
    http2 = json.loads(curl("/v1/models", "--http2"))

    text = whole["choices"][0]["text"]
    assert large["choices"] == chunked["choices"] == whole["choices"]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text
    assert refused["error"]["code"] == "unsupported_media_type"
    assert http2["data"][0]["id"] == MODEL


def test_nothing_of_the_clients_is_left(server: ServerProcess) -> None:
    wait_until(lambda: server.metric("jaxserve_num_requests_running") == 0)
    assert server.metric("jaxserve_kv_pages_used") == 0
    assert server.metric("jaxserve_serving_compiles_total") == 0

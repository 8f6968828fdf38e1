"""What is refused for its size, before it costs anything: the tokenizer never sees such a text."""

from typing import Any

import pytest

from jaxserve.http import aside, prompts
from jaxserve.http.served_model import ServedModel
from jaxserve.openai import messages, requests
from jaxserve.text.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine
from tests.http.conftest import Serve
from tests.http.driver import Connection, open_post, post

CHAT, COMPLETIONS, RENDER = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/render"
# The byte model holds 1,000 tokens, the longest of which, <image>, has 7 characters.
LARGEST = 7_000


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of all texts that are tokenized."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    return lengths


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def ask(serve: Serve, path: str, request: object) -> Connection:
    return await post(serve(FakeEngine()), path, request)


async def test_the_longest_text_that_may_fit_is_tokenized(serve: Serve) -> None:
    engine = FakeEngine()
    await post(serve(engine), COMPLETIONS, {"prompt": "<unk>" * 998, "max_tokens": 1})
    assert len(engine.prompts[0]) == 999
    reply = await ask(serve, COMPLETIONS, {"prompt": "<unk>" * 999})
    assert "the prompt has 1000 tokens" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "request_", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * (LARGEST + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "x" * (LARGEST + 1)]}, "prompt[1]"),
        (CHAT, said("x" * LARGEST), "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_not_tokenized(
    serve: Serve, tokenized: list[int], path: str, request_: object, param: str
) -> None:
    reply = await ask(serve, path, request_)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["code"] == "context_length_exceeded"
    assert "maximum context length is 1000 tokens" in reply.error["message"]
    assert "are 1001 tokens at least" in reply.error["message"] or path == CHAT
    assert max(tokenized, default=0) <= LARGEST


@pytest.mark.parametrize(
    ("path", "request_", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 8_001, "truncate_prompt_tokens": 9}, "prompt"),
        (CHAT, {**said("x" * 8_001), "truncate_prompt_tokens": -1}, "messages"),
        (RENDER, said("x" * 8_001), "messages"),
        ("/tokenize", {"prompt": "x" * 8_001}, "prompt"),
        ("/tokenize", said("x" * 8_001), "messages"),
    ],
)
async def test_where_more_than_the_context_is_read_that_has_a_limit_too(
    serve: Serve,
    tokenized: list[int],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    request_: dict[str, Any],
    param: str,
) -> None:
    assert (await ask(serve, path, request_)).status == 200
    tokenized.clear()
    monkeypatch.setattr(prompts, "MAX_TEXT_CHARS", 8_000)
    reply = await ask(serve, path, request_)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "at most 8000 are tokenized" in reply.error["message"]
    assert not tokenized


async def test_a_tokenizer_without_a_bound_is_asked(
    serve: Serve, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "longest_piece", None)
    reply = await ask(serve, COMPLETIONS, {"prompt": "x" * 8_000})
    assert "the prompt has 8001 tokens" in reply.error["message"]
    monkeypatch.setattr(prompts, "MAX_TEXT_CHARS", 7_999)
    reply = await ask(serve, COMPLETIONS, {"prompt": "x" * 8_000})
    assert "at most 7999 are tokenized" in reply.error["message"]


async def test_sequences_are_counted_before_any_is_tokenized(
    serve: Serve, tokenized: list[int]
) -> None:
    for request, param in (
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ):
        reply = await ask(serve, COMPLETIONS, request)
        assert (reply.status, reply.error["param"]) == (400, param)
    assert not tokenized
    assert (await ask(serve, COMPLETIONS, {"prompt": ["x"] * 64, "n": 2})).status == 200


def messages_of(num_parts: int, num_calls: int) -> dict[str, Any]:
    part = {"type": "text", "text": ""}
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"{i}", "type": "function", "function": function} for i in range(num_calls)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
    caller = {"role": "assistant", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": [part] * num_parts}, caller, *results]}


async def test_messages_parts_and_calls_are_counted_before_any_is_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGES", 9)
    assert (await ask(serve, CHAT, messages_of(3, 2))).status == 200
    for path in (CHAT, RENDER, "/tokenize"):
        reply = await ask(serve, path, messages_of(2, 3))
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert "10 messages, parts and calls; at most 9" in reply.error["message"]


@pytest.mark.parametrize("count", [8193, 10**6])
async def test_too_many_messages(serve: Serve, count: int) -> None:
    reply = await ask(serve, CHAT, {"messages": [0] * count})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert f"at most 8192, not {count}" in reply.error["message"]


async def test_ids_are_counted_over_all_prompts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_TOKEN_IDS", 9)
    assert (await ask(serve, COMPLETIONS, {"prompt": [[70] * 4, [70] * 5]})).status == 200
    reply = await ask(serve, COMPLETIONS, {"prompt": [[70] * 5, [70] * 5]})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), ("/detokenize", "tokens")])
async def test_a_list_of_too_many_ids(serve: Serve, path: str, field: str) -> None:
    reply = await ask(serve, path, {field: [70] * (requests.MAX_TOKEN_IDS + 1)})
    assert (reply.status, reply.error["param"]) == (400, field)


async def test_few_threads_tokenize_long_texts(serve: Serve) -> None:
    text = "<unk>" * 500
    app = serve(FakeEngine())
    replies = [open_post(app, "/tokenize", {"prompt": text}) for _ in range(9)]
    for reply in replies:
        assert (await reply.finish()).json["count"] == 501
    assert aside.limiter().total_tokens == 2

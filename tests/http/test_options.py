"""Fields that decide how the engine samples: each reaches it, or is refused by name."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import GenerationRequest, SamplingDefaults
from tests.fake_engine import END_OF_TURN, EOS, VOCAB_SIZE, FakeEngine, ids
from tests.http.conftest import Serve
from tests.http.driver import JSON, Connection, open_connection, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "go"}]},
    COMPLETIONS: {"prompt": "go"},
}
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


async def submitted(serve: Serve, path: str, **fields: Any) -> GenerationRequest:
    engine = FakeEngine()
    reply = await post(serve(engine), path, {**NEEDED[path], **fields})
    assert reply.status == 200, reply.body
    [request] = engine.requests
    return request


@both
@pytest.mark.parametrize(
    ("field", "value", "attribute", "expected"),
    [
        ("temperature", 0, "temperature", 0),
        ("temperature", 1.5, "temperature", 1.5),
        ("top_p", 0.25, "top_p", 0.25),
        ("top_k", 7, "top_k", 7),
        ("top_k", 0, "top_k", 0),
        ("top_k", -1, "top_k", 0),
        ("top_k", VOCAB_SIZE, "top_k", 0),
        ("min_p", 0.5, "min_p", 0.5),
        ("presence_penalty", -2, "presence_penalty", -2),
        ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
        ("repetition_penalty", 1.25, "repetition_penalty", 1.25),
        (
            "logit_bias",
            {"70": -100, "7": 5, "0": 0.5},
            "logit_bias",
            ((0, 0.5), (7, 5), (70, -100)),
        ),
        ("logit_bias", {}, "logit_bias", ()),
        ("allowed_token_ids", [70, 71, 70], "allowed_token_ids", frozenset({70, 71})),
        ("bad_words", [], "bad_words", ()),
        ("bad_words", ["ab"], "bad_words", (ids("ab"), ids(" ab"))),
        ("bad_words", [" ab"], "bad_words", (ids(" ab"),)),
        ("bad_words", ["a", " a", "a"], "bad_words", (ids("a"), ids(" a"))),
        ("stop_token_ids", [70, 70], "stop_token_ids", frozenset({70, EOS, END_OF_TURN})),
        ("stop_token_ids", [], "stop_token_ids", frozenset({EOS, END_OF_TURN})),
        ("ignore_eos", True, "stop_token_ids", frozenset()),
        ("min_tokens", 3, "min_tokens", 3),
        ("max_tokens", 5, "max_tokens", 5),
        ("seed", 2**64 - 1, "seed", 2**64 - 1),
    ],
)
async def test_a_field_reaches_the_engine(
    serve: Serve, path: str, field: str, value: object, attribute: str, expected: object
) -> None:
    request = await submitted(serve, path, **{field: value})
    assert getattr(request.sampling, attribute) == expected


@both
async def test_priority_reaches_the_engine(serve: Serve, path: str) -> None:
    assert (await submitted(serve, path, priority=-3)).priority == -3
    assert (await submitted(serve, path)).priority == 0


@both
async def test_what_the_cache_shares_by_reaches_the_engine(serve: Serve, path: str) -> None:
    request = await submitted(serve, path, cache_salt="s", prompt_cache_key="k")
    assert (request.cache_salt, request.session) == ("s", "k")
    request = await submitted(serve, path)
    assert (request.cache_salt, request.session) == (None, None)


async def with_session(
    serve: Serve, path: str, header: bytes, **fields: object
) -> tuple[Connection, list[str | None]]:
    """Ask with the header X-Session-ID; also give the sessions that the engine saw."""
    engine = FakeEngine()
    body = json.dumps({**NEEDED[path], **fields}).encode()
    headers = {"x-session-id": header.decode(errors="surrogateescape")}
    reply = await open_connection(serve(engine), "POST", path, body, {**JSON, **headers}).finish()
    return reply, [request.session for request in engine.requests]


@both
@pytest.mark.parametrize("name", ["agent-1", "é 🙂", "x" * 512])
async def test_a_header_may_name_the_session(serve: Serve, path: str, name: str) -> None:
    reply, sessions = await with_session(serve, path, name.encode())
    assert (reply.status, sessions) == (200, [name])
    _, sessions = await with_session(serve, path, name.encode(), prompt_cache_key="k")
    assert sessions == ["k"]


@both
@pytest.mark.parametrize("name", [b"", b"x" * 513, "\ufffd".encode(), b"\xff"])
async def test_a_header_that_is_no_name_is_refused(serve: Serve, path: str, name: bytes) -> None:
    reply, sessions = await with_session(serve, path, name)
    assert (reply.status, reply.error["param"]) == (400, "X-Session-ID")
    assert not sessions


@both
async def test_what_changes_no_answer_is_accepted(serve: Serve, path: str) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": {"b": [1, "c"]}},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "s",
        "best_of" if path == COMPLETIONS else "prompt_cache_retention": (
            1 if path == COMPLETIONS else "24h"
        ),
    }
    plain = await submitted(serve, path, seed=1)
    request = await submitted(serve, path, seed=1, **fields)
    assert replace(request, request_id=plain.request_id) == plain


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"007": 1}}, "logit_bias"),
        ({"logit_bias": {"7": "1"}}, "logit_bias.7"),
        ({"logit_bias": {"7": True}}, "logit_bias.7"),
        ({"logit_bias": {"7": -100.5}}, "logit_bias.7"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": ids("a"), "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [7] * 257}, "stop_token_ids"),
        ({"bad_words": ["a", "123456789"]}, "bad_words[1]"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 33}, "bad_words"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 11}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 1001}, "min_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"metadata": "a"}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"tokenizer": "x"}, "tokenizer"),
    ],
)
async def test_refusals(serve: Serve, path: str, fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), path, {**NEEDED[path], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in reply.error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs"),
        (COMPLETIONS, {"suffix": "b"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),  # the default budget is 16
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"best_of": 1}, "best_of"),
        (CHAT, {"suffix": ""}, "suffix"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
async def test_refusals_of_one_of_the_two(
    serve: Serve, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = await post(serve(FakeEngine()), path, {**NEEDED[path], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_ignored_ends_may_be_all_that_is_allowed(serve: Serve) -> None:
    request = await submitted(
        serve, COMPLETIONS, allowed_token_ids=[EOS], min_tokens=1, ignore_eos=True
    )
    assert request.sampling.allowed_token_ids == frozenset({EOS})


async def test_bad_words_are_tokenized_once_for_all_sequences(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode

    def spy(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        texts.append(text)
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    fields = {"prompt": "go", "bad_words": ["ab"], "n": 16}
    await post(serve(FakeEngine()), COMPLETIONS, fields)
    assert sorted(texts) == [" ab", "ab", "go"]


DEFAULTS = SamplingDefaults(
    temperature=0.7, top_k=64, top_p=0.95, min_p=0.05, repetition_penalty=1.1
)
NAMES = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]


@both
@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict.fromkeys(NAMES),
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 0},
        {"repetition_penalty": 1},
    ],
)
async def test_the_checkpoints_sampling_stands_in(
    model: ServedModel, path: str, fields: dict[str, Any]
) -> None:
    engine = FakeEngine()
    served = replace(model, defaults=DEFAULTS)
    app = build_app(engine, lambda: served, config=HttpConfig(), metrics=Metrics())
    await post(app, path, {**NEEDED[path], **fields})
    sampling = engine.requests[0].sampling
    for name in NAMES:
        wanted = fields.get(name)
        expected = getattr(DEFAULTS, name) if wanted is None else max(0, wanted)
        assert getattr(sampling, name) == expected


# Text that is broken, and names that are


@both
@pytest.mark.parametrize("field", ["model", "cache_salt", "request_id", "prompt_cache_key"])
async def test_a_name_is_not_repaired(serve: Serve, path: str, field: str) -> None:
    engine = FakeEngine()
    app = serve(engine)
    for bad in (rb'"a\ud800b"', rb'"\udfff"', '"a\ufffdb"'.encode()):
        body = json.dumps({**NEEDED[path], field: "HERE"}).encode().replace(b'"HERE"', bad)
        reply = await open_connection(app, "POST", path, body, JSON).finish()
        assert (reply.status, reply.error["param"]) == (400, field)
    assert not engine.requests


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize(
    "field",
    [rb'"stop":"\ud800"', rb'"user":"\udc00"', rb'"metadata":{"\ud800":"\ud800"}',
     rb'"bad_words":["\ud800"]', rb'"chat_template_kwargs":{"a":"\ud800"}'],
)  # fmt: skip
async def test_text_is_repaired_wherever_it_stands(
    serve: Serve, field: bytes, stream: bytes
) -> None:
    engine = FakeEngine()
    content = rb'[{"type":"text","text":"\ud83d\ude00\ud83d"}]'
    body = b'{"messages":[{"role":"user","content":%s}],"stream":%s,%s}' % (content, stream, field)
    reply = await open_connection(serve(engine), "POST", CHAT, body, JSON).finish()
    assert reply.status == 200
    assert ids("[user]\U0001f600\ufffd[model]") == engine.prompts[0][1:]


@both
async def test_the_last_of_two_equal_keys_counts(serve: Serve, path: str) -> None:
    engine = FakeEngine()
    needed = json.dumps(NEEDED[path]).encode()[1:-1]
    body = b'{%s,"max_tokens":3,"max_tokens":4}' % needed
    reply = await open_connection(serve(engine), "POST", path, body, JSON).finish()
    assert reply.status == 200
    assert engine.requests[0].sampling.max_tokens == 4


@both
@pytest.mark.parametrize("field", ["metadata", "logit_bias", "stop", "response_format", "messages"])
async def test_deep_values_are_refused_and_the_next_request_is_served(
    serve: Serve, path: str, field: str
) -> None:
    app = serve(FakeEngine())
    for depth, opening, closing in ((900, b"[", b"]"), (900, b'{"a":', b"}"), (9000, b"[", b"]")):
        value = opening * depth + b"1" + closing * depth
        body = json.dumps({**NEEDED[path], field: "HERE"}).encode().replace(b'"HERE"', value)
        reply = await open_connection(app, "POST", path, body, JSON).finish()
        assert reply.status == 400
    assert (await post(app, path, NEEDED[path])).status == 200

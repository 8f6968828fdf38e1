import json
import logging

import pytest

from jaxserve.errors import ApiError, EngineDeadError, OverloadedError, UnavailableError
from jaxserve.http.config import HttpConfig
from tests.fake_engine import FakeEngine
from tests.http.conftest import Serve
from tests.http.driver import JSON, open_connection, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": -1}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**9}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"user": 5}, "user"),
        ({"nonsense": 1}, "nonsense"),
        ({"n": 2, "max_tokens": 10_000}, "messages|prompt"),
    ],
)
async def test_bad_values(serve: Serve, path: str, fields: dict[str, object], param: str) -> None:
    engine = FakeEngine()
    request = {"messages": [USER]} if path == CHAT else {"prompt": "go"}
    reply = await post(serve(engine), path, {**request, **fields})
    assert reply.status == 400
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] in param.split("|")
    assert reply.headers["content-type"] == "application/json"
    assert not engine.requests


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("x", "messages"),
        ([None], "messages[0]"),
        ([{}], "messages[0].role"),
        ([USER, {"role": "critic", "content": "x"}], "messages[1].role"),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([USER, {"role": "tool", "content": "x", "tool_call_id": "c"}], "messages[1].tool_call_id"),
        ([USER, {"role": 5, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "messages[0].content[0].text",
        ),
        ([{**USER, "name": "ann"}], "messages[0].name"),
        ([{**USER, "other": 1}], "messages[0].other"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].id",
        ),
    ],
)
async def test_bad_messages(serve: Serve, messages: object, param: str) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), CHAT, {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not engine.requests


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b'{"temperature":NaN}', "invalid_json"),
        (b'{"temperature":Infinity}', "invalid_json"),
        (b'{"temperature":1e999}', "invalid_json"),
        (b'{"prompt":"\xed\xa0\x80"}', "invalid_json"),
        (b'{"prompt":' + b"[" * 100_000, "invalid_json"),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", "invalid_type"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b"{}", "missing_required_parameter"),
    ],
)
async def test_bad_bodies(serve: Serve, body: bytes, code: str) -> None:
    reply = await open_connection(serve(FakeEngine()), "POST", COMPLETIONS, body, JSON).finish()
    assert (reply.status, reply.error["code"]) == (400, code)


async def test_json_error_tells_the_place(serve: Serve) -> None:
    body = b'{"prompt":\n oops}'
    reply = await open_connection(serve(FakeEngine()), "POST", COMPLETIONS, body, JSON).finish()
    assert "line 2, column 2" in reply.error["message"]


async def test_lone_surrogate_is_repaired(serve: Serve) -> None:
    engine = FakeEngine()
    body = rb'{"prompt":"a\ud800b"}'
    reply = await open_connection(serve(engine), "POST", COMPLETIONS, body, JSON).finish()
    assert reply.status == 200
    assert bytes(i - 6 for i in engine.prompts[0][1:]).decode() == "a\ufffdb"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_content_types(serve: Serve, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    reply = await open_connection(serve(FakeEngine()), "POST", CHAT, b"{}", headers).finish()
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-type", "application/json; charset=latin-1"),
        ("content-encoding", "gzip"),
        ("content-encoding", "identity, br"),
    ],
)
async def test_a_body_that_would_have_to_be_decoded(serve: Serve, name: str, value: str) -> None:
    headers = {"content-type": "application/json", name: value}
    reply = await open_connection(serve(FakeEngine()), "POST", CHAT, b"{}", headers).finish()
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert reply.error["message"].lower().startswith(name)


async def test_charset_is_allowed(serve: Serve) -> None:
    headers = {
        "content-type": 'Application/JSON; x=1; Charset="UTF-8"',
        "content-encoding": "Identity",
    }
    body = b'{"prompt":"a"}'
    reply = await open_connection(serve(FakeEngine()), "POST", COMPLETIONS, body, headers).finish()
    assert reply.status == 200


@pytest.mark.parametrize("declared", [{}, {"content-length": "101"}])
async def test_body_limit(serve: Serve, declared: dict[str, str]) -> None:
    app = serve(FakeEngine(), HttpConfig(max_body_bytes=100))
    body = json.dumps({"prompt": "a" * 100}).encode()
    reply = await open_connection(app, "POST", COMPLETIONS, body, {**JSON, **declared}).finish()
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    body = json.dumps({"prompt": "a"}).encode()
    reply = await open_connection(app, "POST", COMPLETIONS, body, JSON).finish()
    assert reply.status == 200


@pytest.mark.parametrize("path", ["/", "/v1", "//v1/models", "/V1/models", "/v2/x"])
async def test_unknown_paths(serve: Serve, path: str) -> None:
    reply = await open_connection(serve(FakeEngine()), "GET", path).finish()
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")


async def test_known_path_other_method(serve: Serve) -> None:
    reply = await open_connection(serve(FakeEngine()), "GET", CHAT).finish()
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


async def test_unknown_model(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), CHAT, {"messages": [USER], "model": "other"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert reply.error["param"] == "model"


async def test_bug_is_a_500_in_the_same_shape(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.refusals.append(KeyError("secret"))
    app = serve(engine)
    reply = await post(app, CHAT, {"messages": [USER]})
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "secret" not in reply.error["message"]
    assert "KeyError" in caplog.text
    assert (await post(app, CHAT, {"messages": [USER]})).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (OverloadedError("full"), 429, "1"),
        (UnavailableError("draining"), 503, "5"),
        (EngineDeadError("dead"), 503, None),
    ],
)
async def test_a_refusal_of_the_engine_is_no_stream(
    serve: Serve, path: str, stream: bool, error: ApiError, status: int, retry_after: str | None
) -> None:
    engine = FakeEngine()
    engine.refusals.append(error)
    request = {"messages": [USER]} if path == CHAT else {"prompt": "go"}
    reply = await post(serve(engine), path, {**request, "stream": stream})
    assert (reply.status, reply.headers.get("retry-after")) == (status, retry_after)
    assert reply.headers["content-type"] == "application/json"
    assert reply.error["message"] == error.message
    assert not engine.live


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("size", "max_tokens", "numbers"),
    [(2000, None, ["2000", "1000"]), (900, 200, ["900", "200", "1100", "1000"])],
)
async def test_what_the_context_cannot_hold_is_told_in_numbers(
    serve: Serve, path: str, size: int, max_tokens: int | None, numbers: list[str]
) -> None:
    around = len("<[user][model]") if path == CHAT else 1  # BOS is one token
    text = "x" * (size - around)
    request = {"messages": [{**USER, "content": text}]} if path == CHAT else {"prompt": text}
    engine = FakeEngine()
    reply = await post(serve(engine), path, {**request, "max_tokens": max_tokens})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == ("messages" if path == CHAT else "prompt")
    assert [number for number in numbers if number not in reply.error["message"]] == []
    assert not engine.requests


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", COMPLETIONS, {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("GET", "/tokenize", {"POST"}),
        ("PUT", "/health", {"GET", "HEAD"}),
        ("OPTIONS", CHAT, {"POST"}),
    ],
)
async def test_other_methods_are_told_which_there_are(
    serve: Serve, method: str, path: str, allow: set[str]
) -> None:
    reply = await open_connection(serve(FakeEngine()), method, path).finish()
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert set(reply.headers["allow"].split(", ")) == allow


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", f"{CHAT}/render"])
async def test_limits_of_a_body_are_the_same_everywhere(serve: Serve, path: str) -> None:
    app = serve(FakeEngine(), HttpConfig(max_body_bytes=100))
    cases = [
        (b"{}", {}, 415),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b" " * 101, JSON, 413),
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
    ]
    for body, headers, status in cases:
        reply = await open_connection(app, "POST", path, body, headers).finish()
        assert reply.status == status
        assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "request_", "told"),
    [
        (
            COMPLETIONS,
            {"prompt": "a", "suffix": "secret"},
            "400 unsupported_parameter, param 'suffix'",
        ),
        (CHAT, {"messages": [{**USER, "reasoning": "secret"}]}, "param 'messages[0].reasoning'"),
        (CHAT, {"messages": "secret"}, "400 invalid_type, param 'messages'"),
        (COMPLETIONS, {"prompt": "a", "x\nINFO": 1}, r"param 'x\nINFO'"),
        (COMPLETIONS, {"prompt": "a", "x" * 9999: 1}, "xxx"),
        ("/a\nINFO secret", {}, "404 not_found, param None"),
        ("/v1/models/secret", {}, "405 method_not_allowed, param None"),
    ],
)
async def test_the_log_quotes_no_request(
    serve: Serve,
    caplog: pytest.LogCaptureFixture,
    path: str,
    request_: dict[str, object],
    told: str,
) -> None:
    with caplog.at_level(logging.DEBUG, logger="jaxserve"):
        reply = await post(serve(FakeEngine()), path, request_)
    assert reply.status >= 400
    [line] = caplog.messages
    assert told in line
    assert "secret" not in line
    assert "\n" not in line
    assert len(line) < 200

"""The cache's endpoints: what they ask of the engine, and what they answer."""

import json
from typing import Any

import pytest

from jaxserve.engine.client import EngineStatus
from jaxserve.http.config import HttpConfig
from tests.fake_engine import BOS, FakeEngine, ids
from tests.http.conftest import Serve
from tests.http.driver import JSON, open_connection, post

EXPLAIN, RELEASE, FLUSH = "/v1/cache/explain", "/v1/cache/release", "/v1/cache/flush"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_IDS = (BOS, *ids("[user]hi[model]"))


async def test_flush(serve: Serve) -> None:
    engine = FakeEngine()
    app = serve(engine)
    for body, headers in ((b"", {}), (b"", JSON), (b"{}", {**JSON, "content-length": "2"})):
        reply = await open_connection(app, "POST", FLUSH, body, headers).finish()
        assert (reply.status, reply.json) == (200, {"pages": 7})
    assert engine.cache_calls == ["flush"] * 3


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"session":"s"}', JSON, 400),
        (b"{}", {}, 415),
        (b"{}", {"transfer-encoding": "chunked"}, 415),
    ],
)
async def test_a_flush_of_something_is_refused(
    serve: Serve, body: bytes, headers: dict[str, str], status: int
) -> None:
    engine = FakeEngine()
    headers = {"content-length": str(len(body)), **headers}
    reply = await open_connection(serve(engine), "POST", FLUSH, body, headers).finish()
    assert reply.status == status
    assert not engine.cache_calls


async def test_release(serve: Serve) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), RELEASE, {"session": "agent-1"})
    assert (reply.status, reply.json) == (200, {"pages": 7})
    assert engine.cache_calls == [("release", "agent-1")]


@pytest.mark.parametrize("body", [{}, {"session": ""}, {"session": None}, {"session": 5}])
async def test_a_release_of_nothing_is_refused(serve: Serve, body: object) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), RELEASE, body)
    assert (reply.status, reply.error["param"]) == (400, "session")
    assert not engine.cache_calls


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (HI, CHAT_IDS),
        ({**HI, "stream": True, "temperature": 0}, CHAT_IDS),
        ({"prompt": "hi", "cache_salt": "s"}, (BOS, *ids("hi"))),
        ({"prompt": [70, 71]}, (70, 71)),
        ({"prompt": [[70, 71]]}, (70, 71)),
    ],
)
async def test_explain_asks_of_the_prompt_that_would_be_run(
    serve: Serve, request_: dict[str, Any], prompt: tuple[int, ...]
) -> None:
    engine = FakeEngine()
    engine.cached = (len(prompt), ())
    reply = await post(serve(engine), EXPLAIN, request_)
    assert reply.json == {
        "prompt_tokens": len(prompt),
        "matched_tokens": len(prompt),
        "first_difference": None,
    }
    assert engine.cache_calls == [("explain", request_.get("cache_salt"), prompt)]
    assert not engine.requests


async def test_explain_shows_the_first_difference(serve: Serve) -> None:
    engine = FakeEngine()
    engine.cached = (8, (*ids("x"), 1))
    reply = await post(serve(engine), EXPLAIN, HI)
    [i] = ids("i")
    [x] = ids("x")
    assert reply.json["matched_tokens"] == 8
    assert reply.json["first_difference"] == {
        "position": 8,
        "token_id": i,
        "text": "i",
        "context_before": "<bos>[user]h",
        "cached_alternatives": [{"token_id": x, "text": "x"}, {"token_id": 1, "text": "<eos>"}],
    }


async def test_explain_of_what_shares_nothing_or_with_many(serve: Serve) -> None:
    engine = FakeEngine()
    engine.cached = (0, tuple(range(100)))
    difference = (await post(serve(engine), EXPLAIN, HI)).json["first_difference"]
    assert (difference["position"], difference["context_before"]) == (0, "")
    assert len(difference["cached_alternatives"]) == 20


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({}, "prompt"),
        ({**HI, "nonsense": 1}, "nonsense"),
        ({"prompt": "x" * 1000}, "prompt"),
        ({**HI, "model": "other"}, "model"),
    ],
)
async def test_explain_refuses_what_would_be_refused(
    serve: Serve, request_: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), EXPLAIN, request_)
    assert reply.status == (404 if param == "model" else 400)
    assert reply.error["param"] == param
    assert not engine.cache_calls


async def test_keys_close_these_too(serve: Serve) -> None:
    app = serve(FakeEngine(), HttpConfig(api_keys=("k",)))
    for path in (EXPLAIN, RELEASE, FLUSH):
        assert (await post(app, path, {})).status == 401


async def test_explain_of_a_server_that_starts(serve: Serve) -> None:
    engine = FakeEngine(status=EngineStatus(phase="compiling"))
    body = json.dumps(HI).encode()
    reply = await open_connection(serve(engine), "POST", EXPLAIN, body, JSON).finish()
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")

import logging

import pytest

from jaxserve.engine.client import EngineStatus
from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.metrics import Metrics
from tests.fake_engine import FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import JSON, get, open_connection, open_post, post

URL = "/v1/completions"


async def test_health_when_ready(serve: Serve) -> None:
    reply = await get(serve(FakeEngine()), "/health")
    assert (reply.status, reply.json["status"], reply.json["phase"]) == (200, "ok", "ready")


@pytest.mark.parametrize(
    "phase", ["fetching", "loading", "compiling", "warming", "draining", "dead"]
)
async def test_health_tells_the_phase(serve: Serve, phase: str) -> None:
    status = EngineStatus(phase=phase, done=3, total=9, detail="d")  # type: ignore[arg-type]
    app = serve(FakeEngine(status=status))
    reply = await get(app, "/health")
    assert reply.status == 503
    assert reply.json == {
        "status": "unavailable",
        "phase": phase,
        "done": 3,
        "total": 9,
        "detail": "d",
    }
    assert (await get(app, "/live")).status == 200


@pytest.mark.parametrize(
    ("phase", "code", "retry"),
    [
        ("loading", "unavailable", True),
        ("compiling", "unavailable", True),
        ("draining", "unavailable", True),
        ("dead", "engine_dead", False),
    ],
)
async def test_work_is_refused_unless_ready(
    serve: Serve, phase: str, code: str, retry: bool
) -> None:
    engine = FakeEngine(status=EngineStatus(phase=phase))  # type: ignore[arg-type]
    reply = await post(serve(engine), URL, {"prompt": "hi"})
    assert (reply.status, reply.error["code"]) == (503, code)
    assert ("retry-after" in reply.headers) == retry


async def test_streams_go_on_while_draining(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a"),) * 3, delay_s=0.01))
    connection = open_post(serve(engine), URL, {"prompt": "hi", "stream": True})
    await connection.receive_body(1)
    engine.status = EngineStatus(phase="draining")
    await connection.finish()
    assert connection.body.endswith(b"data: [DONE]\n\n")


async def test_model_not_loaded_yet() -> None:
    app = build_app(FakeEngine(), lambda: None, config=HttpConfig(), metrics=Metrics())
    assert (await get(app, "/health")).status == 503
    for reply in (await get(app, "/v1/models"), await post(app, URL, {"prompt": "hi"})):
        assert (reply.status, reply.error["code"]) == (503, "unavailable")


async def test_models(serve: Serve) -> None:
    app = serve(FakeEngine())
    described = {
        "id": "org/byte-model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "jaxserve",
        "max_model_len": 1000,
    }
    assert (await get(app, "/v1/models")).json == {"object": "list", "data": [described]}
    assert (await get(app, "/v1/models/org/byte-model")).json == described
    reply = await get(app, "/v1/models/org/other")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_metrics_count_by_route_and_status(serve: Serve) -> None:
    app = serve(FakeEngine())
    await get(app, "/v1/models/org/byte-model")
    await get(app, "/invented/path")
    await post(app, URL, {"prompt": 5})
    reply = await get(app, "/metrics")
    text = reply.body.decode()
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'endpoint="/v1/models/{id}",status="200"' in text
    assert 'endpoint="/v1/completions",status="400"' in text
    assert 'endpoint="unknown",status="404"' in text
    assert "invented" not in text


async def test_request_id_comes_back(serve: Serve) -> None:
    headers = {**JSON, "x-request-id": "abc-1"}
    body = b'{"prompt":"hi"}'
    reply = await open_connection(serve(FakeEngine()), "POST", URL, body, headers).finish()
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json["id"] == "cmpl-abc-1"


@pytest.mark.parametrize("bad", ["", "a b", "é", "x" * 129, "a\tb"])
async def test_bad_request_id_is_replaced(serve: Serve, bad: str) -> None:
    reply = await open_connection(
        serve(FakeEngine()), "GET", "/live", headers={"x-request-id": bad}
    ).finish()
    assert reply.headers["x-request-id"] not in ("", bad)


async def test_errors_carry_the_request_id(serve: Serve) -> None:
    headers = {"x-request-id": "abc-2"}
    reply = await open_connection(serve(FakeEngine()), "GET", "/nowhere", headers=headers).finish()
    assert reply.headers["x-request-id"] == "abc-2"


async def test_one_line_per_finished_request(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="jaxserve"):
        app = serve(FakeEngine(Script.say("secret answer", cached_tokens=2)))
        await post(app, URL, {"prompt": "secret prompt", "stream": True})
    assert caplog.messages == [
        "finished: /v1/completions 200 sequences=1 prompt=14 cached=2 output=14"
        " queue_ms=1.0 ttft_ms=2.0 tpot_ms=0.1 reason=stop"
    ]


async def test_the_line_counts_each_prompt_once_as_usage_does(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    app = serve(FakeEngine(Script.say("a", cached_tokens=1)))
    with caplog.at_level(logging.INFO, logger="jaxserve"):
        reply = await post(app, URL, {"prompt": ["xyz", "x"], "n": 3})
    assert reply.json["usage"]["prompt_tokens"] == 4 + 2
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert "200 sequences=6 prompt=6 cached=2 output=12 " in caplog.text


async def test_left_request_is_logged_as_aborted(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(Script(end=None))
    with caplog.at_level(logging.INFO, logger="jaxserve"):
        connection = open_post(serve(engine), URL, {"prompt": "hi"})
        await engine.until_submitted()
        connection.disconnect()
        await connection.finish()
    assert caplog.messages == [
        "finished: /v1/completions 499 sequences=1 prompt=3 cached=0 output=0"
        " queue_ms=- ttft_ms=- tpot_ms=- reason=abort"
    ]


async def test_the_list_of_models_ends_in_a_slash_or_not(serve: Serve) -> None:
    replies = [await get(serve(FakeEngine()), path) for path in ("/v1/models", "/v1/models/")]
    assert [reply.json["object"] for reply in replies] == ["list", "list"]

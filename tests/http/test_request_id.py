"""Whose id a request has, and where it is told."""

import asyncio
import json
import logging

import pytest

from jaxserve import logs
from tests.fake_engine import FakeEngine, Script
from tests.http.conftest import Serve
from tests.http.driver import JSON, Connection, open_connection
from tests.http.sockets import running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, object] = {"prompt": "hi"}


async def ask(
    serve: Serve, path: str, request: dict[str, object], header: str | None = None
) -> Connection:
    headers = JSON if header is None else {**JSON, "x-request-id": header}
    body = json.dumps(request).encode()
    return await open_connection(serve(FakeEngine()), "POST", path, body, headers).finish()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "request_", "prefix"), [(CHAT, HI, "chatcmpl"), (COMPLETIONS, PROMPT, "cmpl")]
)
async def test_the_bodys_id_is_told(
    serve: Serve, path: str, request_: dict[str, object], prefix: str, stream: bool
) -> None:
    reply = await ask(serve, path, {**request_, "request_id": "mine-1", "stream": stream})
    assert reply.headers["x-request-id"] == "mine-1"
    answers = reply.chunks if stream else [reply.json]
    assert {answer["id"] for answer in answers} == {f"{prefix}-mine-1"}


@pytest.mark.parametrize(
    ("header", "expected"), [("theirs", "theirs"), ("not one", "mine"), ("", "mine")]
)
async def test_a_good_header_goes_before_the_body(serve: Serve, header: str, expected: str) -> None:
    reply = await ask(serve, COMPLETIONS, {**PROMPT, "request_id": "mine"}, header)
    assert reply.headers["x-request-id"] == expected


async def test_a_refusal_carries_the_bodys_id(serve: Serve) -> None:
    reply = await ask(serve, CHAT, {**HI, "request_id": "mine", "model": "other"})
    assert (reply.status, reply.headers["x-request-id"]) == (404, "mine")


@pytest.mark.parametrize(
    "bad", ["", "a b", "é", "x" * 129, "a\nb", "a\r\nset-cookie: x", "\x7f", 5]
)
async def test_what_no_header_could_hold_is_refused(serve: Serve, bad: object) -> None:
    reply = await ask(serve, COMPLETIONS, {**PROMPT, "request_id": bad})
    assert (reply.status, reply.error["param"]) == (400, "request_id")
    assert "set-cookie" not in reply.headers


async def test_no_id_adds_a_header_to_the_answer(serve: Serve) -> None:
    body = json.dumps({**PROMPT, "request_id": "a\r\nset-cookie: x=y"}).encode()
    async with running(serve(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.close()
    assert head.startswith(b"HTTP/1.1 400")
    assert b"set-cookie" not in head


async def test_requests_without_an_id_get_different_ones(serve: Serve) -> None:
    found = {(await ask(serve, COMPLETIONS, PROMPT)).headers["x-request-id"] for _ in range(3)}
    assert len(found) == 3


async def test_the_log_has_the_bodys_id(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    class Spy(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            seen.append(logs.request_id.get())
            return True

    caplog.handler.addFilter(spy := Spy())
    try:
        with caplog.at_level(logging.INFO, logger="jaxserve"):
            await ask(serve, COMPLETIONS, {**PROMPT, "request_id": "mine", "stream": True})
    finally:
        caplog.handler.removeFilter(spy)
    assert seen == ["mine"]


async def test_engine_ids_begin_with_it_and_differ(serve: Serve) -> None:
    engine = FakeEngine(Script.say("a"))
    body = json.dumps({**PROMPT, "request_id": "mine", "n": 2}).encode()
    app = serve(engine)
    for _ in range(2):
        await open_connection(app, "POST", COMPLETIONS, body, JSON).finish()
    found = {request.request_id for request in engine.requests}
    assert len(found) == 4
    assert all(each.startswith("mine.") for each in found)

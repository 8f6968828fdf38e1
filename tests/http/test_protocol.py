"""Bytes on a connection that no well-behaved HTTP library sends."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from jaxserve.http import protocol
from tests.fake_engine import FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.sockets import running

BODY = b'{"prompt": "hi"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# What Java's HttpClient sends with every first request of a connection.
OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
)


class Peer:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        """Send parts as packets of their own, as far as one can."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.01)

    async def answer(self) -> tuple[int, dict[str, object]]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        lines = head.decode().lower().split("\r\n")
        length = next(
            int(line.split(":")[1]) for line in lines if line.startswith("content-length")
        )
        return int(lines[0].split()[1]), json.loads(await self.reader.readexactly(length))


@pytest.fixture
async def peer(serve: Serve) -> AsyncIterator[Peer]:
    async with running(serve(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield Peer(reader, writer)
        writer.close()


@pytest.mark.parametrize("cuts", [(), (40,), (120,), (-16,), (-8,), (30, 100, -20, -3)])
async def test_an_offer_of_another_protocol_is_ignored(peer: Peer, cuts: tuple[int, ...]) -> None:
    request = HEAD + OFFER + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    for _ in range(2):  # the connection stays usable
        ends = [*(cut % len(request) for cut in cuts), len(request)]
        await peer.send(*(request[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)))
        status, answer = await peer.answer()
        assert status == 200
        assert answer["object"] == "text_completion"


async def test_an_offer_with_a_chunked_body_is_ignored(peer: Peer) -> None:
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    await peer.send(HEAD + OFFER + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert (await peer.answer())[0] == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"POST / HTTP/9.9\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HEAD + b"X: " + b"a" * (70 << 10), 431),
        (b"GET /" + b"a" * (8 << 10), 414),
        (b"GET /" + b"a" * (70 << 10), 414),
        (b"GET /" + b"a" * (8 << 10) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * (70 << 10) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * (8 << 10) + b" HTTP/1.1\r\n\r\nGET /live HTTP/1.1\r\n\r\n", 414),
        (HEAD + b"X: " + b"a" * (70 << 10) + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\n" + (b"Xyz: " + b"a" * 995 + b"\r\n") * 70 + b"\r\n", 431),
    ],
)
async def test_what_is_no_request_is_refused_in_the_apis_shape(
    peer: Peer, data: bytes, status: int
) -> None:
    await peer.send(data)
    answer = await peer.answer()
    assert answer[0] == status
    assert isinstance(answer[1]["error"], dict)
    assert await asyncio.wait_for(peer.reader.read(), 5) == b""  # and the connection ends


async def test_the_longest_url(peer: Peer) -> None:
    await peer.send(b"GET /" + b"a" * ((8 << 10) - 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await peer.answer())[0] == 404


VALID = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("num_before", [1, 3])
@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x00garbage\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"X: " + b"a" * (70 << 10) + b"\r\n\r\n", 431),
    ],
)
async def test_what_was_complete_before_garbage_is_answered_first(
    peer: Peer, garbage: bytes, status: int, num_before: int, together: bool
) -> None:
    parts = (VALID * num_before + garbage,) if together else (VALID * num_before, garbage)
    for part in parts:  # not waiting for what each does
        peer.writer.write(part)
    for _ in range(num_before):
        assert (await peer.answer())[0] == 200
    answer = await peer.answer()
    assert answer[0] == status
    assert isinstance(answer[1]["error"], dict)
    assert await asyncio.wait_for(peer.reader.read(), 5) == b""


async def test_garbage_behind_a_stream_waits_for_its_end(serve: Serve) -> None:
    steps = tuple(ids(letter) for letter in "abcdefgh")
    engine = FakeEngine(Script(steps=steps, delay_s=0.002, end="stop"))
    async with running(serve(engine)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "hi", "stream": true}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\x00\x01\r\n")
        raw = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    answer, _, refusal = raw.partition(b"data: [DONE]")
    assert answer.count(b'"text":"') == 8 + 1  # and the finish
    assert b"HTTP/1.1 400" in refusal
    assert not engine.aborted


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD, 408),
        (HEAD + b"Content-Length: 100\r\n\r\n", 408),
        (HEAD + b"Content-Length: 100\r\n\r\n" + BODY, 408),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12", 408),
        (VALID + HEAD, 408),
        (b"", 0),
    ],
)
async def test_a_request_that_does_not_arrive_ends(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    monkeypatch.setattr(protocol, "MAX_SILENCE_S", 0.1)
    async with running(serve(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        peer = Peer(reader, writer)
        await peer.send(sent)
        if sent.startswith(VALID):
            assert (await peer.answer())[0] == 200
        if status:
            answer = await peer.answer()
            assert answer[0] == status
            assert isinstance(answer[1]["error"], dict)
            assert answer[1]["error"]["code"] == "request_timeout"
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_body_may_take_its_time_while_something_of_it_comes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_SILENCE_S", 1.0)
    async with running(serve(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun_s = asyncio.get_running_loop().time()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for i, byte in enumerate(BODY):
            writer.write(bytes((byte,)))
            await asyncio.sleep(max(0, begun_s + 0.08 * i - asyncio.get_running_loop().time()))
        assert (await Peer(reader, writer).answer())[0] == 200
        writer.close()


async def test_an_answer_may_take_its_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_SILENCE_S", 0.15)
    engine = FakeEngine(Script(steps=(ids("ab"),), delay_s=0.1))
    async with running(serve(engine)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(VALID + VALID)
        peer = Peer(reader, writer)
        assert [(await peer.answer())[0] for _ in range(2)] == [200, 200]
        writer.close()


async def test_a_body_that_never_comes_is_told_of_the_servers_end(serve: Serve) -> None:
    async with running(serve(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        peer = Peer(reader, writer)
        await peer.send(HEAD + b"Content-Length: 100\r\n\r\n" + BODY)
    status, answer = await peer.answer()
    writer.close()
    assert status == 503
    assert isinstance(answer["error"], dict)
    assert answer["error"]["code"] == "unavailable"


@pytest.mark.parametrize(("num_requests", "delay_s"), [(1, 0.0), (3, 0.0), (1, 0.1)])
async def test_a_client_that_only_has_nothing_more_to_send_is_answered(
    serve: Serve, num_requests: int, delay_s: float
) -> None:
    engine = FakeEngine(Script(steps=(ids("ab"),), delay_s=delay_s))
    async with running(serve(engine)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(VALID * num_requests)
        writer.write_eof()
        raw = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert raw.count(b"HTTP/1.1 200 OK") == raw.count(b'"text":"ab"') == num_requests
    assert raw.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 " if delay_s else b"HTTP/1.1 200")
    assert not engine.aborted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_closed_both_sides_has_gone(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(Script(end=None))
    async with running(serve(engine)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "hi", "stream": true}' if stream else BODY
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await engine.until_submitted()
        writer.close()
        await engine.until_aborted()


async def test_half_a_request_has_no_answer(peer: Peer) -> None:
    await peer.send(VALID[:-3])
    peer.writer.write_eof()
    assert await asyncio.wait_for(peer.reader.read(), 5) == b""

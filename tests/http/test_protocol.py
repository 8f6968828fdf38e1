"""Bytes on a connection that no well-behaved HTTP library sends."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.fake_engine import FakeEngine
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
        (HEAD + b"X: " + b"a" * (70 << 10), 431),
        (b"GET /" + b"a" * (70 << 10), 431),
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

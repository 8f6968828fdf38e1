"""HTTP/1.1 by hand on a connection that is kept open: cheap, and free to send what is no HTTP."""

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; `headers` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of a stream's events, in order; comments are left out."""
        parts = self.body.decode().split("\n\n")
        return [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]


class Connection:
    """A connection; a context manager that closes it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = str(parts.hostname), parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def open(self) -> None:
        """Connect; what was open before is closed."""
        self.close()
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None

    def reset(self) -> None:
        """Cut the connection off, so that the peer sees a reset."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    async def send(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def read_some(self) -> bytes:
        """Return what has come, b"" at the end."""
        assert self._reader is not None
        return await self._reader.read(1 << 16)

    async def end_sending(self) -> None:
        """Say that nothing more will be sent."""
        assert self._writer is not None
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def receive(self) -> Reply | None:
        """Read one answer; None where the connection ended before its first byte."""
        reader = self._reader
        assert reader is not None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.close()
            if getattr(error, "partial", b""):
                raise
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if headers.get("transfer-encoding") == "chunked":
            body = await self._chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            self.close()
        return Reply(status=int(first.split()[1]), headers=headers, body=body)

    async def post(self, path: str, body: bytes, *, head: bytes = b"") -> Reply | None:
        """Send a JSON body and read its answer; `head` holds further header lines."""
        if not self.is_open:
            await self.open()
        await self.send(post(path, body, head=head))
        return await self.receive()

    @staticmethod
    async def _chunks(reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return bytes(body)


def post(path: str, body: bytes, *, head: bytes = b"") -> bytes:
    """Return the bytes of a POST with a JSON body."""
    return (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%s\r\n%s" % (path.encode(), len(body), head, body)
    )

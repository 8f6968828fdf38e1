"""A client without sockets: it feeds an ASGI application and collects what that sends."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

JSON = {"content-type": "application/json"}


@dataclass
class Connection:
    """One exchange, which the client may leave at any time."""

    task: asyncio.Task[None]
    incoming: asyncio.Queue[Message]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def receive_body(self, count: int) -> list[bytes]:
        """Wait until `count` body messages have come."""
        while len(self.bodies) < count and not self.task.done():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 5)
        return self.bodies

    async def receive_start(self) -> None:
        """Wait for the status and the headers."""
        await asyncio.wait_for(self._news.wait(), 5)

    async def finish(self) -> "Connection":
        """Wait for the end of the exchange."""
        await asyncio.wait_for(self.task, 5)
        return self

    @property
    def body(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def chunks(self) -> list[Any]:
        """The stream's JSON events, without heartbeats and the end."""
        lines = self.body.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.bodies.append(message["body"])
        self._news.set()


def open_connection(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
) -> Connection:
    """Start an exchange and return while it runs."""
    pairs = headers.items() if isinstance(headers, dict) else headers or ()
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (name.encode(), value.encode(errors="surrogateescape")) for name, value in pairs
        ],
        "server": ("testserver", 80),
        "client": ("testclient", 1),
    }

    async def run() -> None:
        await app(scope, incoming.get, send)

    async def send(message: Message) -> None:
        connection._take(message)

    connection = Connection(asyncio.get_running_loop().create_task(run()), incoming)
    return connection


def open_post(app: ASGIApp, path: str, request: object) -> Connection:
    """Post an object as JSON and return while the answer is being made."""
    return open_connection(app, "POST", path, json.dumps(request).encode(), JSON)


async def post(app: ASGIApp, path: str, request: object) -> Connection:
    """Post an object as JSON and wait for the whole answer."""
    return await open_post(app, path, request).finish()


async def get(app: ASGIApp, path: str) -> Connection:
    """Get a path."""
    return await open_connection(app, "GET", path).finish()

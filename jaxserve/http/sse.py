"""A response of server-sent events, with heartbeats, that stops working when its client goes.

Frames come as bytes and leave as they are, one send each: sse-starlette would add 8 µs to each of
them and patch uvicorn's shutdown, and Starlette's StreamingResponse has no heartbeat. A heartbeat
is a comment of one line, not followed by an empty one, because some clients take an empty line for
the end of an event. There is never an `id:`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxserve.errors import ApiError, EngineError
from jaxserve.http.disconnect import run_while_connected
from jaxserve.http.errors import INTERNAL_ERROR_MESSAGE
from jaxserve.openai.responses import error_body

logger = logging.getLogger(__name__)

_HEARTBEAT = b": heartbeat\n"


class EventStreamResponse(StreamingResponse):
    """Sends `frames` as they come; an error after the first byte is one more event, the last.

    `on_end` is called once in every case, also where the client goes before the first frame was
    asked for: a generator that never ran has no `finally`.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        on_end: Callable[[], None],
        heartbeat_s: float,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, headers=headers, media_type="text/event-stream")
        self._frames = frames
        self._on_end = on_end
        self._heartbeat_s = heartbeat_s
        self._last_sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream to its end, or until the client goes."""
        try:
            await run_while_connected(receive, self._run(send))
        finally:
            self._on_end()

    async def _run(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        heart = asyncio.create_task(self._beat(send)) if self._heartbeat_s else None
        try:
            await send({**start, "headers": self.raw_headers})
            await self._send_frames(send)
        finally:
            if heart is not None:
                heart.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._send(send, frame)
        except ApiError as error:
            await self._send(send, _error_frame(error))
        except Exception:  # the client has no other way to learn of it
            logger.exception("a stream broke")
            await self._send(send, _error_frame(EngineError(INTERNAL_ERROR_MESSAGE)))

    async def _send(self, send: Send, frame: bytes) -> None:
        self._last_sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _beat(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._last_sent_s
            if silent_s >= self._heartbeat_s:
                await self._send(send, _HEARTBEAT)
            else:
                await asyncio.sleep(self._heartbeat_s - silent_s)


def _error_frame(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"

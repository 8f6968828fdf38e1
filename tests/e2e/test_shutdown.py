"""The end of a server: drained, cut short, before it began, or by a fault."""

import asyncio
import json
import signal
import sys
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Start
from tests.e2e.server import PATIENCE_S, ServerProcess, wait_until

pytestmark = pytest.mark.timeout(300)  # the first test may wait for the compiler

# The engine is the real one, but its device fails after some steps of decoding.
FAILING = """
import itertools, sys
from jaxserve.cli import main
from jaxserve.device.runner import ModelRunner

calls, decode = itertools.count(), ModelRunner.decode

def fail_later(self, slots, positions):
    if next(calls) == 40:
        raise RuntimeError("the chip is gone")
    return decode(self, slots, positions)

ModelRunner.decode = fail_later
sys.exit(main())
"""


class Stream:
    """A streamed completion, read to its end in the background."""

    def __init__(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        self.events: list[str] = []
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, max_tokens))

    async def _read(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        body = {"prompt": "Rain", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.has_begun.set()
        except httpx.RemoteProtocolError as error:
            self.events.append(json.dumps({"cut off": str(error)}))
        finally:
            self.has_begun.set()

    async def end(self) -> list[Any]:
        """Wait for the end; returns all events, JSON but for the last of a whole stream."""
        await asyncio.wait_for(self.task, PATIENCE_S)
        return [event if event == "[DONE]" else json.loads(event) for event in self.events]


def client_of(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)


async def test_sigterm_lets_streams_end_and_takes_no_more(start: Start) -> None:
    server = start()
    server.wait_ready()
    async with client_of(server) as client, client_of(server) as idle:
        await idle.get("/live")  # its connection stays open
        streams = [Stream(client, 700) for _ in range(10)]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams[:8]))

        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: server.get("/health").status_code == 503)
        refused = await client.post("/v1/completions", json={"prompt": "Rain"})
        live = await client.get("/live")
        ends = [await stream.end() for stream in streams]

    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert live.status_code == 200
    for events in ends:
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert server.wait_exit() == 0
    assert "Traceback" not in server.log


async def test_a_second_sigterm_ends_streams_at_once(start: Start) -> None:
    server = start()
    server.wait_ready()
    async with client_of(server) as client:
        stream = Stream(client, 2000)
        await stream.has_begun.wait()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: "draining" in server.log)

        server.process.send_signal(signal.SIGTERM)

        assert (await stream.end())[-1]["error"]["code"] == "unavailable"
        assert await asyncio.to_thread(server.wait_exit) == 0
    assert "Traceback" not in server.log


async def test_streams_that_outlast_the_grace_are_told(start: Start) -> None:
    """Also where a thread is in a template that does not come to its end."""
    server = start("--drain-s", "0.2", "--trust-request-chat-template")
    server.wait_ready()
    async with client_of(server) as client:
        stream = Stream(client, 2000)
        await stream.has_begun.wait()
        loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
        endless = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": loops}
        rendering = asyncio.create_task(client.post("/v1/chat/completions/render", json=endless))
        await asyncio.sleep(0.1)

        server.process.send_signal(signal.SIGTERM)

        assert (await stream.end())[-1]["error"]["code"] == "unavailable"
        assert await asyncio.to_thread(server.wait_exit) == 0
        await asyncio.gather(rendering, return_exceptions=True)
    assert server.log.rstrip().endswith("stopped")


@pytest.mark.parametrize(
    ("signal_number", "code", "line"),
    [(signal.SIGTERM, 0, "draining"), (signal.SIGINT, 130, "interrupted while")],
)
def test_a_signal_while_loading_ends_the_start(
    start: Start, signal_number: int, code: int, line: str
) -> None:
    server = start("--max-batch", "7")  # for which nothing is compiled yet
    assert server.get("/health").status_code == 503

    server.process.send_signal(signal_number)

    assert server.wait_exit() == code
    assert line in server.log
    assert "ready after" not in server.log
    assert "Traceback" not in server.log


async def test_a_device_that_fails_ends_every_stream_and_the_process(start: Start) -> None:
    server = start(command=(sys.executable, "-c", FAILING))
    server.wait_ready()
    async with client_of(server) as client:
        streams = [Stream(client, 700) for _ in range(10)]
        ends = [await stream.end() for stream in streams]

    for events in ends:
        assert events[-1]["error"]["code"] == "engine_dead"
    assert server.wait_exit() == 1
    assert "the chip is gone" in server.log

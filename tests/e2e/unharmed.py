"""Whether a server came through something as it was before."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.e2e.generated import COMPLETIONS
from tests.e2e.server import ServerProcess, wait_until
from tests.e2e.wire import Connection

DEADLINE_S = 60.0
"""Of one request. It only tells a hang from an answer, on machines however slow."""

GOOD = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, "return_token_ids": True}


async def good_choice(server: ServerProcess) -> Any:
    async with Connection(server.url) as connection, asyncio.timeout(DEADLINE_S):
        reply = await connection.post(COMPLETIONS, json.dumps(GOOD).encode())
    assert reply is not None
    assert reply.status == 200
    return reply.json()["choices"]


@asynccontextmanager
async def unharmed(server: ServerProcess) -> AsyncIterator[None]:
    """Check that what happens inside leaves nothing behind, and the server as well as before."""
    before = await good_choice(server)
    num_before = num_open(server)
    log_start = len(server.log)

    yield

    await asyncio.to_thread(wait_until, lambda: is_idle(server))
    assert await good_choice(server) == before
    assert server.metric("jaxserve_serving_compiles_total") == 0
    assert 'status="500"' not in server.get("/metrics").text
    log = server.log[log_start:]
    assert "Traceback" not in log
    # Nothing that a terminal would obey.
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f]", log) is None
    await asyncio.to_thread(wait_until, lambda: num_open(server) <= num_before)


def is_idle(server: ServerProcess) -> bool:
    gauges = (
        "num_requests_running",
        "num_requests_waiting",
        "kv_pages_used",
        "kv_sliding_pages_used",
    )
    return all(server.metric(f"jaxserve_{gauge}") == 0 for gauge in gauges)


def num_open(server: ServerProcess) -> int:
    """Count what is open, but for pipes: they lead to the process that compiles grammars."""
    links = Path(f"/proc/{server.process.pid}/fd").glob("*")
    return sum(not os.path.realpath(link).rpartition("/")[2].startswith("pipe:") for link in links)

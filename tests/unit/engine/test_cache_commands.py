"""What is asked of the cache from the event loop: done by the device thread, answered always."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jaxserve.engine.client import EngineClient, EngineStatus, Phase
from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Inbox
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineDeadError, UnavailableError
from jaxserve.metrics import Metrics
from jaxserve.types import GenerationRequest, SamplingParams
from tests.fakes import FakeRunner

SYSTEM = tuple(range(10, 20))


def new_client(inbox: Inbox) -> EngineClient:
    client = EngineClient(inbox, max_waiting_requests=9, max_waiting_tokens=999)
    client.set_status(EngineStatus(phase="ready"))
    return client


@asynccontextmanager
async def running() -> AsyncIterator[EngineClient]:
    inbox, runner = Inbox(), FakeRunner(page_size=4, num_pages=60)
    client = new_client(inbox)
    core = EngineCore(
        runner,
        Scheduler(runner),
        inbox,
        publish=client.deliver,
        on_death=lambda _: client.set_status(EngineStatus(phase="dead")),
        metrics=Metrics(),
    )
    thread = threading.Thread(target=core.run)
    thread.start()
    try:
        yield client
    finally:
        client.stop()
        await asyncio.to_thread(thread.join, 5)


async def run(client: EngineClient, ids: tuple[int, ...], session: str | None = None) -> None:
    request = GenerationRequest(
        request_id=str(ids),
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=1, seed=0),
        session=session,
    )
    [stream] = client.submit([request])
    async for _ in stream:
        pass


async def test_explain_flush_and_explain_again() -> None:
    async with running() as client:
        assert await client.explain(None, (5, 6, 7)) == (0, ())
        await run(client, (5, 6, 7, 8, 9))
        await run(client, (5, 6, 1))
        assert await client.explain(None, (5, 6, 7, 8, 9)) == (5, ())
        assert await client.explain(None, (5, 6, 2)) == (2, (1, 7))
        assert await client.explain("salt", (5, 6, 2)) == (0, ())
        assert await client.flush_cache() > 0
        assert await client.explain(None, (5, 6, 7, 8, 9)) == (0, ())
        assert await client.flush_cache() == 0


async def test_a_release_drops_what_is_the_sessions_alone() -> None:
    async with running() as client:
        mine, others, nobodys = ((*SYSTEM, end, end) for end in (1, 2, 3))
        await run(client, mine, "mine")
        await run(client, others, "other")
        await run(client, nobodys)
        assert await client.release_session("nobody") == 0
        assert await client.release_session("mine") > 0
        matched = [(await client.explain(None, ids))[0] for ids in (mine, others, nobodys)]
        assert matched == [len(SYSTEM), len(others), len(nobodys)]


@pytest.mark.parametrize("is_kept", [False, True])
async def test_what_is_to_be_kept_outlives_what_came_after_it(is_kept: bool) -> None:
    async with running() as client:
        mine = (*SYSTEM, 1, 1)
        await run(client, mine)
        if is_kept:
            client.keep(None, mine)
        for i in range(30):
            await run(client, (100 + i,) * 12)
        assert (await client.explain(None, mine))[0] == (len(mine) if is_kept else 0)


async def test_an_engine_that_has_stopped_keeps_nothing_and_nobody_minds() -> None:
    inbox = Inbox()
    client = new_client(inbox)
    inbox.close()
    client.keep(None, SYSTEM)


@pytest.mark.parametrize("phase", ["loading", "compiling", "draining", "dead"])
async def test_it_is_refused_unless_ready(phase: Phase) -> None:
    client = EngineClient(Inbox(), max_waiting_requests=9, max_waiting_tokens=99)
    client.set_status(EngineStatus(phase=phase))
    with pytest.raises(EngineDeadError if phase == "dead" else UnavailableError):
        await client.flush_cache()


async def test_it_is_refused_by_an_engine_that_has_just_died() -> None:
    inbox = Inbox()
    client = new_client(inbox)
    inbox.close()
    with pytest.raises(EngineDeadError):
        await client.flush_cache()


class BrokenScheduler(Scheduler):
    def flush_cache(self) -> int:
        raise KeyError("a bug")


async def test_whoever_waits_when_the_engine_dies_is_told() -> None:
    inbox, runner = Inbox(), FakeRunner()
    client = new_client(inbox)
    core = EngineCore(
        runner,
        BrokenScheduler(runner),
        inbox,
        publish=client.deliver,
        on_death=lambda _: None,
        metrics=Metrics(),
    )
    waiting = [
        asyncio.ensure_future(client.flush_cache()),
        asyncio.ensure_future(client.explain(None, ())),
    ]
    await asyncio.sleep(0)
    await asyncio.to_thread(core.run)
    for each in waiting:
        with pytest.raises(EngineDeadError):
            await each


async def test_whoever_waits_may_give_up() -> None:
    async with running() as client:
        waiting = asyncio.ensure_future(client.flush_cache())
        await asyncio.sleep(0)
        waiting.cancel()
        assert await client.flush_cache() == 0

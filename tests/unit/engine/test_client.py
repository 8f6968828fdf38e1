import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from jaxserve.engine.client import EngineClient, EngineStatus, OutputStream, Phase
from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Abort, Inbox, Stop, Submit
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineDeadError, InvariantError, OverloadedError, UnavailableError
from jaxserve.metrics import Metrics
from jaxserve.types import (
    GenerationRequest,
    OutputEvent,
    PromptOutput,
    RequestFailed,
    RequestFinished,
    RequestStats,
    SamplingParams,
    TokenOutput,
)
from tests.fakes import FakeRunner, fake_generate, fake_logprobs

STATS = RequestStats(
    num_prompt_tokens=3,
    num_cached_tokens=0,
    num_output_tokens=0,
    queue_s=None,
    ttft_s=None,
    total_s=0.0,
)


def request(request_id: str = "a", num_prompt: int = 3, max_tokens: int = 4) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return GenerationRequest(request_id=request_id, prompt_ids=(1,) * num_prompt, sampling=sampling)


def finished(request_id: str = "a") -> RequestFinished:
    return RequestFinished(request_id, "length", STATS)


def ready_client(
    inbox: Inbox, *, max_waiting_requests: int = 100, max_waiting_tokens: int = 1_000
) -> EngineClient:
    client = EngineClient(
        inbox, max_waiting_requests=max_waiting_requests, max_waiting_tokens=max_waiting_tokens
    )
    client.set_status(EngineStatus(phase="ready"))
    return client


def submit(client: EngineClient, one: GenerationRequest) -> OutputStream:
    (stream,) = client.submit([one])
    return stream


async def read(stream: OutputStream) -> list[OutputEvent]:
    return [event async for event in stream]


async def test_submit_sends_the_request_to_the_device_thread() -> None:
    inbox = Inbox()
    submit(ready_client(inbox), request())
    [command] = inbox.take(block=False)
    assert isinstance(command, Submit)
    assert command.request == request()


async def test_a_stream_ends_after_the_terminal_event() -> None:
    client = ready_client(Inbox())
    stream = submit(client, request())
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    client.deliver([TokenOutput("a", (7,))])
    await asyncio.sleep(0.001)
    client.deliver([TokenOutput("a", (8,)), finished()])
    assert await reader == [TokenOutput("a", (7,)), TokenOutput("a", (8,)), finished()]
    assert await read(stream) == []


async def test_a_slow_reader_gets_the_tokens_it_missed_as_one_output() -> None:
    client = ready_client(Inbox())
    stream = submit(client, request())
    for token_id in range(5):
        client.deliver([TokenOutput("a", (token_id,))])
    client.deliver([finished()])
    await asyncio.sleep(0.001)
    assert await read(stream) == [TokenOutput("a", (0, 1, 2, 3, 4)), finished()]


async def test_merged_tokens_keep_their_logprobs_and_prompts_stay_apart() -> None:
    client = ready_client(Inbox())
    stream = submit(client, request())
    of = [fake_logprobs(token_id) for token_id in range(6)]
    prompts = [PromptOutput("a", (of[0], of[1])), PromptOutput("a", (of[2],))]
    client.deliver([*prompts, TokenOutput("a", (3,), (of[3],))])
    client.deliver([TokenOutput("a", (4,), (of[4],)), TokenOutput("a", (5,), (of[5],))])
    client.deliver([finished()])
    await asyncio.sleep(0.001)
    merged = TokenOutput("a", (3, 4, 5), (of[3], of[4], of[5]))
    assert await read(stream) == [*prompts, merged, finished()]


async def test_events_go_to_their_own_streams() -> None:
    client = ready_client(Inbox())
    a, b = submit(client, request("a")), submit(client, request("b"))
    client.deliver([TokenOutput("b", (1,)), finished("a"), finished("b")])
    assert await read(a) == [finished("a")]
    assert await read(b) == [TokenOutput("b", (1,)), finished("b")]


async def test_a_cancelled_reader_does_not_break_the_stream() -> None:
    client = ready_client(Inbox())
    stream = submit(client, request())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    client.deliver([finished()])
    assert await read(stream) == [finished()]


async def test_abort_is_sent_once_and_not_after_the_end() -> None:
    inbox = Inbox()
    client = ready_client(inbox)
    a, b = submit(client, request("a")), submit(client, request("b"))
    client.deliver([finished("b")])
    await asyncio.sleep(0.001)
    inbox.take(block=False)
    a.abort()
    a.abort()
    b.abort()
    assert inbox.take(block=False) == [Abort(request_id="a")]


@pytest.mark.parametrize("phase", ["loading", "compiling", "draining"])
async def test_submit_is_refused_unless_ready(phase: Phase) -> None:
    client = EngineClient(Inbox(), max_waiting_requests=1, max_waiting_tokens=1)
    client.set_status(EngineStatus(phase=phase))
    with pytest.raises(UnavailableError):
        submit(client, request())


async def test_submit_to_a_dead_engine() -> None:
    client = ready_client(Inbox())
    client.set_status(EngineStatus(phase="dead"))
    with pytest.raises(EngineDeadError):
        submit(client, request())


async def test_submit_to_an_engine_that_has_just_died() -> None:
    inbox = Inbox()
    client = ready_client(inbox)
    inbox.close()
    with pytest.raises(EngineDeadError):
        submit(client, request())
    await asyncio.wait_for(client.drain(), 1)


async def test_a_live_request_id_is_not_taken_twice() -> None:
    client = ready_client(Inbox())
    submit(client, request())
    with pytest.raises(InvariantError):
        submit(client, request())


async def test_the_queue_is_bounded_by_requests_until_a_first_token() -> None:
    client = ready_client(Inbox(), max_waiting_requests=2)
    submit(client, request("a"))
    submit(client, request("b"))
    with pytest.raises(OverloadedError, match="2 sequences"):
        submit(client, request("c"))
    client.deliver([TokenOutput("a", (1,))])
    await asyncio.sleep(0.001)
    submit(client, request("c"))


async def test_the_queue_is_bounded_by_prompt_tokens_but_never_for_a_lone_request() -> None:
    client = ready_client(Inbox(), max_waiting_tokens=10)
    submit(client, request("large", num_prompt=50))
    with pytest.raises(OverloadedError, match="10 prompt tokens"):
        submit(client, request("b"))
    client.deliver([finished("large")])
    await asyncio.sleep(0.001)
    submit(client, request("b", num_prompt=5))
    submit(client, request("c", num_prompt=5))


async def test_what_belongs_together_is_queued_whole_or_not_at_all() -> None:
    inbox = Inbox()
    client = ready_client(inbox, max_waiting_requests=2, max_waiting_tokens=8)
    trio = [request(name) for name in "abc"]
    # Larger than both bounds, yet not refused for ever: nothing else waits.
    assert [stream.request_id for stream in client.submit(trio)] == ["a", "b", "c"]
    client.deliver([finished(name) for name in "abc"])
    await asyncio.sleep(0.001)
    inbox.take(block=False)
    submit(client, request("d"))
    with pytest.raises(OverloadedError, match="2 sequences"):
        client.submit([request("e"), request("f")])
    assert [type(command) for command in inbox.take(block=False)] == [Submit]


def test_status_does_not_return_from_draining_or_dead() -> None:
    client = EngineClient(Inbox(), max_waiting_requests=1, max_waiting_tokens=1)
    phases: list[Phase] = ["compiling", "ready", "draining", "ready", "dead", "draining"]
    seen = [client.status.phase]
    for phase in phases:
        client.set_status(EngineStatus(phase=phase))
        seen.append(client.status.phase)
    assert seen == ["loading", "compiling", "ready", "draining", "draining", "dead", "dead"]


def test_delivery_to_a_closed_loop_is_dropped() -> None:
    client = ready_client(Inbox())
    client.deliver([finished("before any submit")])

    async def submit_one() -> None:
        submit(client, request())

    asyncio.run(submit_one())
    client.deliver([finished()])


async def test_drain_waits_for_the_live_and_refuses_the_new() -> None:
    client = ready_client(Inbox())
    submit(client, request())
    drained = asyncio.create_task(client.drain())
    await asyncio.sleep(0.001)
    assert not drained.done()
    with pytest.raises(UnavailableError):
        submit(client, request("b"))
    client.deliver([finished()])
    await asyncio.wait_for(drained, 1)


async def test_drain_aborts_what_outlasts_its_grace() -> None:
    inbox = Inbox()
    client = ready_client(inbox)
    submit(client, request())
    drained = asyncio.create_task(client.drain(grace_s=0.001))
    await asyncio.sleep(0.05)
    assert inbox.take(block=False)[1:] == [Abort(request_id="a")]
    client.deliver([finished()])
    await asyncio.wait_for(drained, 1)


async def test_stop_reaches_the_device_thread() -> None:
    inbox = Inbox()
    ready_client(inbox).stop()
    assert inbox.take(block=False) == [Stop()]


@contextlib.contextmanager
def running(runner: FakeRunner, client: EngineClient, inbox: Inbox) -> Iterator[None]:
    core = EngineCore(
        runner,
        Scheduler(runner),
        inbox,
        publish=client.deliver,
        on_death=lambda fault: client.set_status(EngineStatus(phase="dead", detail=str(fault))),
        metrics=Metrics(),
    )
    thread = threading.Thread(target=core.run)
    thread.start()
    try:
        yield
    finally:
        client.stop()
        thread.join(timeout=30)
        assert not thread.is_alive()


async def test_client_and_loop_together() -> None:
    inbox = Inbox()
    client = ready_client(inbox)
    requests = [request(str(number), num_prompt=1 + number, max_tokens=12) for number in range(8)]
    with running(FakeRunner(), client, inbox):
        results = await asyncio.gather(*(read(submit(client, each)) for each in requests))
        await client.drain()
    for each, events in zip(requests, results, strict=True):
        token_ids = [
            t for event in events if isinstance(event, TokenOutput) for t in event.token_ids
        ]
        assert tuple(token_ids) == fake_generate(each.prompt_ids, each.sampling)
        assert isinstance(events[-1], RequestFinished)


async def test_a_stream_that_nobody_reads_holds_nobody_up() -> None:
    inbox = Inbox()
    client = ready_client(inbox)
    with running(FakeRunner(), client, inbox):
        submit(client, request("unread", max_tokens=40))
        events = await read(submit(client, request("read", max_tokens=40)))
        await asyncio.wait_for(client.drain(), 10)
    assert isinstance(events[-1], RequestFinished)


async def test_death_reaches_every_reader_and_ends_the_drain() -> None:
    inbox = Inbox()
    client = ready_client(inbox)
    runner = FakeRunner()
    runner.fail_at = {"decode": 3}
    with running(runner, client, inbox):
        streams = client.submit([request(str(number)) for number in range(6)])
        results = await asyncio.gather(*(read(stream) for stream in streams))
        await asyncio.wait_for(client.drain(), 10)
    assert all(isinstance(events[-1], RequestFailed) for events in results)
    assert client.status == EngineStatus(phase="dead", detail="the device failed in decode")

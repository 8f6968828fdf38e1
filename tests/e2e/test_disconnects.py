"""Many clients that leave at once, at any point of their requests."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.e2e.generated import CHAT, COMPLETIONS
from tests.e2e.server import ServerProcess, wait_until
from tests.e2e.unharmed import DEADLINE_S, unharmed
from tests.e2e.wire import Connection, post

pytestmark = pytest.mark.timeout(300)

NUM_CLIENTS = 50
ABORTED = 'jaxserve_request_success_total{finished_reason="abort"}'

Leave = Callable[[Connection, random.Random], Awaitable[None]]


def request(path: str = COMPLETIONS, **fields: Any) -> bytes:
    body = {"prompt": "The sea is", "ignore_eos": True, "max_tokens": 1900, **fields}
    return post(path, json.dumps({k: v for k, v in body.items() if v is not None}).encode())


async def in_mid_stream(connection: Connection, rng: random.Random) -> None:
    await connection.send(request(stream=True, n=rng.randint(1, 3)))
    for _ in range(rng.randint(1, 5)):
        await connection.read_some()


async def in_a_chat_with_options(connection: Connection, rng: random.Random) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    options = {"logprobs": True, "top_logprobs": 20, "frequency_penalty": 1, "seed": 3}
    await connection.send(
        request(CHAT, prompt=None, messages=messages, stream=rng.random() < 0.5, **options)
    )
    await asyncio.sleep(rng.random() * 0.3)


async def while_queued(connection: Connection, rng: random.Random) -> None:
    await connection.send(request(stream=True, n=16, priority=1 << 30))
    await asyncio.sleep(rng.random() * 0.3)


async def in_mid_prefill(connection: Connection, rng: random.Random) -> None:
    prompt = [rng.randrange(200, 1000) for _ in range(2000)]
    await connection.send(request(prompt=prompt, max_tokens=40, stream=rng.random() < 0.5))
    await asyncio.sleep(rng.random() * 0.1)


async def while_the_prompt_is_scored(connection: Connection, rng: random.Random) -> None:
    prompt = [rng.randrange(200, 1000) for _ in range(1000)]
    await connection.send(request(prompt=prompt, max_tokens=40, prompt_logprobs=5))
    await asyncio.sleep(rng.random() * 0.2)


async def unstreamed(connection: Connection, rng: random.Random) -> None:
    await connection.send(request(n=12))
    await asyncio.sleep(rng.random() * 0.3)


async def at_once(connection: Connection, rng: random.Random) -> None:
    await connection.send(request(stream=rng.random() < 0.5))


async def before_the_body_ends(connection: Connection, rng: random.Random) -> None:
    data = request()
    await connection.send(data[: rng.randrange(len(data))])


async def with_more_sent_behind(connection: Connection, rng: random.Random) -> None:
    await connection.send(request() * 4)
    await asyncio.sleep(rng.random() * 0.1)


LEAVES: list[Leave] = [
    in_mid_stream,
    in_a_chat_with_options,
    while_queued,
    in_mid_prefill,
    while_the_prompt_is_scored,
    unstreamed,
    at_once,
    before_the_body_ends,
    with_more_sent_behind,
]


async def storm(server: ServerProcess, leaves: list[Leave], seed: int) -> None:
    """Let fifty clients come at once and each leave in one of these ways, closing or resetting."""

    async def come_and_go(i: int) -> None:
        rng = random.Random(f"{seed} {i}")
        async with asyncio.timeout(DEADLINE_S), Connection(server.url) as connection:
            await leaves[i % len(leaves)](connection, rng)
            if rng.random() < 0.5:
                connection.reset()

    async with asyncio.TaskGroup() as clients:
        for i in range(NUM_CLIENTS):
            clients.create_task(come_and_go(i))


@pytest.mark.parametrize("leave", LEAVES, ids=lambda leave: leave.__name__)
async def test_clients_that_leave_free_what_they_held(server: ServerProcess, leave: Leave) -> None:
    async with unharmed(server):
        await storm(server, [leave], seed=1)


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_all_kinds_beside_a_stream_that_stays(
    server: ServerProcess, seed: int
) -> None:
    stays = request(max_tokens=60, temperature=0, return_token_ids=True, stream=True)
    aborts = server.metric(ABORTED)
    async with unharmed(server), Connection(server.url) as connection:
        async with asyncio.timeout(5 * DEADLINE_S):
            await connection.send(stays)
            alone = await connection.receive()

            await connection.send(stays)
            await storm(server, LEAVES, seed)
            beside = await connection.receive()

    assert alone is not None
    assert beside is not None
    assert texts(alone.events) == texts(beside.events)
    assert server.metric(ABORTED) > aborts


async def test_the_request_that_runs_ends_though_more_were_sent_behind(
    server: ServerProcess,
) -> None:
    aborts = server.metric(ABORTED)
    async with Connection(server.url) as connection:
        await connection.send(request() * 3)
        running = "jaxserve_num_requests_running"
        await asyncio.to_thread(wait_until, lambda: server.metric(running) == 1)

    await asyncio.to_thread(wait_until, lambda: server.metric(running) == 0)
    # Not by having generated all that was asked for; the others never began.
    assert server.metric(ABORTED) == aborts + 1


def texts(events: list[str]) -> tuple[str, list[int]]:
    choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    return "".join(choice["text"] for choice in choices), ids

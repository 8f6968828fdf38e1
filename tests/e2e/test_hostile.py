"""What clients send by mistake or on purpose: the server answers each, and keeps nothing of it."""

import asyncio
import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from tests.e2e.generated import COMPLETIONS, Generated, Generator
from tests.e2e.server import ServerProcess
from tests.e2e.unharmed import DEADLINE_S, GOOD, good_choice, unharmed
from tests.e2e.wire import Connection, Reply, post

pytestmark = pytest.mark.timeout(600)

NUM_GENERATED = 8_000
NUM_WORKERS = 16
ERROR_CODES = {
    400: {
        *("invalid_value", "invalid_type", "invalid_json", "missing_required_parameter"),
        *("unknown_parameter", "unsupported_parameter", "context_length_exceeded"),
        *("invalid_schema", "unsupported_schema"),
    },
    404: {"model_not_found"},
}


def check(request: Generated, reply: Reply) -> None:
    """Check an answer's form: an error's, a stream's or a whole answer's."""
    assert "x-request-id" in reply.headers
    if reply.status != 200:
        error = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] in ERROR_CODES[reply.status], error
        assert error["message"]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        *events, end = reply.events
        assert end == "[DONE]"
        assert all("choices" in json.loads(event) for event in events)
    elif "completions" in request.path and "render" not in request.path:
        answer = reply.json()
        reasons = {choice["finish_reason"] for choice in answer["choices"]}
        assert reasons <= {"stop", "length", "tool_calls"}
        assert answer["usage"]["completion_tokens"] >= 0
    else:
        assert reply.json()


async def test_generated_requests_are_answered_or_refused(server: ServerProcess) -> None:
    generator = Generator(seed=20261130)
    requests = iter([generator.request() for _ in range(NUM_GENERATED)])
    statuses, codes = Counter[int](), Counter[str]()

    async def work() -> None:
        async with Connection(server.url) as connection:
            for request in requests:
                async with asyncio.timeout(DEADLINE_S):
                    reply = await connection.post(request.path, request.body)
                assert reply is not None, request
                try:
                    check(request, reply)
                except Exception as fault:
                    fault.add_note(f"{request.path} {request.body[:2000]!r}: {reply}"[:6000])
                    raise
                statuses[reply.status] += 1
                if reply.status != 200:
                    codes[reply.json()["error"]["code"]] += 1

    async with unharmed(server), asyncio.TaskGroup() as workers:
        for _ in range(NUM_WORKERS):
            workers.create_task(work())

    assert statuses.total() == NUM_GENERATED
    assert statuses.keys() <= {200, 400, 404}
    assert statuses[200] >= 0.3 * NUM_GENERATED
    # The generator still reaches every kind of refusal.
    assert codes.keys() == ERROR_CODES[400] | ERROR_CODES[404]


async def test_damaged_bytes_are_answered_or_dropped(server: ServerProcess) -> None:
    rng = random.Random(20261130)
    body = json.dumps(GOOD).encode()
    sound = [
        post(COMPLETIONS, body),
        post(COMPLETIONS, b'{"prompt": "Rain", "max_tokens": 4, "stream": true}'),
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n10\r\n{"prompt": "one"\r\n1\r\n}\r\n0\r\n\r\n',
    ]
    damaged = iter(
        [damage(rng, b"".join(rng.choices(sound, k=rng.randint(1, 3)))) for _ in range(1000)]
    )
    statuses = Counter[int]()

    async def work() -> None:
        for data in damaged:
            async with asyncio.timeout(DEADLINE_S), Connection(server.url) as connection:
                received = await exchange(connection, data)
            statuses.update(map(int, re.findall(rb"HTTP/1\.1 (\d{3}) ", received)))

    async with unharmed(server), asyncio.TaskGroup() as workers:
        for _ in range(NUM_WORKERS):
            workers.create_task(work())

    # A damaged Transfer-Encoding is a coding that is not implemented.
    assert statuses.keys() <= {100, 200, 400, 404, 405, 414, 415, 431, 501}
    assert statuses[400] > 100


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change a few bytes, lines or both, mostly of the head."""
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(data)), rng.randint(1, 8)
        lines = data.split(b"\r\n")
        line = rng.randrange(len(lines))
        damaged = (
            data[:at] + rng.randbytes(size) + data[at:],
            data[:at] + data[at + size :],
            data[: at + 1],
            b"\r\n".join([*lines[:line], rng.choice(BAD_LINES), *lines[line:]]),
            b"\r\n".join([*lines[:line], *lines[line + 1 :]]),
            b"\r\n".join([*lines[: line + 1], *lines[line:]]),
            data.replace(b"\r\n", b"\n"),
            data.replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2", b"X"))),
            rng.randbytes(rng.randint(1, 200)) + data,
        )
        data = rng.choice(damaged) or b"\r\n"
    return data


BAD_LINES = (
    *(b"Content-Length: 0", b"Content-Length: 99999999999999999999", b"Content-Length: -1"),
    *(b"Content-Length: 5, 6", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"),
    *(b"Connection: close", b"Connection: upgrade", b"Upgrade: websocket", b"Expect: 100-continue"),
    *(b"Content-Type: text/plain", b"Content-Encoding: gzip", b" folded: line", b"no colon"),
    *(b": no name", b"X-Request-Id: " + b"x" * 300, b"X-Request-Id: \xff\xfe", b"X\x00Y: 1"),
    *(b"Host: [", b"X: " + b"y" * 3000, b"ffffffffffffffffffff", b"0", b"-1", b"2;extension=1"),
)


async def exchange(connection: Connection, data: bytes) -> bytes:
    """Send bytes and the end of what is sent; return all that comes until the peer ends it."""
    received = bytearray()
    try:
        await connection.send(data)
        # Room for an answer: the end cancels what runs.
        await asyncio.sleep(0.02)
        await connection.end_sending()
        while some := await connection.read_some():
            received += some
    except ConnectionError:
        pass  # reset, as it may be where bytes came that nobody wanted
    return bytes(received)


async def test_requests_sent_at_once_are_answered_in_order(server: ServerProcess) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "Rain", "max_tokens": n, "temperature": 0, "return_token_ids": True}
        for n in (1, 5, 2, 0, 3, 1)
    ]
    requests = [post(COMPLETIONS, json.dumps(body).encode()) for body in bodies]
    async with unharmed(server), Connection(server.url) as connection:
        async with asyncio.timeout(DEADLINE_S):
            await connection.send(b"".join(requests))
            replies = [await connection.receive() for _ in requests]

    told = [reply.json() for reply in replies if reply is not None]
    lengths = [len(body["choices"][0]["token_ids"]) if "choices" in body else 0 for body in told]
    assert lengths == [body["max_tokens"] for body in bodies]


async def test_a_body_in_chunks_of_any_size_is_the_same_body(server: ServerProcess) -> None:
    rng = random.Random(1)
    body = json.dumps(GOOD).encode()
    expected = await good_choice(server)
    async with unharmed(server), Connection(server.url) as connection:
        for _ in range(20):
            cuts = sorted(rng.sample(range(1, len(body)), 5))
            parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
            async with asyncio.timeout(DEADLINE_S):
                await connection.send(
                    b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n"
                )
                for part in parts:
                    await connection.send(b"%x;x=y\r\n%s\r\n" % (len(part), part))
                    await asyncio.sleep(0)
                await connection.send(b"0\r\nX-Trailer: 1\r\n\r\n")
                reply = await connection.receive()
            assert reply is not None
            assert reply.json()["choices"] == expected


async def test_connections_that_stall_hold_nobody_up(server: ServerProcess) -> None:
    request = post(COMPLETIONS, json.dumps(GOOD).encode())
    stalled = [Connection(server.url) for _ in range(100)]
    async with unharmed(server):
        for i, connection in enumerate(stalled):
            await connection.open()
            await connection.send(request[: i * len(request) // len(stalled)])

        await good_choice(server)

        for connection in stalled:
            connection.close()


async def test_a_full_queue_refuses_and_empties(server: ServerProcess) -> None:
    # Ten times more sequences than the queue takes, at once.
    body = {"prompt": "Rain", "max_tokens": 1, "n": 128, "ignore_eos": True}
    data = json.dumps(body).encode()
    replies: list[Reply | None] = []

    async def overload() -> None:
        async with Connection(server.url) as connection, asyncio.timeout(5 * DEADLINE_S):
            replies.append(await connection.post(COMPLETIONS, data))

    async with unharmed(server), asyncio.TaskGroup() as tasks:
        for _ in range(80):
            tasks.create_task(overload())

    statuses = Counter(reply.status for reply in replies if reply is not None)
    assert statuses.keys() == {200, 429}
    assert statuses.total() == 80
    for reply in replies:
        assert reply is not None
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("path", ["/%1b[31m", "/v1/models/%0a%1b]0;x%07", "/a%0d%0ab", "/%ff%00"])
async def test_a_path_of_control_characters_is_refused(server: ServerProcess, path: str) -> None:
    async with unharmed(server), Connection(server.url) as connection:
        await connection.send(f"GET {path} HTTP/1.1\r\nHost: [\r\n\r\n".encode())
        reply = await connection.receive()

    assert reply is not None
    assert reply.status == 404


@pytest.mark.parametrize("name", ["a\r\nx: y", "\b", "ä", "a b", "\x00"])
async def test_a_request_id_that_no_header_can_carry_is_refused(
    server: ServerProcess, name: str
) -> None:
    async with unharmed(server), Connection(server.url) as connection:
        reply = await connection.post(
            COMPLETIONS, json.dumps({**GOOD, "request_id": name}).encode()
        )

    assert reply is not None
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "request_id"

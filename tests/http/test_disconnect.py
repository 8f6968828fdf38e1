import asyncio

import pytest

from jaxserve.http.served_model import ServedModel
from jaxserve.openai.options import MAX_SEQUENCES
from tests.fake_engine import FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import JSON, get, open_connection, open_post, post

URL = "/v1/completions"
RUNNING = Script(steps=(ids("a"),) * 3, end=None)
QUEUED = Script(end=None)


@pytest.mark.parametrize("n", [1, 3])
async def test_stream_left_after_three_chunks(serve: Serve, n: int) -> None:
    engine = FakeEngine(RUNNING)
    connection = open_post(serve(engine), URL, {"prompt": "hi", "stream": True, "n": n})
    await connection.receive_body(3)
    connection.disconnect()
    await connection.finish()
    assert len(engine.aborted) == n
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("script", [QUEUED, RUNNING])
async def test_left_while_waiting(serve: Serve, stream: bool, n: int, script: Script) -> None:
    engine = FakeEngine(script)
    connection = open_post(serve(engine), URL, {"prompt": "hi", "stream": stream, "n": n})
    await engine.until_submitted(n)
    await asyncio.sleep(0.01)
    connection.disconnect()
    await connection.finish()
    assert len(engine.aborted) == n
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
async def test_gone_before_the_answer_was_begun(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(QUEUED)
    connection = open_post(serve(engine), URL, {"prompt": "hi", "stream": stream})
    connection.disconnect()
    await connection.finish()
    assert not engine.live


async def test_gone_before_the_body_was_complete(serve: Serve) -> None:
    engine = FakeEngine()
    connection = open_connection(serve(engine), "POST", URL, b"", JSON)
    connection.incoming.get_nowait()
    connection.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    connection.disconnect()
    await connection.finish()
    assert connection.status == 0
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_by_the_server(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(QUEUED)
    connection = open_post(serve(engine), URL, {"prompt": "hi", "stream": stream})
    await engine.until_submitted()
    connection.task.cancel()
    await connection.finish()
    # A stream has begun with 200 and breaks off; there is no chunk that says it is whole.
    assert connection.status == (200 if stream else 503)
    assert b"[DONE]" not in connection.body
    assert not engine.live


async def test_fifty_at_once_leave_others_alone(serve: Serve) -> None:
    engine = FakeEngine(*[QUEUED] * 50, Script.say("fine"))
    app = serve(engine)
    left = [open_post(app, URL, {"prompt": "hi", "stream": True}) for _ in range(50)]
    await engine.until_submitted(50)
    other = open_post(app, URL, {"prompt": "hi"})
    for connection in left:
        connection.disconnect()
    await asyncio.gather(*(connection.finish() for connection in left))
    assert (await other.finish()).json["choices"][0]["text"] == "fine"
    assert len(engine.aborted) == 50
    assert not engine.live


async def test_no_task_outlives_its_request(serve: Serve) -> None:
    before = asyncio.all_tasks()
    app = serve(FakeEngine(Script.say("a")))
    for stream in (False, True):
        await post(app, URL, {"prompt": "hi", "n": MAX_SEQUENCES, "stream": stream})
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_left_requests_are_counted_as_such(serve: Serve, model: ServedModel) -> None:
    engine = FakeEngine(QUEUED)
    app = serve(engine)
    connection = open_post(app, URL, {"prompt": "hi"})
    await engine.until_submitted()
    connection.disconnect()
    await connection.finish()
    metrics = (await get(app, "/metrics")).body.decode()
    assert 'endpoint="/v1/completions",status="499"' in metrics

"""scripts/loadtest.py against scripted servers: exact figures on a fake clock, and failures."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts import loadtest
from scripts.loadtest import (
    Client,
    Level,
    Planner,
    Record,
    Settings,
    Trace,
    arrivals_s,
    figures,
    http_session,
    measure,
)

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNKED = STREAM.replace(b"connection: close", b"transfer-encoding: chunked")
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ONE_QUICK_LEVEL = ["--model", "m", "--concurrency", "2", "--requests", "3", "--warmup", "0"]

# What vLLM 0.33.0 writes with --save-detailed, less what docs/loadtest.md names as left out.
VLLM_KEYS = """date endpoint_type backend label model_id num_prompts request_rate burstiness
max_concurrency duration completed failed total_input_tokens total_output_tokens request_throughput
request_goodput output_throughput total_token_throughput input_lens output_lens ttfts itls latencies
start_times errors max_output_tokens_per_s max_concurrent_requests""".split()  # noqa: SIM905


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    chunk = {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Request:
    """One request of the client, and the way to answer it."""

    def __init__(
        self,
        head: str,
        body: Record,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.head = head
        self.body = body
        self._reader = reader
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def client_gone(self) -> None:
        await self._reader.read()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def scripted_server(answer: Callable[[Request], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve HTTP on loopback, a connection for each request; yields the URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0]) if "post" in head else 0
        body = json.loads(await reader.readexactly(length) or b"{}")
        request = Request(head, body, reader, writer)
        await answer(request)
        await request.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def always(data: bytes, requests: list[Request] | None = None) -> Callable[[Request], Any]:
    """Answer each request with these bytes, and note it."""

    async def answer(request: Request) -> None:
        if requests is not None:
            requests.append(request)
        await request.write(data)

    return answer


async def run_main(*flags: str) -> int:
    return await asyncio.to_thread(loadtest.main, flags)


class Clock:
    """Stands still until a test moves it; counts how often it was read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reads = 0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        self.reads += 1
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s


# Figures


def trace(start_s: float, chunks_s: Sequence[float], tokens: tuple[int, int], **more: Any) -> Trace:
    result = Trace(start_s, chunks_s=list(chunks_s), **more)
    result.input_tokens, result.output_tokens = tokens
    return result


TRACES = (
    trace(0.0, [0.5, 0.625, 1.0], (10, 3)),
    trace(0.125, [1.125, 1.375], (20, 5), cached_tokens=15),  # more than one token a chunk
    trace(0.25, [0.5], (30, 1)),
    trace(0.375, [0.75], (40, 7), error="cut"),
)


def test_figures_are_those_of_vllm() -> None:
    result = figures(TRACES, 0.0, 2.0, [("ttft", 600), ("tpot", 240)])
    # By calculate_metrics of vLLM 0.33.0, given the same requests.
    expected = {
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 60,
        "total_output_tokens": 9,
        "request_throughput": 1.5,
        "request_goodput": 0.5,
        "output_throughput": 4.5,
        "total_token_throughput": 34.5,
        "mean_ttft_ms": 583.3333333333334,
        "median_ttft_ms": 500.0,
        "std_ttft_ms": 311.80478223116177,
        "p50_ttft_ms": 500.0,
        "p90_ttft_ms": 900.0,
        "p99_ttft_ms": 990.0,
        "mean_tpot_ms": 156.25,
        "median_tpot_ms": 156.25,
        "std_tpot_ms": 93.75,
        "p50_tpot_ms": 156.25,
        "p90_tpot_ms": 231.25,
        "p99_tpot_ms": 248.125,
        "mean_itl_ms": 250.0,
        "median_itl_ms": 250.0,
        "std_itl_ms": 102.06207261596576,
        "p50_itl_ms": 250.0,
        "p90_itl_ms": 350.0,
        "p99_itl_ms": 372.5,
        "mean_e2el_ms": 833.3333333333334,
        "median_e2el_ms": 1000.0,
        "std_e2el_ms": 424.9182927993987,
        "p50_e2el_ms": 1000.0,
        "p90_e2el_ms": 1200.0,
        "p99_e2el_ms": 1245.0,
        "max_output_tokens_per_s": 3.0,
        "max_concurrent_requests": 3,
    }
    assert result["output_lens"] == [3, 5, 1, 0]
    assert {key: result[key] for key in expected} == pytest.approx(expected)


def test_own_figures() -> None:
    result = figures(TRACES, 0.0, 2.0, [])
    assert result["output_throughput_per_stream"] == pytest.approx(1000 / 156.25)
    assert result["total_cached_tokens"] == 15
    assert result["cached_share"] == 0.25
    assert result["max_itl_ms"] == 375.0
    assert result["request_goodput"] is None


@pytest.mark.parametrize(
    ("goodput", "num_good"),
    [
        ([("ttft", 500)], 2),  # the limit itself is kept
        ([("ttft", 499)], 1),
        ([("e2el", 1000)], 2),
        ([("tpot", 62)], 1),  # one token has no TPOT to exceed
        ([("ttft", 500), ("tpot", 100)], 1),
    ],
)
def test_goodput_counts_what_keeps_every_limit(goodput: Any, num_good: int) -> None:
    assert figures(TRACES, 0.0, 1.0, goodput)["request_goodput"] == num_good


def test_figures_of_nothing_completed() -> None:
    result = figures([trace(0.0, [], (4, 0), error="refused")], 0.0, 0.0, [])
    assert (result["completed"], result["failed"]) == (0, 1)
    assert result["output_throughput"] == result["mean_ttft_ms"] == result["max_itl_ms"] == 0.0
    assert result["cached_share"] is None


def test_without_usage_chunks_are_tokens() -> None:
    assert Trace(0.0, chunks_s=[1.0, 2.0, 4.0]).output_len == 3


# A stream, as read


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    stream = (
        b": heartbeat\n\n" + TOKEN + b'event: x\ndata:{"choices":[{"delta":{"content":"b"}}]}\n\n'
    )
    stream = (stream + usage(5, 2, 1) + DONE).replace(b"\n", b"\r\n")

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    read = Trace(0.0)
    await read.read(parts(), Clock())
    assert (read.text, len(read.chunks_s), read.error) == ("ab", 2, "")
    assert (read.input_tokens, read.output_tokens, read.cached_tokens) == (5, 2, 1)


async def test_times_of_a_level_on_a_scripted_server() -> None:
    clock = Clock()
    arrived: list[asyncio.Future[Request]] = []

    async def answer(request: Request) -> None:
        next(future for future in arrived if not future.done()).set_result(request)
        await request.client_gone()

    # Two streams, three requests: the third begins when the first has ended, at 1.5.
    timeline = [
        (0.0, 1, b": both are there\n\n"),
        (0.5, 0, TOKEN),
        (1.0, 1, TOKEN),
        (1.25, 0, TOKEN),
        (1.5, 0, usage(10, 2, 4) + DONE),
        (2.0, 2, TOKEN),
        (2.25, 1, TOKEN),
        (2.5, 1, TOKEN),
        (2.75, 1, usage(20, 6) + DONE),
        (3.0, 2, usage(30, 1) + DONE),
    ]

    async def conduct() -> None:
        for at_s, number, data in timeline:
            request = await arrived[number]
            if number not in opened:
                opened.add(number)
                await request.write(STREAM)
            clock.now_s, reads = at_s, clock.reads
            await request.write(data)
            while clock.reads == reads:  # noqa: ASYNC110 - until the client has read it
                await asyncio.sleep(0)
            if data.endswith(DONE):
                await request.close()

    opened: set[int] = set()
    arrived += [asyncio.get_running_loop().create_future() for _ in range(3)]
    async with scripted_server(answer) as url, http_session(None) as http:
        settings = Settings(base_url=url, model="m", requests=3, warmup=0, input_len=8)
        client = Client(settings=settings, http=http, clock=clock, sleep=clock.sleep)
        result, _ = await asyncio.gather(measure(client, Level(concurrency=2)), conduct())

    assert result["errors"] == ["", "", ""]
    assert result["ttfts"] == [0.5, 1.0, 0.5]
    assert result["itls"] == [[0.75], [1.25, 0.25], []]
    assert result["latencies"] == [1.25, 2.5, 0.5]
    assert result["start_times"] == [0.0, 0.0, 1.5]
    assert result["input_lens"] == [10, 20, 30]
    assert result["output_lens"] == [2, 6, 1]
    assert result["duration"] == 3.0
    assert result["output_throughput"] == 3.0
    assert result["mean_tpot_ms"] == pytest.approx((750 + 300) / 2)
    assert result["cached_share"] == pytest.approx(4 / 60)
    assert result["max_itl_ms"] == 1250.0
    assert result["max_concurrent_requests"] == 2


# What is sent


def plan(level: str = "level 1", index: int = 0, **settings: Any) -> loadtest.Session:
    planner = Planner(settings=Settings(model="m", seed=1, **settings), name=level)
    return planner.session(index)


def test_lengths_vary_within_their_ratio() -> None:
    turns = [plan(index=i, input_len=100, output_len=10).turns[0] for i in range(200)]
    lengths = {len(turn.prompt) for turn in turns}
    assert lengths == {turn.num_tokens for turn in turns}
    assert 50 <= min(lengths) < 60 < 140 < max(lengths) <= 150
    assert {turn.output_len for turn in turns} == set(range(5, 16))
    assert {plan(index=i, input_len=9, range_ratio=0.0).turns[0].num_tokens for i in (0, 1)} == {9}


def test_ids_come_from_their_range() -> None:
    prompt = plan(id_range=(3, 5), input_len=100).turns[0].prompt
    assert set(prompt) == {3, 4, 5}


def test_words_are_as_many_as_tokens() -> None:
    turn = plan(prompt="words").turns[0]
    assert isinstance(turn.prompt, str)
    assert len(turn.prompt.split()) == turn.num_tokens


def test_prompts_repeat_by_seed_alone() -> None:
    assert plan() == plan()
    assert plan() != plan(index=1)
    assert plan() != plan("level 2")
    assert plan() != plan("warm-up 1")


def test_prefixes_are_shared_by_turns_and_by_levels() -> None:
    shape: Record = {"mode": "prefix", "prefix_len": 50, "num_prefixes": 2}
    first, second, third = (plan(index=i, **shape).turns[0].prompt for i in range(3))
    other = plan("level 2", **shape).turns[0].prompt
    assert first[:50] == third[:50] == other[:50] != second[:50]
    assert len({tuple(prompt[50:60]) for prompt in (first, second, third, other)}) == 4


def test_arrivals_keep_their_rate() -> None:
    times_s = arrivals_s(7, 4.0, 100)
    assert times_s[-1] == pytest.approx(25.0)
    assert times_s == sorted(times_s)
    assert len({round(b - a, 6) for a, b in pairwise(times_s)}) > 50


async def test_an_open_loop_sends_when_they_arrive() -> None:
    clock, requests = Clock(), list[Request]()
    async with (
        scripted_server(always(STREAM + TOKEN + DONE, requests)) as url,
        http_session(None) as http,
    ):
        settings = Settings(base_url=url, model="m", requests=5, warmup=0, seed=3)
        client = Client(settings=settings, http=http, clock=clock, sleep=clock.sleep)
        result = await measure(client, Level(rate=2.0))
    assert len(requests) == result["completed"] == 5
    assert clock.slept_s[0] == arrivals_s(3, 2.0, 5)[0]
    assert sum(clock.slept_s) == pytest.approx(2.5)
    assert (result["request_rate"], result["max_concurrency"]) == (2.0, None)


async def test_a_conversation_grows_by_answers_and_results() -> None:
    requests: list[Request] = []
    token = b'data: {"choices":[{"delta":{"content":"answer"}}]}\n\n'
    clock = Clock()
    async with (
        scripted_server(always(STREAM + token + usage(9, 3) + DONE, requests)) as url,
        http_session(None) as http,
    ):
        settings = Settings(
            base_url=url, model="m", mode="agents", turns=3, tool_len=40, think_time_s=2.0, seed=1
        )
        client = Client(settings=settings, http=http, clock=clock, sleep=clock.sleep)
        result = await measure(client, Level(concurrency=1))

    warmup, *turns = requests
    assert warmup.body["max_tokens"] == loadtest.WARMUP_TOKENS
    assert all("post /chat/completions" in request.head for request in turns)
    first, second, third = (request.body["messages"] for request in turns)
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "answer"}
    assert third[:4] == second
    assert 20 <= len(third[5]["content"].split()) <= 60
    assert warmup.body["messages"][0] == first[0]
    assert warmup.body["messages"][1] != first[1]
    assert len(clock.slept_s) == 2
    assert all(1.0 <= slept_s <= 3.0 for slept_s in clock.slept_s)
    assert (result["num_prompts"], result["completed"], result["turns"]) == (3, 3, [0, 1, 2])


async def test_a_conversation_ends_where_a_request_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "run.json"
    async with scripted_server(always(STREAM + TOKEN)) as url:
        flags = ["--url", url, *ONE_QUICK_LEVEL, "--mode", "agents", "--turns", "4"]
        assert await run_main(*flags, "--save", str(save)) == 1
    (level,) = json.loads(save.read_bytes())
    assert (level["num_prompts"], level["failed"], level["not_sent"]) == (12, 3, 9)
    assert "9 turns not sent" in capsys.readouterr().err


async def test_requests_carry_their_fields() -> None:
    requests: list[Request] = []
    async with scripted_server(always(STREAM + TOKEN + DONE, requests)) as url:
        flags = ["--url", url + "/v1/", *ONE_QUICK_LEVEL, "--api-key", "sesame"]
        extra = ["--extra-body", '{"top_k":5,"temperature":1}', "--no-ignore-eos"]
        assert await run_main(*flags, *extra, "--prompt", "chat") == 0
        assert await run_main(*flags, "--prompt", "words") == 0
    chat, words = requests[0], requests[3]
    assert chat.head.startswith("post /v1/chat/completions ")
    assert "authorization: bearer sesame" in chat.head
    assert chat.body["messages"][0]["role"] == "user"
    assert (chat.body["top_k"], chat.body["temperature"]) == (5, 1)
    assert "ignore_eos" not in chat.body
    assert words.head.startswith("post /v1/completions ")
    assert words.body["model"] == "m"
    assert isinstance(words.body["prompt"], str)
    assert (words.body["stream"], words.body["ignore_eos"]) == (True, True)
    assert words.body["stream_options"] == {"include_usage": True}


# The command


async def test_command_sweeps_saves_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = b'{"data":[{"id":"org/served"}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(models)
    requests: list[Request] = []

    async def answer(request: Request) -> None:
        is_get = request.head.startswith("get /v1/models ")
        stream = STREAM + TOKEN + TOKEN + usage(16, 2, 4) + DONE
        await always(head + models if is_get else stream, requests)(request)

    first, second, image = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "plot.svg"
    async with scripted_server(answer) as url:
        flags = ["--url", url, "--concurrency", "1,3", "--goodput", "ttft:60000", "e2el:60000"]
        assert await run_main(*flags, "--save", str(first), "--label", "before") == 0
        drawn = ["--plot", str(image), "--compare", str(first)]
        assert await run_main(*flags, "--save", str(second), *drawn) == 0

    assert requests[1].body["model"] == "org/served"
    one, three = json.loads(second.read_bytes())
    assert [level["max_concurrency"] for level in (one, three)] == [1, 3]
    assert [level["completed"] for level in (one, three)] == [8, 12]
    assert one["request_goodput"] == one["request_throughput"]
    assert set(VLLM_KEYS) <= set(one)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p90", "p99"):
            assert isinstance(one[f"{statistic}_{metric}_ms"], float)
    assert one["settings"]["input_len"] == 1024
    assert "api_key" not in one["settings"]
    printed = capsys.readouterr()
    assert "|     3 |        12 |      0 |" in printed.out
    assert "|  E2E |" in printed.out
    assert "3: 12 completed, 0 failed" in printed.err
    svg = image.read_text()
    assert svg.count("<svg") == 1
    assert "before" in svg
    assert "org/served" in svg


ERROR = b'{"error":{"message":"out of pages","type":"server_error"}}'


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 500 Oh\r\nconnection: close\r\n\r\n" + ERROR, "HTTP 500: out of pages"),
        (b"HTTP/1.1 502 Oh\r\nconnection: close\r\n\r\nno upstream", "HTTP 502: no upstream"),
        (CHUNKED + b"%x\r\n" % len(TOKEN) + TOKEN + b"\r\n", "ClientPayloadError: "),
        (STREAM + TOKEN, "the stream ended after 1 chunks, without [DONE]"),
        (STREAM + TOKEN + b"data: " + ERROR + b"\n\n" + DONE, "error event: out of pages"),
        (STREAM + usage(4, 0) + DONE, "the stream ended without a token"),
        (STREAM + b"data: <html>\n\n", "an event that is no JSON object: "),
        (b"", "ServerDisconnectedError: "),
    ],
    ids=["500", "502", "cut", "no-end", "error-event", "no-token", "no-json", "hang-up"],
)
async def test_what_fails_is_counted_and_named(
    data: bytes, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "run.json"
    answers = iter([STREAM + TOKEN + usage(4, 1) + DONE, data, data])

    async def answer(request: Request) -> None:
        await always(next(answers))(request)

    async with scripted_server(answer) as url:
        assert await run_main("--url", url, *ONE_QUICK_LEVEL, "--save", str(save)) == 1
    (level,) = json.loads(save.read_bytes())
    assert (level["completed"], level["failed"]) == (1, 2)
    assert level["total_output_tokens"] == 1
    assert sorted(level["errors"])[0] == ""
    assert all(text.startswith(error) for text in level["errors"] if text)
    assert f"at 2: 2 × {error}" in capsys.readouterr().err


async def test_a_request_without_end_fails(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: Request) -> None:
        await request.write(STREAM + TOKEN)
        await request.client_gone()

    async with scripted_server(answer) as url:
        assert await run_main("--url", url, *ONE_QUICK_LEVEL, "--timeout-s", "0.05") == 1
    assert "no end within 0.05 s" in capsys.readouterr().err


async def test_a_failed_warm_up_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([STREAM, STREAM + TOKEN + DONE])

    async def answer(request: Request) -> None:
        await always(next(answers))(request)

    async with scripted_server(answer) as url:
        flags = ["--url", url, "--model", "m", "--concurrency", "1", "--requests", "1"]
        assert await run_main(*flags) == 1
    assert "1 × warm-up: the stream ended" in capsys.readouterr().err


async def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    async with scripted_server(always(b"")) as url:
        pass
    assert await run_main("--url", url) == 1
    assert url + "/v1/models: Cannot connect" in capsys.readouterr().err
    # The sweep ends with its first level.
    assert await run_main("--url", url, "--model", "m") == 1
    printed = capsys.readouterr().err
    assert "8 × ClientConnectorError: Cannot connect" in printed
    assert "at 2:" not in printed


async def test_a_server_that_lists_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    listing = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b'{"data":[]}'
    async with scripted_server(always(listing)) as url:
        assert await run_main("--url", url) == 1
    assert "lists no model; name one with --model" in capsys.readouterr().err


def test_an_interrupted_run_shows_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def sweep(settings: Settings, key: str | None, finish: Callable[[Record], None]) -> None:
        level = Level(concurrency=1)
        none_failed = figures(TRACES[:3], 0.0, 2.0, [])
        ours = {"not_sent": 0, "warmup_errors": [], "client_cpu_share": 0.9}
        finish({**loadtest.header(settings, level, 3), **none_failed, **ours})
        raise KeyboardInterrupt

    monkeypatch.setattr(loadtest, "sweep", sweep)
    assert loadtest.main(["--model", "m", "--concurrency", "1,2"]) == 1
    printed = capsys.readouterr()
    assert "|     1 |         3 |      0 |        1.5 |   4.5 |" in printed.out
    assert "this client was busy 90% of a core" in printed.err
    assert "interrupted" in printed.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "1,0"],
        ["--rate", "-1"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--id-range", "9:1"],
        ["--range-ratio", "1.5"],
        ["--turns", "0"],
        ["--extra-body", "[1]"],
        ["--plot", "figure.txt"],
        ["--compare", "run.json"],
    ],
    ids=lambda flags: flags[0][2:],
)
def test_command_refuses_what_has_no_meaning(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        loadtest.main(flags)
    assert flags[0] in capsys.readouterr().err


def test_command_refuses_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        loadtest.main(["--save", str(tmp_path / "none" / "run.json")])
    assert "none is no folder" in capsys.readouterr().err

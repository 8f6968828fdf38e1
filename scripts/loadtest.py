#!/usr/bin/env python3
"""Load an OpenAI-compatible server with streaming requests and print what its clients see.

    random   prompts of random lengths that share nothing, to /v1/completions
    prefix   the same behind one of a few long prefixes
    agents   conversations over /v1/chat/completions: an answer, a pause, a tool's result, again

A level is a number of streams (`--concurrency`) or an arrival rate (`--rate`). It imports nothing
of jaxserve, so that it measures every server alike. docs/loadtest.md defines each figure.
"""

import asyncio
import json
import os
import random
import sys
import time
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    RawDescriptionHelpFormatter,
)
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from tqdm import tqdm

MODES = ("random", "prefix", "agents")
PROMPTS = ("ids", "words", "chat")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99")
PLOT_FORMATS = (".svg", ".png", ".pdf")
REQUESTS_AT_A_RATE = 32
WARMUP_STREAMS_AT_A_RATE = 4
WARMUP_TOKENS = 16  # of each warm-up answer, at most
KEEPALIVE_S = 4.0  # servers drop idle connections after 5 s or later; a drop in use is a failure
BUSY_CLIENT = 0.8  # of a core: from here on, figures may be the client's rather than the server's
# One token each in most vocabularies, so that N words make a prompt of about N tokens.
WORDS = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye job
word business issue side kind head house service friend father power hour game line end member law
car city name team minute idea body back parent face level office door person art war party result
change morning reason girl moment air teacher force""".split()  # noqa: SIM905 - a line, not a word

Record = dict[str, Any]
"""A JSON object: a request's body, or a level's figures."""


def flag(default: object, text: str, **options: object) -> Any:
    """Make a field of `Settings`, with what argparse needs beside its type."""
    return field(default=default, metadata={"help": text, **options})


def at_least(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers that are no less."""

    def read(text: str) -> int:
        if int(text) < least:
            raise ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return read


def numbers(kind: type[Any]) -> Callable[[str], tuple[Any, ...]]:
    """Make a reader of "1,2,4"."""

    def read(text: str) -> tuple[Any, ...]:
        values = tuple(map(kind, text.split(",")))
        if not min(values) > 0:
            raise ArgumentTypeError(f"{text} has a number that is not positive")
        return values

    return read


def share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise ArgumentTypeError(f"{text} is not within 0 and 1")
    return float(text)


def json_object(text: str) -> Record:
    if not isinstance(value := json.loads(text), dict):
        raise ArgumentTypeError(f"{text} is no JSON object")
    return value


def id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not 0 <= int(first) <= int(last):
        raise ArgumentTypeError(f"{text} is no range")
    return int(first), int(last)


def limit(text: str) -> tuple[str, float]:
    name, _, limit_ms = text.partition(":")
    if name not in GOODPUT_METRICS or not float(limit_ms) >= 0:
        raise ArgumentTypeError(f"{text} is none of {', '.join(GOODPUT_METRICS)} with its ms")
    return name, float(limit_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked of the server: each field is a flag, lengths are in tokens."""

    base_url: str = flag("http://127.0.0.1:8000", "the server, with or without /v1")
    model: str = flag("", "its name in requests; by default the server's first")
    mode: str = flag(MODES[0], "see above", choices=MODES)
    concurrency: tuple[int, ...] = flag(
        (1, 2, 4, 8, 16, 32),
        "levels: streams at a time (1,2,4,8,16,32)",
        type=numbers(int),
        metavar="N,N",
    )
    rate: tuple[float, ...] = flag(
        (), "levels in their place: arrivals a second", type=numbers(float), metavar="R,R"
    )
    requests: int = flag(
        0,
        "of a level, for agents its conversations; by default 4 a stream and 8 at least, for "
        f"agents 1 a stream, at a rate {REQUESTS_AT_A_RATE}",
        type=at_least(1),
    )
    warmup: int = flag(1, "unmeasured requests a stream before each level", type=at_least(0))
    prompt: str = flag(
        PROMPTS[0], "ids or words for completions, or words for chat", choices=PROMPTS
    )
    input_len: int = flag(1024, "of a prompt; agents: of the first message", type=at_least(1))
    output_len: int = flag(128, "of an answer", type=at_least(1))
    range_ratio: float = flag(0.5, "lengths are within 1 ± this of theirs", type=share)
    prefix_len: int = flag(1024, "of a shared prefix; agents: system prompt", type=at_least(1))
    num_prefixes: int = flag(1, "how many prefixes are shared", type=at_least(1))
    turns: int = flag(5, "requests of a conversation", type=at_least(1))
    tool_len: int = flag(256, "of a tool's result", type=at_least(1))
    think_time_s: float = flag(0.5, "before a tool's result, within 1 ± 0.5 of it")
    id_range: tuple[int, int] = flag(
        (1000, 9999), "ids that are ordinary tokens", type=id_range, metavar="FIRST:LAST"
    )
    seed: int | None = flag(None, "by default a new one: no cache then knows a prompt", type=int)
    ignore_eos: bool = flag(
        True, "send ignore_eos, which not all servers know", action=BooleanOptionalAction
    )
    temperature: float = flag(0.0, "of all requests")
    extra_body: Mapping[str, Any] | None = flag(
        None, "further fields", type=json_object, metavar="JSON"
    )
    timeout_s: float = flag(600.0, "after which a request has failed")
    goodput: Sequence[tuple[str, float]] = flag(
        (),
        "count what keeps ttft:MS, tpot:MS, e2el:MS",
        type=limit,
        nargs="+",
        metavar="METRIC:MS",
    )
    label: str | None = flag(None, "the run's name in files and plots", type=str)

    @property
    def chat(self) -> bool:
        return self.mode == "agents" or self.prompt == "chat"

    @property
    def levels(self) -> list["Level"]:
        return [Level(rate=rate) for rate in self.rate] or [*map(Level, self.concurrency)]

    def num_sessions(self, level: "Level") -> int:
        if self.requests or level.concurrency is None:
            return self.requests or REQUESTS_AT_A_RATE
        return level.concurrency if self.mode == "agents" else max(8, 4 * level.concurrency)


@dataclass(frozen=True, slots=True)
class Level:
    """So many streams at a time, or sessions that arrive at so many a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


# One request, as its client sees it


@dataclass(slots=True)
class Trace:
    """What came of one request, and when; times are in seconds of the client's clock."""

    start_s: float
    turn: int = 0
    input_tokens: int = 0  # what was asked for, until the server tells
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunks_s: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0] - self.start_s if self.chunks_s else 0.0

    @property
    def latency_s(self) -> float:
        return self.chunks_s[-1] - self.start_s if self.chunks_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.chunks_s)]

    @property
    def output_len(self) -> int:
        """Tokens by the server's count; without one, its chunks."""
        return 0 if self.error else self.output_tokens or len(self.chunks_s)

    @property
    def tpot_s(self) -> float | None:
        if self.output_len < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)

    def take(self, event: bytes, now_s: float) -> None:
        """Note one event's payload; raises ValueError where it is no JSON object."""
        if event == b"[DONE]":
            self.ended = True
            return
        data = orjson.loads(event)
        if not isinstance(data, dict):
            raise ValueError(f"{data!r} is no object")
        if data.get("error") or data.get("object") == "error":
            self.error = f"error event: {error_message(event)}"
        if choices := data.get("choices"):
            self.chunks_s.append(now_s)
            choice = choices[0]
            self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if usage := data.get("usage"):
            self.input_tokens = usage.get("prompt_tokens", self.input_tokens)
            self.output_tokens = usage.get("completion_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    async def read(self, parts: AsyncIterator[bytes], clock: Callable[[], float]) -> None:
        """Read an event stream, cut anywhere, to its end."""
        rest = b""
        async for part in parts:
            now_s = clock()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self.take(line[5:].strip(), now_s)
        if not self.error and not self.ended:
            self.error = f"the stream ended after {len(self.chunks_s)} chunks, without [DONE]"
        elif not self.error and not self.chunks_s:
            self.error = "the stream ended without a token"


Note = Callable[[Trace], object]
"""Takes each request's trace when it has ended."""


def error_message(body: bytes) -> str:
    """Find the message in an error's body, in OpenAI's form or another."""
    try:
        error = (data := orjson.loads(body)).get("error", data)
        return str(error.get("message", error))
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:200].strip() or "no body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Sends requests to one server; clock and sleep are replaced in tests."""

    settings: Settings
    http: aiohttp.ClientSession
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def send(self, prompt: Record, input_len: int, output_len: int, turn: int = 0) -> Trace:
        """Stream one answer; whatever goes wrong is told by the trace's `error`."""
        settings = self.settings
        body: Record = {"model": settings.model, **prompt, "max_tokens": output_len}
        body |= {"temperature": settings.temperature, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if settings.ignore_eos else {}
        path = "/chat/completions" if settings.chat else "/completions"
        data = orjson.dumps({**body, **(settings.extra_body or {})})
        trace = Trace(self.clock(), turn=turn, input_tokens=input_len)
        try:
            async with (
                asyncio.timeout(settings.timeout_s),
                self.http.post(settings.base_url + path, data=data) as response,
            ):
                if response.status == 200:
                    await trace.read(response.content.iter_any(), self.clock)
                else:
                    trace.error = f"HTTP {response.status}: {error_message(await response.read())}"
        except TimeoutError:
            trace.error = f"no end within {settings.timeout_s:g} s"
        except aiohttp.ClientError as error:
            trace.error = f"{type(error).__name__}: {error}"
        except ValueError as error:
            trace.error = f"an event that is no JSON object: {error}"
        return trace


# What is asked: drawn before a level begins, so that drawing takes no time from its streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: a whole prompt, or what a conversation's user says next."""

    prompt: str | list[int]
    num_tokens: int
    output_len: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Requests that follow one another: one alone, or an agent's conversation."""

    turns: list[Turn]
    system: str = ""

    async def run(self, client: Client, note: Note) -> None:
        """Send one turn after the other; the first that fails is the last."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        num_tokens = 0
        for number, turn in enumerate(self.turns):
            if turn.pause_s:
                await client.sleep(turn.pause_s)
            prompt: Record = {"prompt": turn.prompt}
            if client.settings.chat:
                messages.append({"role": "user", "content": str(turn.prompt)})
                prompt = {"messages": messages}
            num_tokens += turn.num_tokens
            trace = await client.send(prompt, num_tokens, turn.output_len, number)
            note(trace)
            if not trace.ok:
                return
            messages.append({"role": "assistant", "content": trace.text})
            num_tokens += trace.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Draws a level's sessions; the same seed and name give the same ones."""

    settings: Settings
    name: str
    output_limit: int = sys.maxsize

    def session(self, index: int) -> Session:
        rng = random.Random(f"{self.settings.seed}/{self.name}/{index}")
        if self.settings.mode == "agents":
            return self._conversation(rng)
        tokens = self._tokens(rng, self._length(rng, self.settings.input_len))
        if self.settings.mode == "prefix":
            tokens = self._prefix(index % self.settings.num_prefixes) + tokens
        return Session(turns=[self._turn(rng, tokens)])

    def _conversation(self, rng: random.Random) -> Session:
        settings = self.settings
        system = self._prefix(0)
        first = self._turn(rng, self._tokens(rng, self._length(rng, settings.input_len)))
        turns = [replace(first, num_tokens=first.num_tokens + len(system))]
        for _ in range(settings.turns - 1):
            # A tool's result comes as a user's message: the role "tool" wants a call before it.
            result = self._tokens(rng, self._length(rng, settings.tool_len))
            pause_s = settings.think_time_s * rng.uniform(0.5, 1.5)
            turns.append(replace(self._turn(rng, result), pause_s=pause_s))
        return Session(turns=turns, system=" ".join(map(str, system)))

    def _turn(self, rng: random.Random, tokens: Sequence[int | str]) -> Turn:
        output_len = min(self._length(rng, self.settings.output_len), self.output_limit)
        text = " ".join(map(str, tokens))
        ids = [token for token in tokens if isinstance(token, int)]
        return Turn(prompt=ids or text, num_tokens=len(tokens), output_len=output_len)

    def _prefix(self, number: int) -> list[int | str]:
        rng = random.Random(f"{self.settings.seed}/prefix/{number}")  # of the run, not of a level
        return self._tokens(rng, self.settings.prefix_len)

    def _tokens(self, rng: random.Random, count: int) -> list[int | str]:
        settings = self.settings
        if settings.chat or settings.prompt == "words":
            return [*rng.choices(WORDS, k=count)]
        first, last = settings.id_range
        return [*rng.choices(range(first, last + 1), k=count)]

    def _length(self, rng: random.Random, mean: int) -> int:
        """Draw from [mean × (1 − ratio), mean × (1 + ratio)], 1 at least."""
        spread = int(mean * self.settings.range_ratio)
        return max(1, rng.randint(mean - spread, mean + spread))


# A level: sessions side by side


async def run_streams(client: Client, sessions: Sequence[Session], note: Note, count: int) -> None:
    """Keep so many sessions under way until all have run."""
    waiting = iter(sessions)

    async def stream() -> None:
        for session in waiting:
            await session.run(client, note)

    async with asyncio.TaskGroup() as streams:
        for _ in range(count):
            streams.create_task(stream())


async def run_arrivals(
    client: Client, sessions: Sequence[Session], note: Note, rate: float
) -> None:
    """Start sessions when they arrive, however many are under way."""
    times_s = arrivals_s(client.settings.seed, rate, len(sessions))
    start_s = client.clock()
    async with asyncio.TaskGroup() as arrived:
        for session, time_s in zip(sessions, times_s, strict=True):
            await client.sleep(max(0.0, start_s + time_s - client.clock()))
            arrived.create_task(session.run(client, note))


def arrivals_s(seed: int | None, rate: float, count: int) -> list[float]:
    """Draw a Poisson process's arrivals, scaled so that the last comes at `count / rate`."""
    rng = random.Random(f"{seed}/arrivals/{rate}")
    times = [*accumulate(rng.expovariate(rate) for _ in range(count))]
    return [time_s * count / rate / times[-1] for time_s in times]


async def measure(client: Client, level: Level, note: Note = lambda trace: None) -> Record:
    """Warm the server up for a level, run it, and return its figures."""
    settings = client.settings
    streams = level.concurrency or WARMUP_STREAMS_AT_A_RATE
    prefixes = settings.num_prefixes if settings.mode == "prefix" else 0
    planner = Planner(settings=settings, name=f"warm-up {level}", output_limit=WARMUP_TOKENS)
    warmup = [planner.session(i) for i in range(settings.warmup * max(streams, prefixes))]
    warmup = [replace(session, turns=session.turns[:1]) for session in warmup]
    unmeasured: list[Trace] = []
    await run_streams(client, warmup, unmeasured.append, streams)

    planner = Planner(settings=settings, name=f"level {level}")
    sessions = [planner.session(i) for i in range(settings.num_sessions(level))]
    planned = sum(len(session.turns) for session in sessions)
    traces: list[Trace] = []

    def take(trace: Trace) -> None:
        traces.append(trace)
        note(trace)

    cpu_s, start_s = time.process_time(), client.clock()
    if level.rate is None:
        await run_streams(client, sessions, take, streams)
    else:
        await run_arrivals(client, sessions, take, level.rate)
    duration_s, cpu_s = client.clock() - start_s, time.process_time() - cpu_s
    traces.sort(key=lambda trace: trace.start_s)
    return {
        **header(settings, level, planned),
        **figures(traces, start_s, duration_s, settings.goodput),
        "not_sent": planned - len(traces),
        "warmup_errors": [trace.error for trace in unmeasured if trace.error],
        "client_cpu_share": cpu_s / duration_s if duration_s else 0.0,
    }


# Figures, under the names that `vllm bench serve` gives them; docs/loadtest.md lists our own


def header(settings: Settings, level: Level, num_prompts: int) -> Record:
    backend = "openai-chat" if settings.chat else "openai"
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "endpoint_type": backend,
        "label": settings.label,
        "model_id": settings.model,
        "num_prompts": num_prompts,
        "request_rate": level.rate or "inf",
        "burstiness": 1.0,
        "max_concurrency": level.concurrency,
        "settings": asdict(settings),
    }


def figures(
    traces: Sequence[Trace], start_s: float, duration_s: float, goodput: Sequence[tuple[str, float]]
) -> Record:
    """Figures of a level's requests; times in a key that ends in `_ms` are ms, others seconds."""
    done = [trace for trace in traces if trace.ok]
    total_input = sum(trace.input_tokens for trace in done)
    total_output = sum(trace.output_len for trace in done)
    cached = [trace.cached_tokens for trace in done if trace.cached_tokens is not None]
    itls_s = [itl_s for trace in done for itl_s in trace.itls_s]
    values_s = {
        "ttft": [trace.ttft_s for trace in done],
        "tpot": [tpot_s for trace in done if (tpot_s := trace.tpot_s) is not None],
        "itl": itls_s,
        "e2el": [trace.latency_s for trace in done],
    }
    summaries = [summary(name, values) for name, values in values_s.items()]
    result: Record = {key: value for part in summaries for key, value in part.items()}
    num_good = sum(is_good(trace, goodput) for trace in done)
    per_s = 1 / duration_s if duration_s else 0.0
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) * per_s,
        "request_goodput": num_good * per_s if goodput else None,
        "output_throughput": total_output * per_s,
        "total_token_throughput": (total_input + total_output) * per_s,
        **result,
        "max_output_tokens_per_s": busiest_second(done),
        "max_concurrent_requests": most_at_once(done),
        "output_throughput_per_stream": 1e3 / tpot if (tpot := result["mean_tpot_ms"]) else 0.0,
        "total_cached_tokens": sum(cached) if cached else None,
        "cached_share": sum(cached) / total_input if cached and total_input else None,
        "max_itl_ms": max(itls_s, default=0.0) * 1e3,
        "input_lens": [trace.input_tokens for trace in traces],
        "output_lens": [trace.output_len for trace in traces],
        "start_times": [trace.start_s - start_s for trace in traces],
        "ttfts": [trace.ttft_s for trace in traces],
        "itls": [trace.itls_s for trace in traces],
        "latencies": [trace.latency_s for trace in traces],
        "turns": [trace.turn for trace in traces],
        "errors": [trace.error for trace in traces],
    }


def summary(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles (between samples: linear), 0 where there are none."""
    ms = np.asarray(values_s or [0.0]) * 1e3
    result = {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": np.median(ms)}
    result[f"std_{name}_ms"] = ms.std()
    result |= {f"p{p}_{name}_ms": np.percentile(ms, p) for p in (50, 90, 99)}
    return {key: float(value) for key, value in result.items()}


def is_good(trace: Trace, goodput: Sequence[tuple[str, float]]) -> bool:
    """Whether a request kept every limit; one token has no TPOT to exceed."""
    times_s = {"ttft": trace.ttft_s, "tpot": trace.tpot_s or 0.0, "e2el": trace.latency_s}
    return all(times_s[name] <= limit_ms / 1e3 for name, limit_ms in goodput)


def busiest_second(done: Sequence[Trace]) -> float:
    """Count chunks by the second since the first request."""
    start_s = min((trace.start_s for trace in done), default=0.0)
    seconds = Counter(int(at_s - start_s) for trace in done for at_s in trace.chunks_s)
    return float(max(seconds.values(), default=0))


def most_at_once(done: Sequence[Trace]) -> int:
    """Count requests between their start and last chunk."""
    changes = [(trace.start_s, 1) for trace in done]
    changes += [(trace.chunks_s[-1], -1) for trace in done]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


# What is shown


def tables(levels: Sequence[Record]) -> str:
    """Two tables in Markdown: a line a level, and its times."""
    columns = ["level", "completed", "failed", "requests/s", "tok/s", "tok/s a stream"]
    columns += ["goodput/s", "cached", "largest gap ms"]
    rows, times = [], []
    for level in levels:
        keys = ("request_throughput", "output_throughput", "output_throughput_per_stream")
        rates = [level[key] for key in (*keys, "request_goodput")]
        cached = level["cached_share"]
        row = [level_name(level), str(level["completed"]), str(level["failed"]), *map(short, rates)]
        rows.append([*row, "–" if cached is None else f"{cached:.0%}", short(level["max_itl_ms"])])
        for metric, title in METRICS.items():
            values_ms = [level[f"{statistic}_{metric}_ms"] for statistic in STATISTICS]
            shown = [short(value_ms if level["completed"] else None) for value_ms in values_ms]
            times.append([level_name(level), title, *shown])
    return table(columns, rows) + "\n" + table(("level", "ms", *STATISTICS), times)


def level_name(level: Record) -> str:
    return str(level["max_concurrency"] or f"{level['request_rate']:g}/s")


def short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    padded = [[*map(str.rjust, cells, widths)] for cells in lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


def faults(levels: Sequence[Record]) -> list[str]:
    """Name what failed, each message once a level."""
    lines = []
    for level in levels:
        warmup = [f"warm-up: {error}" for error in level["warmup_errors"]]
        errors = Counter([*filter(None, level["errors"]), *warmup])
        lines += [f"at {level_name(level)}: {n} × {error}" for error, n in errors.most_common()]
        if level["not_sent"]:
            lines.append(f"at {level_name(level)}: {level['not_sent']} turns not sent after these")
    return lines


def plot(file: Path, runs: Sequence[tuple[str, Sequence[Record]]]) -> None:
    """Draw throughput, TTFT and TPOT by level, a colour a run; the file's suffix is its format."""
    from matplotlib.figure import Figure  # slow to import, and a run without a plot needs none

    key = "request_rate" if runs[-1][1][0]["max_concurrency"] is None else "max_concurrency"
    panels = {
        "output tok/s": {"-": "output_throughput"},
        "TTFT, ms: median, p99 dashed": {"-": "median_ttft_ms", "--": "p99_ttft_ms"},
        "TPOT, ms: median, p99 dashed": {"-": "median_tpot_ms", "--": "p99_tpot_ms"},
    }
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.set(title=title, xlabel="requests/s" if key == "request_rate" else "streams")
        axes.set_xscale("log", base=2)
        ticks = set()
        for number, (label, levels) in enumerate(runs):
            # A saved run at rates has no place beside one at streams, nor the other way round.
            drawn = [level for level in levels if level[key] not in (None, "inf")]
            ticks |= {level[key] for level in drawn}
            for style, name in lines.items():
                points = [level[key] for level in drawn], [level[name] for level in drawn]
                legend = label if style == "-" else None
                axes.plot(*points, f"C{number}o{style}", markersize=4, label=legend)
        axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)


# The command


def count(bar: "tqdm[Any]", trace: Trace) -> None:
    bar.update()
    if trace.error:
        bar.set_postfix_str(trace.error[:60])


async def sweep(settings: Settings, api_key: str | None, finish: Callable[[Record], None]) -> None:
    """Run level after level; the last is the first at which nothing was completed."""
    async with http_session(api_key) as http:
        client = Client(settings=settings, http=http)
        for level in settings.levels:
            turns = settings.turns if settings.mode == "agents" else 1
            total = settings.num_sessions(level) * turns
            # None: a bar on a terminal alone.
            with tqdm(
                total=total, desc=f"level {level}", unit="req", disable=None, leave=False
            ) as bar:
                result = await measure(client, level, partial(count, bar))
            finish(result)
            if not result["completed"]:
                return


def http_session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {api_key}"} if api_key else {}
    # No limit of its own on connections: a stream that waited for one would be timed from then.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)


def progress_line(level: Record) -> str:
    line = f"{level_name(level)}: {level['completed']} completed, {level['failed']} failed in "
    line += f"{level['duration']:.1f} s, {level['output_throughput']:.1f} tok/s"
    busy = level["client_cpu_share"]
    if busy > BUSY_CLIENT and level["duration"] > 1:
        line += f"; this client was busy {busy:.0%} of a core, which its figures may show"
    return line


async def first_model(base_url: str, api_key: str | None) -> str:
    """Ask the server for its first model's name; raises ValueError, saying why there is none."""
    url = base_url + "/models"
    try:
        async with http_session(api_key) as http, http.get(url) as response:
            body = await response.read()
            if response.status != 200:
                raise ValueError(f"{url}: HTTP {response.status}: {error_message(body)}")
            return str(orjson.loads(body)["data"][0]["id"])
    except aiohttp.ClientError as error:
        raise ValueError(f"{url}: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{url} lists no model; name one with --model") from error


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for setting in fields(Settings):
        default, options = setting.default, dict(setting.metadata)
        if "choices" not in options and "action" not in options:
            options.setdefault("type", type(default))
            options.setdefault("metavar", "N" if isinstance(default, int) else None)
        if not isinstance(default, bool) and isinstance(default, int | float | str) and default:
            options["help"] += " (%(default)s)"
        names = [f"--{setting.name.replace('_', '-')}"]
        names += ["--url"] if setting.name == "base_url" else []
        parser.add_argument(*names, dest=setting.name, default=default, **options)
    key = os.environ.get("OPENAI_API_KEY")
    parser.add_argument("--api-key", default=key, help="by default that of OPENAI_API_KEY")
    parser.add_argument("--save", type=Path, metavar="FILE", help="JSON: an array, a level each")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"{', '.join(PLOT_FORMATS)}")
    text = "saved runs to draw beside this one"
    parser.add_argument("--compare", type=Path, nargs="+", default=(), metavar="FILE", help=text)
    return parser


def read_flags(argv: Sequence[str] | None) -> Record:
    """Read the flags, and end the process with 2 where they cannot be followed."""
    parser = make_parser()
    flags = vars(parser.parse_args(argv))
    save, image = flags["save"], flags["plot"]
    if image and (image.suffix not in PLOT_FORMATS or not find_spec("matplotlib")):
        parser.error(f"--plot wants matplotlib and a name ending in {', '.join(PLOT_FORMATS)}")
    if flags["compare"] and not image:
        parser.error("--compare wants --plot")
    for file in filter(None, (save, image)):
        if not file.parent.is_dir():  # better known before the run than after it
            parser.error(f"{file.parent} is no folder")
    flags["base_url"] = flags["base_url"].rstrip("/").removesuffix("/v1") + "/v1"
    if flags["seed"] is None:
        flags["seed"] = random.SystemRandom().getrandbits(32)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; return 1 where a request failed, or the server could not be asked."""
    flags = read_flags(argv)
    api_key, save, image, compare = map(flags.pop, ("api_key", "save", "plot", "compare"))
    runs = [(file.stem, json.loads(file.read_bytes())) for file in compare]
    try:
        flags["model"] = flags["model"] or asyncio.run(first_model(flags["base_url"], api_key))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    settings = Settings(**flags)
    levels: list[Record] = []

    def finish(level: Record) -> None:
        levels.append(level)
        if save is not None:
            save.write_bytes(orjson.dumps(levels, option=orjson.OPT_INDENT_2) + b"\n")
        print(progress_line(level), file=sys.stderr, flush=True)

    try:
        asyncio.run(sweep(settings, api_key, finish))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    if not levels:
        return 1
    print(tables(levels), end="")
    if image:
        names = [(old[0]["label"] or name, old) for name, old in runs]
        plot(image, [*names, (settings.label or settings.model, levels)])
    sys.stderr.writelines(f"{line}\n" for line in faults(levels))
    # Fewer levels than asked for: it was interrupted, or a server gave up.
    return int(bool(faults(levels)) or len(levels) < len(settings.levels))


if __name__ == "__main__":
    sys.exit(main())

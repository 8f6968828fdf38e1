#!/usr/bin/env python3
"""Load an OpenAI-compatible server with streaming requests and print what its clients see.

    random   prompts of random lengths that share nothing, to /v1/completions
    prefix   the same behind one of a few long prefixes
    agents   conversations over /v1/chat/completions: an answer, a pause, a tool's result, again

A level is a number of streams (`--concurrency`) or an arrival rate (`--rate`). It imports nothing
of jaxserve, so that it measures every server alike. docs/loadtest.md defines each figure.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from tqdm import tqdm

WARMUP_TOKENS = 16  # of each warm-up answer, at most
WARMUP_STREAMS_AT_A_RATE = 4
KEEPALIVE_S = 4.0  # servers drop idle connections after 5 s or later; a drop in flight is a failure
BUSY_CLIENT = (
    0.8  # from this share of a core on, figures may be the client's rather than the server's
)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99")
# One token each in most vocabularies, so that N words make a prompt of about N tokens.
WORDS = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye job
word business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education""".split()

Record = dict[str, Any]
"""A JSON object: a request's body, or a level's figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the flags set; lengths are in tokens."""

    base_url: str
    model: str
    mode: str = "random"
    prompt: str = "ids"
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    requests: int | None = None
    warmup: int = 1
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.5
    prefix_len: int = 1024
    num_prefixes: int = 1
    turns: int = 5
    tool_len: int = 256
    think_time_s: float = 0.5
    id_range: tuple[int, int] = (1000, 10000)
    seed: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Record = field(default_factory=dict)
    timeout_s: float = 600.0
    goodput: dict[str, float] = field(default_factory=dict)
    label: str | None = None

    @property
    def chat(self) -> bool:
        return self.mode == "agents" or self.prompt == "chat"

    def num_requests(self, concurrency: int | None) -> int:
        """Requests of a level; in the agents mode, its conversations."""
        if self.requests is not None:
            return self.requests
        if concurrency is None:
            return 32
        return concurrency if self.mode == "agents" else max(8, 4 * concurrency)


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
        """Note one event's payload; raises ValueError where it is no JSON."""
        if event == b"[DONE]":
            self.ended = True
            return
        data = orjson.loads(event)
        if "error" in data or data.get("object") == "error":
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
        data = orjson.dumps(body | settings.extra_body)
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
            trace.error = f"an event that is no JSON: {error}"
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

    async def run(self, client: Client, note: Callable[[Trace], None]) -> None:
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

    def _prefix(self, number: int) -> Sequence[int | str]:
        rng = random.Random(f"{self.settings.seed}/prefix/{number}")  # of the run, not of a level
        return self._tokens(rng, self.settings.prefix_len)

    def _tokens(self, rng: random.Random, count: int) -> list[int | str]:
        settings = self.settings
        if settings.chat or settings.prompt == "words":
            return [*rng.choices(WORDS, k=count)]
        return [*rng.choices(range(*settings.id_range), k=count)]

    def _length(self, rng: random.Random, mean: int) -> int:
        """Draw from [mean × (1 − ratio), mean × (1 + ratio)], 1 at least."""
        spread = int(mean * self.settings.range_ratio)
        return max(1, rng.randint(mean - spread, mean + spread))


# A level: sessions side by side


@dataclass(frozen=True, slots=True)
class Level:
    """So many streams at a time, or sessions that arrive at so many a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency}"

    async def run(
        self, client: Client, sessions: Sequence[Session], note: Callable[[Trace], None]
    ) -> None:
        if self.rate is not None:
            await self._run_arrivals(client, sessions, note)
            return
        waiting = iter(sessions)

        async def stream() -> None:
            for session in waiting:
                await session.run(client, note)

        async with asyncio.TaskGroup() as streams:
            for _ in range(self.concurrency or 1):
                streams.create_task(stream())

    async def _run_arrivals(
        self, client: Client, sessions: Sequence[Session], note: Callable[[Trace], None]
    ) -> None:
        assert self.rate is not None  # noqa: S101
        start_s = client.clock()
        async with asyncio.TaskGroup() as arrived:
            for session, at_s in zip(
                sessions, arrivals_s(client.settings.seed, self.rate, len(sessions)), strict=True
            ):
                await client.sleep(max(0.0, start_s + at_s - client.clock()))
                arrived.create_task(session.run(client, note))


def arrivals_s(seed: int, rate: float, count: int) -> list[float]:
    """Draw a Poisson process's arrivals, scaled so that the last comes at `count / rate`."""
    rng = random.Random(f"{seed}/arrivals/{rate}")
    times = [*accumulate(rng.expovariate(rate) for _ in range(count))]
    return [time_s * count / rate / times[-1] for time_s in times]


async def measure(client: Client, level: Level, bar: Any) -> Record:
    """Warm the server up for a level, run it, and return its figures."""
    settings = client.settings
    failures: list[str] = []

    def note_warmup(trace: Trace) -> None:
        failures.extend([f"warm-up: {trace.error}"] if trace.error else [])

    planner = Planner(settings=settings, name=f"warm-up {level}", output_limit=WARMUP_TOKENS)
    streams = level.concurrency or WARMUP_STREAMS_AT_A_RATE
    count = settings.warmup * max(
        streams, settings.num_prefixes if settings.mode == "prefix" else 1
    )
    sessions = [planner.session(index) for index in range(count)]
    await Level(concurrency=streams).run(client, sessions, note_warmup)

    traces: list[Trace] = []

    def note(trace: Trace) -> None:
        traces.append(trace)
        bar.update()

    planner = Planner(settings=settings, name=f"level {level}")
    sessions = [planner.session(i) for i in range(settings.num_requests(level.concurrency))]
    cpu_s, start_s = time.process_time(), client.clock()
    await level.run(client, sessions, note)
    duration_s = client.clock() - start_s
    cpu_s = time.process_time() - cpu_s
    planned = sum(len(session.turns) for session in sessions)
    traces.sort(key=lambda trace: trace.start_s)
    return {
        **header(settings, level, planned),
        **figures(traces, start_s, duration_s, settings.goodput),
        "not_sent": planned - len(traces),
        "warmup_errors": failures,
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
    traces: Sequence[Trace], start_s: float, duration_s: float, goodput: dict[str, float]
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


def is_good(trace: Trace, limits_ms: dict[str, float]) -> bool:
    """Whether a request kept every limit; one token has no TPOT to exceed."""
    times_s = {"ttft": trace.ttft_s, "tpot": trace.tpot_s or 0.0, "e2el": trace.latency_s}
    return all(times_s[name] <= limit_ms / 1e3 for name, limit_ms in limits_ms.items())


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
    columns = ("streams", "completed", "failed", "requests/s", "tok/s", "tok/s a stream")
    columns += ("goodput/s", "cached", "largest gap ms")
    rows, times = [], []
    for level in levels:
        keys = ("request_throughput", "output_throughput", "output_throughput_per_stream")
        rates = [level[key] for key in (*keys, "request_goodput")]
        cached = level["cached_share"]
        row = [level_name(level), str(level["completed"]), str(level["failed"]), *map(short, rates)]
        rows.append([*row, "–" if cached is None else f"{cached:.0%}", short(level["max_itl_ms"])])
        for metric, title in METRICS.items():
            values = [short(level[f"{statistic}_{metric}_ms"]) for statistic in STATISTICS]
            times.append([level_name(level), title, *values])
    return table(columns, rows) + "\n" + table(("streams", "ms", *STATISTICS), times)


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
        errors = Counter([*filter(None, level["errors"]), *level["warmup_errors"]])
        lines += [f"at {level_name(level)}: {n} × {error}" for error, n in errors.most_common()]
        if level["not_sent"]:
            lines.append(f"at {level_name(level)}: {level['not_sent']} turns not sent after these")
    return lines


def plot(file: Path, runs: dict[str, Sequence[Record]]) -> None:
    """Draw throughput, TTFT and TPOT by level, a colour a run, as SVG, PNG or what the name says."""
    from matplotlib.figure import Figure  # slow to import, and a run without a plot needs none

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = {
        "output tok/s": {"-": "output_throughput"},
        "TTFT, ms: median, p99 dashed": {"-": "median_ttft_ms", "--": "p99_ttft_ms"},
        "TPOT, ms: median, p99 dashed": {"-": "median_tpot_ms", "--": "p99_tpot_ms"},
    }
    all_levels = [level for levels in runs.values() for level in levels]
    is_rate = any(level["max_concurrency"] is None for level in all_levels)
    key = "request_rate" if is_rate else "max_concurrency"
    for axes, (title, lines) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.set(title=title, xlabel="requests/s" if is_rate else "streams")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := sorted({level[key] for level in all_levels}), [*map(str, ticks)])
        axes.minorticks_off()
        for number, (label, levels) in enumerate(runs.items()):
            for style, value in lines.items():
                name = label if style == "-" else None
                points = [level[key] for level in levels], [level[value] for level in levels]
                axes.plot(*points, f"C{number}o{style}", markersize=4, label=name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)


# The command


async def sweep(
    settings: Settings, api_key: str | None, levels: list[Record], save: Path | None
) -> None:
    """Run every level and append its figures; ends early where a server answers nothing more."""
    steps = [Level(rate=rate) for rate in settings.rate]
    steps = steps or [Level(concurrency=streams) for streams in settings.concurrency]
    async with http_session(api_key) as http:
        client = Client(settings=settings, http=http)
        for step in steps:
            count = settings.num_requests(step.concurrency)
            total = count * (settings.turns if settings.mode == "agents" else 1)
            unit = "requests/s" if step.rate else "streams"
            # None: a bar on a terminal alone.
            with tqdm(total=total, desc=f"{step} {unit}", unit="req", disable=None) as bar:
                levels.append(level := await measure(client, step, bar))
            if save is not None:
                save.write_bytes(orjson.dumps(levels, option=orjson.OPT_INDENT_2) + b"\n")
            print(progress_line(level), file=sys.stderr, flush=True)
            if not level["completed"]:
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
    if (share := level["client_cpu_share"]) > BUSY_CLIENT:
        line += f"; this client was busy {share:.0%} of a core, which its figures may show"
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


def numbers(kind: type[Any]) -> Callable[[str], tuple[Any, ...]]:
    """Make a reader of "1,2,4" as positive numbers."""

    def read(text: str) -> tuple[Any, ...]:
        values = tuple(map(kind, text.split(",")))
        if min(values) <= 0:
            raise ValueError
        return values

    read.__name__ = "list of positive numbers"  # argparse names it where it raises
    return read


def id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not 0 <= int(first) <= int(last):
        raise ValueError
    return int(first), int(last) + 1


def limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOODPUT_METRICS or not float(value) >= 0:
        raise ValueError
    return name, float(value)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument_group("the server").add_argument
    add("--base-url", "--url", default="http://127.0.0.1:8000", help="with or without /v1")
    add("--model", help="its name in requests; by default the server's first")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="or OPENAI_API_KEY")
    add = result.add_argument_group("levels").add_argument
    streams, rates = numbers(int), numbers(float)
    add("--concurrency", type=streams, default="1,2,4,8,16,32", metavar="N,N", help="streams")
    add("--rate", type=rates, default=(), metavar="R,R", help="arrivals a second, in its place")
    text = "a level, conversations for agents; by default 4 a stream, 1 for agents, 32 at a rate"
    add("--requests", type=int, metavar="N", help=text)
    add("--warmup", type=int, default=1, metavar="N", help="unmeasured ones a stream, each level")
    add = result.add_argument_group("requests").add_argument
    add("--mode", choices=("random", "prefix", "agents"), default="random")
    text = "token ids or words, to /completions; chat: words, to /chat/completions"
    add("--prompt", choices=("ids", "words", "chat"), default="ids", help=text)
    add("--input-len", type=int, default=1024, metavar="N", help="tokens; agents: first message")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an answer")
    text = "lengths lie within 1 ± this of theirs"
    add("--range-ratio", type=float, default=0.5, metavar="R", help=text)
    add("--prefix-len", type=int, default=1024, metavar="N", help="tokens; agents: system prompt")
    add("--num-prefixes", type=int, default=1, metavar="N", help="how many share them")
    add("--turns", type=int, default=5, metavar="N", help="requests of a conversation")
    add("--tool-len", type=int, default=256, metavar="N", help="tokens of a tool's result")
    text = "s before a tool's result, within 1 ± 0.5 of it"
    add("--think-time", dest="think_time_s", type=float, default=0.5, metavar="S", help=text)
    text = "ids that are ordinary tokens"
    add("--id-range", type=id_range, default="1000:9999", metavar="FIRST:LAST", help=text)
    add("--seed", type=int, default=None, help="by default new, so that no cache knows a prompt")
    add("--temperature", type=float, default=0.0)
    text = "leave the field out, where it is refused; answers may then be shorter"
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help=text)
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields")
    text = "s until a request counts as failed"
    add("--timeout", dest="timeout_s", type=float, default=600.0, metavar="S", help=text)
    add = result.add_argument_group("results").add_argument
    text = "count requests within ttft:MS, tpot:MS, e2el:MS"
    add("--goodput", type=limit, nargs="+", default=[], metavar="METRIC:MS", help=text)
    add("--label", help="the run's name in files and plots")
    add("--save", type=Path, metavar="FILE", help="write a JSON array with an object a level")
    add("--plot", type=Path, metavar="FILE", help="draw as .svg or .png; needs matplotlib")
    text = "saved runs to draw beside this one"
    add("--compare", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; return 1 where a request failed, or the server could not be asked."""
    arguments = vars(parser().parse_args(argv))
    api_key, save, plot_file, compare = map(arguments.pop, ("api_key", "save", "plot", "compare"))
    base_url = arguments["base_url"].rstrip("/").removesuffix("/v1") + "/v1"
    arguments |= {"base_url": base_url, "goodput": dict(arguments["goodput"])}
    if arguments["seed"] is None:
        arguments["seed"] = random.SystemRandom().getrandbits(32)
    try:
        model = arguments.pop("model") or asyncio.run(first_model(base_url, api_key))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    settings = Settings(**arguments, model=model)
    levels: list[Record] = []
    try:
        asyncio.run(sweep(settings, api_key, levels, save))
    except KeyboardInterrupt:
        print("interrupted; what was finished:", file=sys.stderr)
    print(tables(levels))
    if plot_file is not None:
        runs = {str(file): json.loads(file.read_bytes()) for file in compare}
        runs = {levels[0]["label"] or file: levels for file, levels in runs.items()}
        plot(plot_file, {**runs, settings.label or settings.model: levels})
    for line in (lines := faults(levels)):
        print(line, file=sys.stderr)
    return int(bool(lines) or not levels)


if __name__ == "__main__":
    sys.exit(main())

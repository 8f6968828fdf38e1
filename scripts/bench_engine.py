"""Measure the engine and the server; docs/performance.md says how and shows the results.

    engine   tokens/s, time to the first token and prefill, in this process, by number of streams
    server   the same through HTTP: a server process, streaming clients in this one
    host     host work of a step at 8 streams, on a tiny random model
    http     tokens/s through HTTP with 8 streaming clients, on the same tiny model
    stall    largest gap between tokens of 7 running streams while a long prompt is prefilled
    agents   loops of 20 turns whose history grows from 500 to 8,000 tokens, with the prefix tree
             and without
    tree     match, lock and insert of a prompt of 8,000 tokens in a tree of 100,000 nodes, no model

Prompts are random ids, new in every round; answers are greedy, and end ids are ignored.
"""

import argparse
import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import jax
import numpy as np
import orjson
import tokenizers
import uvloop
from safetensors.numpy import save_file
from tokenizers.decoders import ByteFallback, Fuse, Replace

from jaxserve.app import make_scheduler
from jaxserve.cache.pages import PagePool
from jaxserve.cache.radix import RadixTree
from jaxserve.cli import cache_dir
from jaxserve.config import ServeConfig
from jaxserve.device.choices import LoadOptions
from jaxserve.device.compiler import use_compile_cache
from jaxserve.device.loader import load_model
from jaxserve.device.plan import PAGE_SIZE
from jaxserve.engine.client import EngineClient, EngineStatus
from jaxserve.engine.core import EngineCore, HostTimes
from jaxserve.engine.inbox import Inbox
from jaxserve.hub.demo import DEMO_MODEL_NAME
from jaxserve.hub.resolve import resolve_model
from jaxserve.metrics import Metrics
from jaxserve.models.registry import load_config
from jaxserve.models.specs import param_specs
from jaxserve.models.windows import Windows
from jaxserve.types import (
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokenOutput,
)

SWITCH_INTERVAL_S = 0.0005  # the server's own
EDGE_PASSES = 32  # left out at both ends of a round: not all its streams run there
USUAL_TOKENS = 16  # of each running stream before the long prompt: their gaps are the usual ones
STREAM_END = b"[DONE]\n\n"
AGENT_TURNS = 20
AGENT_SYSTEM_TOKENS = 500
AGENT_ANSWER_TOKENS = 16
AGENT_RESULT_TOKENS = 378  # so that the last turn's prompt has 8,000 tokens or a few less
AGENT_KV_BYTES = 2 << 30
TREE_NODES = 100_000
TREE_PROMPT_TOKENS = 8_000
TREE_SAMPLES = 20
TINY_SIZES = (8, 16, 512)  # streams, prompt and output tokens
TINY_CONFIG = """{
"model_type": "gemma3_text", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,
"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
"sliding_window": 16, "query_pre_attn_scalar": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
"max_position_embeddings": 2048, "eos_token_id": 1}"""

Ids = tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """When a stream was asked for and when each of its tokens came, in seconds of perf_counter."""

    submitted_s: float = field(default_factory=time.perf_counter)
    tokens_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        self.tokens_s += [time.perf_counter()] * num_tokens

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.submitted_s


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: a sample a round, of which the median counts."""

    name: str
    unit: str
    samples: list[float]
    at_least: float | None = None
    at_most: float | None = None

    def line(self) -> str:
        middle = median(self.samples)
        spread = f"{min(self.samples):.4g} – {max(self.samples):.4g}"
        verdict = ""
        if self.at_least is not None:
            verdict = f"≥ {self.at_least:g} {'met' if middle >= self.at_least else 'MISSED'}"
        elif self.at_most is not None:
            verdict = f"≤ {self.at_most:g} {'met' if middle <= self.at_most else 'MISSED'}"
        return f"  {self.name:<36}{middle:>9.4g} {self.unit:<10}{spread:<20}{verdict}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the flags set, each a field; the defaults are what docs/performance.md shows."""

    model: str = DEMO_MODEL_NAME
    dtype: str = "auto"
    max_batch: int = 16
    repeats: int = 3
    streams: str = "1,2,4,8,16"
    prompt_tokens: int = 256
    output_tokens: int = 64
    prefill_tokens: int = 1024
    long_prompt_tokens: int = 4000


# Statistics


def tokens_per_s(traces: Sequence[Trace]) -> float:
    """All tokens over the time from the first submission to the last token, prefill included."""
    begin_s = min(trace.submitted_s for trace in traces)
    end_s = max(trace.tokens_s[-1] for trace in traces)
    return sum(len(trace.tokens_s) for trace in traces) / (end_s - begin_s)


def decoding_tokens_per_s(traces: Sequence[Trace]) -> float:
    """Tokens a second while every stream decodes: after the last one's first token."""
    begin_s = max(trace.tokens_s[0] for trace in traces)
    end_s = min(trace.tokens_s[-1] for trace in traces)
    tokens = sum(begin_s < token_s <= end_s for trace in traces for token_s in trace.tokens_s)
    return tokens / (end_s - begin_s) if end_s > begin_s else 0.0


def gaps_s(traces: Sequence[Trace]) -> list[tuple[float, float]]:
    """Begin and end of the time between any two neighbouring tokens of a stream."""
    return [gap for trace in traces for gap in pairwise(trace.tokens_s)]


def usual_and_largest_gap_s(
    traces: Sequence[Trace], begin_s: float, end_s: float
) -> tuple[float, float]:
    """Median gap before [begin, end], and the largest that meets it."""
    gaps = gaps_s(traces)
    usual_s = median(b - a for a, b in gaps if b <= begin_s)
    return usual_s, max(b - a for a, b in gaps if b > begin_s and a < end_s)


# The engine in this process, and the server in one of its own

Generate = Callable[[Ids, int, Trace], Awaitable[None]]
"""Runs a prompt for so many tokens and notes when each came."""


@contextmanager
def running_engine(
    folder: Path,
    dtype: str,
    max_batch: int,
    *,
    kv_cache_bytes: int | None = None,
    reuses_prefixes: bool = True,
) -> Iterator[tuple[Generate, EngineCore]]:
    """Run the engine on a thread, with the server's own defaults."""
    options = LoadOptions(
        dtype=dtype,
        weights="auto",
        ple_dtype="auto",
        kv_dtype="auto",
        max_model_len=None,
        max_batch=max_batch,
        kv_cache_bytes=kv_cache_bytes,
        tokens_per_resume_point=ServeConfig().tokens_per_resume_point,
        grammar_bytes=ServeConfig().grammar_bytes,
    )
    loaded = load_model(folder, options, lambda phase, done, total: None)
    scheduler = make_scheduler(
        loaded,
        prefill_stall_factor=ServeConfig().prefill_stall_factor,
        reuses_prefixes=reuses_prefixes,
    )
    inbox = Inbox()
    client = EngineClient(inbox, max_waiting_requests=64, max_waiting_tokens=1 << 20)
    core = EngineCore(
        loaded.runner,
        scheduler,
        inbox,
        publish=client.deliver,
        on_death=lambda fault: None,  # each stream has failed with it
        metrics=Metrics(),
    )

    async def generate(prompt: Ids, num_tokens: int, trace: Trace) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0)
        request = GenerationRequest(
            request_id=secrets.token_hex(8), prompt_ids=prompt, sampling=sampling
        )
        (stream,) = client.submit([request])
        try:
            async for event in stream:
                if isinstance(event, TokenOutput):
                    trace.add(len(event.token_ids))
                    trace.token_ids += event.token_ids
                elif isinstance(event, RequestFinished):
                    trace.num_cached_tokens = event.stats.num_cached_tokens
                elif isinstance(event, RequestFailed):
                    raise event.error
        finally:
            stream.abort()

    client.set_status(EngineStatus(phase="ready"))
    thread = threading.Thread(target=core.run, name="device")
    thread.start()
    try:
        yield generate, core
    finally:
        client.stop()
        thread.join()


@contextmanager
def running_server(folder: Path, dtype: str, max_batch: int) -> Iterator[Generate]:
    """Run `jaxserve serve` as a process, from when it is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "jaxserve", "serve", "--model", str(folder), "--dtype", dtype]
    command += ["--max-batch", str(max_batch), "--port", str(port), "--log-level", "WARNING"]
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(0.1)
        yield partial(stream_completion, port)
    finally:
        process.terminate()
        process.wait()


async def stream_completion(port: int, prompt: Ids, num_tokens: int, trace: Trace) -> None:
    """Stream one completion; by hand, for an HTTP library costs as much as the server."""
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body = orjson.dumps({"prompt": prompt, "max_tokens": num_tokens, **options})
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError((answer + await reader.read()).decode())
        # An event is one HTTP chunk, whose size stands before it.
        while (data := (await reader.readuntil(b"\n\n")).partition(b"data: ")[2]) != STREAM_END:
            trace.add(sum(len(c.get("token_ids", ())) for c in orjson.loads(data)["choices"]))
    finally:
        writer.close()


@contextmanager
def tiny_model() -> Iterator[Path]:
    """Write a random Gemma 3 of four layers, which costs next to nothing to run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(TINY_CONFIG)
        rng = np.random.default_rng(0)
        tensors = {
            f"model.{source.name}": source.init.draw(rng, source.shape) - np.float32(spec.offset)
            for spec in param_specs(load_config(folder))
            for source in spec.sources
        }
        save_file(tensors, folder / "model.safetensors")
        vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
        vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
        vocab |= {f" word{i}": i for i in range(259, 1024)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
        decoders = [Replace("\u2581", " "), ByteFallback(), Fuse()]
        tokenizer.decoder = tokenizers.decoders.Sequence(decoders)
        tokenizer.save(str(folder / "tokenizer.json"))
        yield folder


# The measurements


def random_prompt(num_tokens: int) -> Ids:
    """Ids that are ordinary tokens in every vocabulary here."""
    return tuple(np.random.default_rng().integers(600, 1000, num_tokens).tolist())


async def run_round(
    generate: Generate, num_streams: int, prompt_tokens: int, output_tokens: int
) -> list[Trace]:
    """Start so many streams at once and wait for the last one's end."""
    prompts = [random_prompt(prompt_tokens) for _ in range(num_streams)]
    traces = [Trace() for _ in prompts]
    await asyncio.gather(
        *(generate(p, output_tokens, t) for p, t in zip(prompts, traces, strict=True))
    )
    if any(len(trace.tokens_s) != output_tokens for trace in traces):
        raise RuntimeError(f"a stream did not give {output_tokens} tokens")
    return traces


async def sweep(generate: Generate, settings: Settings) -> list[Figure]:
    """Rates and first tokens by number of streams, then the prefill of one prompt alone."""
    targets = {1: 26.0, 8: 150.0, 16: 220.0}
    sizes = (settings.prompt_tokens, settings.output_tokens)
    await run_round(generate, 1, *sizes)
    figures = []
    for count in map(int, settings.streams.split(",")):
        rounds = [await run_round(generate, count, *sizes) for _ in range(settings.repeats)]
        ttfts_ms = [median(trace.ttft_s for trace in traces) * 1e3 for traces in rounds]
        gaps_ms = [median(b - a for a, b in gaps_s(traces)) * 1e3 for traces in rounds]
        at = f"{count} streams" if count > 1 else "1 stream"
        rates, target = [*map(tokens_per_s, rounds)], targets.get(count)
        figures.append(Figure(at, "tokens/s", rates, at_least=target))
        decoding = [*map(decoding_tokens_per_s, rounds)]
        figures.append(Figure(f"{at}, all decoding", "tokens/s", decoding))
        figures.append(Figure(f"{at}, first token", "ms", ttfts_ms))
        figures.append(Figure(f"{at}, between tokens", "ms", gaps_ms))
    length = settings.prefill_tokens
    rounds = [await run_round(generate, 1, length, 1) for _ in range(settings.repeats)]
    rates = [length / traces[0].ttft_s for traces in rounds]
    return [*figures, Figure(f"prefill of {length} tokens", "tokens/s", rates, at_least=1300.0)]


async def engine(folder: Path, settings: Settings) -> list[Figure]:
    with running_engine(folder, settings.dtype, settings.max_batch) as (generate, _):
        return await sweep(generate, settings)


async def server(folder: Path, settings: Settings) -> list[Figure]:
    with running_server(folder, settings.dtype, settings.max_batch) as generate:
        return await sweep(generate, settings)


async def host(folder: Path, settings: Settings) -> list[Figure]:
    rounds: list[list[HostTimes]] = []
    with running_engine(folder, "float32", settings.max_batch) as (generate, core):
        for _ in range(settings.repeats):
            core.host_times.clear()
            await run_round(generate, *TINY_SIZES)
            rounds.append(list(core.host_times)[EDGE_PASSES:-EDGE_PASSES])
    parts = [
        Figure(name, "ms", [median(times[i] for times in passes) * 1e3 for passes in rounds])
        for i, name in enumerate(("schedule", "stage and dispatch", "settle", "publish"))
    ]
    sums_ms = [median(map(sum, passes)) * 1e3 for passes in rounds]
    return [*parts, Figure("host work of a step", "ms", sums_ms, at_most=0.5)]


async def http(folder: Path, settings: Settings) -> list[Figure]:
    with running_server(folder, "float32", settings.max_batch) as generate:
        await run_round(generate, *TINY_SIZES)
        rounds = [await run_round(generate, *TINY_SIZES) for _ in range(settings.repeats)]
    return [Figure("8 clients", "tokens/s", [*map(tokens_per_s, rounds)], at_least=2500.0)]


async def stall(folder: Path, settings: Settings) -> list[Figure]:
    with running_engine(folder, settings.dtype, settings.max_batch) as (generate, _):
        await run_round(generate, 1, settings.long_prompt_tokens, 1)
        rounds = [await stall_once(generate, settings) for _ in range(settings.repeats)]
    usual_ms, largest_ms, ttfts_ms = map(list, zip(*rounds, strict=True))
    ratios = [b / a for a, b in zip(usual_ms, largest_ms, strict=True)]
    return [
        Figure("usual gap of 7 running streams", "ms", usual_ms),
        Figure(f"largest, {settings.long_prompt_tokens} tokens beside", "ms", largest_ms),
        Figure("largest / usual", "", ratios, at_most=3.0),
        Figure("first token of the long prompt", "ms", ttfts_ms),
    ]


async def stall_once(generate: Generate, settings: Settings) -> tuple[float, float, float]:
    """Return the running streams' usual and largest gap, and the long prompt's wait, in ms."""
    running = [Trace() for _ in range(7)]
    tasks = [
        asyncio.ensure_future(generate(random_prompt(settings.prompt_tokens), 512, trace))
        for trace in running
    ]
    while min(len(trace.tokens_s) for trace in running) < USUAL_TOKENS:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    (long,) = await run_round(generate, 1, settings.long_prompt_tokens, 1)
    if any(task.done() for task in tasks):
        raise RuntimeError("a running stream ended before the long prompt's first token")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    usual_s, largest_s = usual_and_largest_gap_s(running, long.submitted_s, long.tokens_s[0])
    return usual_s * 1e3, largest_s * 1e3, long.ttft_s * 1e3


@dataclass(frozen=True, slots=True)
class AgentRun:
    """What loops that ran side by side took."""

    wall_s: float
    num_prefilled: int
    num_new: int
    ttfts_s: list[list[float]]  # by loop, of each turn

    @property
    def last_to_second(self) -> float:
        return median(ttfts_s[-1] / ttfts_s[1] for ttfts_s in self.ttfts_s)


async def agents(folder: Path, settings: Settings) -> list[Figure]:
    sizes = (folder, settings.dtype, settings.max_batch)
    with running_engine(*sizes, kv_cache_bytes=AGENT_KV_BYTES) as (generate, _):
        await run_agents(generate, 1, num_turns=2)
        alone = [await run_agents(generate, 1) for _ in range(settings.repeats)]
        eight = [await run_agents(generate, 8) for _ in range(settings.repeats)]
    with running_engine(*sizes, kv_cache_bytes=AGENT_KV_BYTES, reuses_prefixes=False) as (
        generate,
        _,
    ):
        await run_agents(generate, 1, num_turns=2)
        cold = await run_agents(generate, 1)
    figures = []
    for at, runs in (("1 agent", alone), ("8 agents", eight)):
        shares = [run.num_prefilled / run.num_new for run in runs]
        walls_s = [run.wall_s for run in runs]
        figures.append(Figure(f"{at}, prefilled / new tokens", "", shares, at_most=1.02))
        figures.append(Figure(f"{at}, whole loop", "s", walls_s))
    ratios = [run.last_to_second for run in alone]
    figures.append(Figure("1 agent, first token of turn 20 / 2", "", ratios, at_most=1.5))
    walls = [run.wall_s / cold.wall_s for run in alone]
    return [*figures, Figure("1 agent, loop with / without the tree", "", walls, at_most=0.25)]


async def run_agents(
    generate: Generate, num_agents: int, *, num_turns: int = AGENT_TURNS
) -> AgentRun:
    """Run loops with one system prompt side by side; a turn adds a tool's result to the history."""
    system = random_prompt(AGENT_SYSTEM_TOKENS)
    loops = [AgentLoop(system) for _ in range(num_agents)]
    begin_s = time.perf_counter()
    await asyncio.gather(*(loop.run(generate, num_turns) for loop in loops))
    wall_s = time.perf_counter() - begin_s
    return AgentRun(
        wall_s=wall_s,
        num_prefilled=sum(loop.num_prefilled for loop in loops),
        # The system prompt is new once.
        num_new=sum(loop.num_new for loop in loops) - (num_agents - 1) * len(system),
        ttfts_s=[loop.ttfts_s for loop in loops],
    )


class AgentLoop:
    """One agent: its history, and what its turns took."""

    def __init__(self, system: Ids) -> None:
        self._history = system
        self.num_new = len(system)
        self.num_prefilled = 0
        self.ttfts_s: list[float] = []

    async def run(self, generate: Generate, num_turns: int) -> None:
        """Take turns; the answer's last token is new to the next turn, for it was not computed."""
        for turn in range(num_turns):
            if turn:
                result = random_prompt(AGENT_RESULT_TOKENS)
                self._history += result
                self.num_new += len(result) + 1
            trace = Trace()
            await generate(self._history, AGENT_ANSWER_TOKENS, trace)
            self.ttfts_s.append(trace.ttft_s)
            self.num_prefilled += len(self._history) - trace.num_cached_tokens
            self._history += tuple(trace.token_ids)


async def tree(folder: Path, settings: Settings) -> list[Figure]:
    """Time the prefix tree alone, for a prompt that is there and for one that is not."""
    windows = Windows(page_size=PAGE_SIZE, window=512)
    # The tree grows by a new prompt a sample; no page is evicted.
    num_pages = TREE_NODES + (TREE_SAMPLES + 2) * windows.pages_for(TREE_PROMPT_TOKENS)
    pool, sliding_pool = PagePool(1 + num_pages), PagePool(1 + num_pages)
    cache = RadixTree(pool, sliding_pool, windows)
    rng = np.random.default_rng(0)

    def prompts() -> Iterator[Ids]:
        """Prompts of 8,000 tokens, each with half of another one's as its beginning."""
        half, ids = TREE_PROMPT_TOKENS // 2, rng.integers(0, 262144, TREE_PROMPT_TOKENS)
        while True:
            yield tuple(ids.tolist())
            ids = np.concatenate([ids[:half], rng.integers(0, 262144, half)])
            if rng.random() < 0.1:
                ids = rng.integers(0, 262144, TREE_PROMPT_TOKENS)

    def pass_through(ids: Ids) -> float:
        """Match, lock and insert all of a prompt; return the seconds, its pages' time left out."""
        pages = pool.allocate(windows.pages_for(len(ids))) or []
        started_s = time.perf_counter()
        match = cache.match(None, ids)
        cache.lock(match.root)
        for node in match.nodes:
            cache.lock(node)
        cache.sliding.resume_position(match.nodes, 0)
        path, tip = match.nodes, match.nodes[-1] if match.nodes else match.root
        num_matched = len(path)
        for index in range(num_matched, len(ids) // PAGE_SIZE):
            tokens = ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            tip = cache.insert(tip, tokens, pages[index], -1, 0)
            path.append(tip)
        took_s = time.perf_counter() - started_s
        pool.release(pages[:num_matched])
        cache.unlock_path(match.root, path)
        return took_s

    source = prompts()
    while cache.num_nodes < TREE_NODES:
        known = next(source)
        pass_through(known)
    hits_ms, misses_ms = [], []
    for _ in range(TREE_SAMPLES):
        hits_ms.append(pass_through(known) * 1e3)
        new = tuple(rng.integers(0, 262144, TREE_PROMPT_TOKENS).tolist())
        misses_ms.append(pass_through(new) * 1e3)
    return [
        Figure(f"a known prompt, {cache.num_nodes} nodes", "ms", hits_ms, at_most=1.0),
        Figure(f"a new prompt, {cache.num_nodes} nodes", "ms", misses_ms, at_most=1.0),
    ]


MEASUREMENTS = {
    measure.__name__: measure for measure in (engine, server, host, http, stall, agents, tree)
}


# The command


def hardware() -> dict[str, object]:
    """Describe what the figures depend on beside the code."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    return {
        "cpu": re.findall(r"model name\s*: (.*)|$", cpuinfo)[0],
        "cores": os.cpu_count(),
        "extensions": [x for x in ("avx512f", "avx512_bf16", "amx_bf16") if x in cpuinfo],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "load": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MEASUREMENTS), metavar="A,B")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write every sample as JSON")
    for setting in fields(Settings):
        flag, default = f"--{setting.name.replace('_', '-')}", setting.default
        parser.add_argument(flag, type=type(default), default=default)
    arguments = vars(parser.parse_args(argv))
    names, save = arguments.pop("only").split(","), arguments.pop("save")
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"--only {','.join(sorted(unknown))} is none of {','.join(MEASUREMENTS)}")
    settings = Settings(**arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_compile_cache(cache_dir() / "compiled")
    report: dict[str, object] = {"hardware": hardware(), "settings": asdict(settings)}
    print(report["hardware"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, tiny_model() as tiny:
        for name in names:
            is_tiny = name in ("host", "http", "tree")
            folder = tiny if is_tiny else resolve_model(settings.model, cache_dir=cache_dir())
            figures = runner.run(MEASUREMENTS[name](folder, settings))
            report[name] = [asdict(figure) for figure in figures]
            print(name, *(figure.line() for figure in figures), sep="\n", flush=True)
    if save is not None:
        save.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

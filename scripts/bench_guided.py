"""Measure guided decoding; docs/guided.md shows the results.

    step      steps of 8 rows with a grammar against steps of 8 rows without, in this process
    host      host work of such steps, on a tiny random model
    runs      answers over 30 schemas, forced text taken in at once against sampled, in this process
    first     time to the first token with a grammar that is there already, against none (--url)
    answers   300 answers over 30 schemas at temperature 1: how many are complete, all valid (--url)

`first` and `answers` talk to a server; `answers` needs the package jsonschema. To be run with the
project's folder in PYTHONPATH.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from jaxserve.app import make_scheduler
from jaxserve.cli import cache_dir
from jaxserve.device.arena import pack
from jaxserve.device.choices import LoadOptions
from jaxserve.device.compiler import use_compile_cache
from jaxserve.device.loader import LoadedModel, load_model
from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Inbox, Submit
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.forced import canonical
from jaxserve.guided.guide import TablesGuide
from jaxserve.guided.tables import GrammarSpec, TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.hub.resolve import resolve_model
from jaxserve.metrics import Metrics
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import (
    GenerationRequest,
    Grammar,
    Guidance,
    OutputEvent,
    RequestFinished,
    SamplingParams,
    TokenOutput,
)
from scripts.bench_engine import tiny_model

SCHEMAS = Path(__file__).parents[1] / "tests/data/realistic_schemas.json"
NUM_ROWS = 8
NUM_PROMPT_TOKENS = 64
# A text that goes on, so that rows with a grammar stay.
LONG = {"type": "array", "items": {"type": "string"}, "minItems": 200}


# In this process


def bench_step(arguments: argparse.Namespace) -> None:
    use_compile_cache(Path(arguments.compile_cache or cache_dir() / "compiled"))
    _compare_rows(_load(resolve_model(arguments.model, cache_dir=cache_dir())), arguments)


def bench_host(arguments: argparse.Namespace) -> None:
    with tiny_model() as folder:
        _compare_rows(_load(folder), arguments)


def bench_runs(arguments: argparse.Namespace) -> None:
    use_compile_cache(Path(arguments.compile_cache or cache_dir() / "compiled"))
    served = _load(resolve_model(arguments.model, cache_dir=cache_dir()))
    schemas = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    requests = [
        GenerationRequest(
            request_id=name,
            prompt_ids=(2, *served.encode(f"An example of the arguments of {name} as JSON:\n")),
            sampling=SamplingParams(max_tokens=arguments.steps * 4, seed=0, temperature=0.0),
            guidance=served.guidance(json.dumps(schema)),
        )
        for name, schema in list(schemas.items())[: arguments.requests]
    ]
    for num_rows in (1, NUM_ROWS):
        rounds = [
            [_run_answers(served.loaded, requests, num_rows, forces) for forces in (False, True)]
            for _ in range(arguments.repeats)
        ]
        ratios = sorted(on.wall_s / off.wall_s for off, on in rounds)
        off, on = rounds[-1]
        num_tokens = sum(map(len, on.ids.values()))
        num_changed = sum(off.ids[name] != ids for name, ids in on.ids.items())
        print(
            f"{num_rows} at a time: {num_tokens} tokens, {on.num_forced} of them forced,"
            f" {num_changed} of {len(requests)} answers others by rounding;"
            f" steps {off.num_steps} → {on.num_steps}, wall {off.wall_s:.1f} s → {on.wall_s:.1f} s,"
            f" ratio {median(ratios):.3f} ({ratios[0]:.3f} – {ratios[-1]:.3f});"
            f" decode {on.decode_s * 1e3:.1f} ms, extend {on.extend_s * 1e3:.1f} ms",
            flush=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A loaded model, and what makes its grammars."""

    loaded: LoadedModel
    vocabulary: GrammarVocabulary
    encode: Callable[[str], Sequence[int]]

    def guidance(self, schema: str) -> Guidance:
        """Compile a JSON Schema."""
        spec = GrammarSpec(kind="json_schema", source=schema)
        compiled = compile_grammar(spec, self.vocabulary)
        if not isinstance(compiled, TokenTables):
            raise SystemExit("a grammar of the measurement has no tables")
        tables, forced_id_S = canonical(compiled, self.encode)
        runner, vocab_size = self.loaded.runner, self.loaded.config.vocab_size
        grammar = Grammar(
            start=lambda: TablesGuide(tables, forced_id_S=forced_id_S),
            image=pack(tables, spec.digest, vocab_size, runner.arena_rows),
        )
        return Guidance(grammar=grammar, end_ids=frozenset({1}))


def _load(folder: Path) -> Served:
    options = LoadOptions(
        dtype="auto",
        max_model_len=1024,
        max_batch=NUM_ROWS,
        kv_cache_bytes=1 << 29,
        tokens_per_resume_point=8192,
        weights="auto",
        ple_dtype="auto",
        kv_dtype="auto",
        grammar_bytes=128 << 20,
    )
    loaded = load_model(folder, options, lambda phase, done, total: None)
    tokenizer = Tokenizer.load(folder)
    vocabulary = GrammarVocabulary.build(
        tokenizer.pieces, control_ids=tokenizer.special_ids, vocab_size=loaded.config.vocab_size
    )
    return Served(
        loaded=loaded,
        vocabulary=vocabulary,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _compare_rows(served: Served, arguments: argparse.Namespace) -> None:
    loaded, guidance = served.loaded, served.guidance(json.dumps(LONG))
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        _run_rows(loaded, temperature, guidance, 16)  # writes the grammar, too
        rounds = [
            [_run_rows(loaded, temperature, each, arguments.steps) for each in (None, guidance)]
            for _ in range(arguments.repeats)
        ]
        for k, unit in enumerate(("step wall ms", "step CPU ms", "host CPU ms a step")):
            free = [pair[0][k] * 1e3 for pair in rounds]
            guided = [pair[1][k] * 1e3 for pair in rounds]
            ratios = sorted(b / a for a, b in zip(free, guided, strict=True))
            print(
                f"{name:<14}{unit:<21}free {median(free):8.3f}  guided {median(guided):8.3f}"
                f"  ratio {median(ratios):.3f} ({ratios[0]:.3f} – {ratios[-1]:.3f})",
                flush=True,
            )
        # Of the last kind.
        more_ms = median(b - a for a, b in zip(free, guided, strict=True))
        print(f"{name:<14}host work of a guided token {more_ms / NUM_ROWS * 1e3:.1f} µs more")


class Answers(NamedTuple):
    """What answers were, how many steps and seconds all took, and estimates of a step's."""

    ids: dict[str, list[int]]
    num_forced: int
    num_steps: int
    wall_s: float
    decode_s: float
    extend_s: float


def _run_answers(
    loaded: LoadedModel, requests: Sequence[GenerationRequest], num_rows: int, forces: bool
) -> Answers:
    """Run requests, so many at a time."""
    scheduler = make_scheduler(
        loaded, prefill_stall_factor=1.5, reuses_prefixes=False, forces_runs=forces
    )
    inbox = Inbox()
    events: list[OutputEvent] = []
    core = EngineCore(
        loaded.runner,
        scheduler,
        inbox,
        publish=events.extend,
        on_death=lambda fault: None,
        metrics=Metrics(),
    )
    num_steps, begun_s = 0, time.perf_counter()
    for first in range(0, len(requests), num_rows):
        for request in requests[first : first + num_rows]:
            inbox.put(Submit(request=request, arrival_s=0.0))
        core.step()
        num_steps += 1
        while not core.is_idle:
            core.step()
            num_steps += 1
    wall_s = time.perf_counter() - begun_s
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for event in events:
        if isinstance(event, TokenOutput):
            ids[event.request_id] += event.token_ids
    ends = [event for event in events if isinstance(event, RequestFinished)]
    return Answers(
        ids,
        sum(end.stats.num_forced_tokens for end in ends),
        num_steps,
        wall_s,
        scheduler.times.decode_s(num_rows) or 0.0,
        scheduler.times.extend_s(loaded.runner.extend_buckets[0]) or 0.0,
    )


def _run_rows(
    loaded: LoadedModel, temperature: float, guidance: Guidance | None, num_steps: int
) -> tuple[float, float, float]:
    """Decode 8 rows; return medians of a step's wall, CPU and host work, in seconds."""
    scheduler = make_scheduler(loaded, prefill_stall_factor=1.5, reuses_prefixes=False)
    inbox = Inbox()
    core = EngineCore(
        loaded.runner,
        scheduler,
        inbox,
        publish=lambda events: None,
        on_death=lambda fault: None,
        metrics=Metrics(),
        # Host work alone is told by it, and that as CPU time: other jobs are none of it.
        clock=time.thread_time,
    )
    rng = np.random.default_rng(0)
    for row in range(NUM_ROWS):
        sampling = SamplingParams(max_tokens=num_steps + 8, seed=row, temperature=temperature)
        request = GenerationRequest(
            request_id=str(row),
            prompt_ids=tuple(rng.integers(1000, 200_000, NUM_PROMPT_TOKENS).tolist()),
            sampling=sampling,
            guidance=guidance,
        )
        inbox.put(Submit(request=request, arrival_s=0.0))
    walls, cpus, hosts = [], [], []
    core.step()
    while not core.is_idle:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        core.step()
        walls.append(time.perf_counter() - wall_s)
        cpus.append(time.process_time() - cpu_s)
        hosts.append(sum(core.host_times[-1]))
    inner = slice(8, num_steps)  # all rows decode
    return median(walls[inner]), median(cpus[inner]), median(hosts[inner])


# Against a server


def _post(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the answer, and the seconds to the first byte of a stream's first token."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    begun_s = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    first_s = 0.0
    if body.get("stream"):
        for line in response:
            if line.startswith(b"data: {") and not first_s:
                first_s = time.perf_counter() - begun_s
        return {}, first_s
    answer: dict[str, Any] = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"{response.status}: {answer}")
    return answer, time.perf_counter() - begun_s


def bench_first(arguments: argparse.Namespace) -> None:
    schema = json.loads(SCHEMAS.read_text(encoding="utf-8"))["plan"]
    plain = {"prompt": [2, 100, 200, 300], "max_tokens": 2, "stream": True, "temperature": 1}
    guided = {**plain, "guided_json": schema}
    _post(arguments.url, guided)
    times: list[list[float]] = [[], []]
    for _ in range(arguments.repeats * 10):
        for kept, body in zip(times, (plain, guided), strict=True):
            kept.append(_post(arguments.url, body)[1] * 1e3)
    free, with_grammar = map(median, times)
    print(
        f"first token: {free:.2f} ms without, {with_grammar:.2f} ms with a cached grammar,"
        f" {with_grammar - free:+.2f} ms"
    )


def bench_answers(arguments: argparse.Namespace) -> None:
    import jsonschema

    schemas = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    names = list(schemas)

    def run(index: int) -> str:
        name = names[index % len(names)]
        body = {
            "prompt": f"An example of the arguments of {name} as JSON:\n",
            "guided_json": schemas[name],
            "max_tokens": 256,
            "temperature": 1,
            "seed": index,
        }
        [choice] = _post(arguments.url, body)[0]["choices"]
        if choice["finish_reason"] != "stop":
            return str(choice["finish_reason"])
        try:
            jsonschema.validate(json.loads(choice["text"]), schemas[name])
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"{name}: {choice['text']!r}: {error}")
            return "INVALID"
        return "complete and valid"

    begun_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_ROWS) as pool:
        counts = Counter(pool.map(run, range(arguments.requests)))
    print(f"{dict(counts)} in {time.perf_counter() - begun_s:.0f} s")


MODES: dict[str, Callable[[argparse.Namespace], None]] = {
    "step": bench_step,
    "host": bench_host,
    "runs": bench_runs,
    "first": bench_first,
    "answers": bench_answers,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", default=None, help="folder or name; default: the demo model")
    parser.add_argument("--compile-cache", default=None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args(argv)
    MODES[arguments.mode](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

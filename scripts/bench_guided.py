"""Measure guided decoding; docs/guided.md shows the results.

    step      steps of 8 rows with a grammar against steps of 8 rows without, in this process
    first     time to the first token with a grammar that is there already, against none (--url)
    answers   300 answers over 30 schemas at temperature 1: how many are complete, all valid (--url)

`first` and `answers` talk to a server; `answers` needs the package jsonschema.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
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
from jaxserve.guided.guide import TablesGuide
from jaxserve.guided.tables import GrammarSpec, TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.hub.resolve import resolve_model
from jaxserve.metrics import Metrics
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import GenerationRequest, Grammar, Guidance, SamplingParams

SCHEMAS = Path(__file__).parents[1] / "tests/data/realistic_schemas.json"
NUM_ROWS = 8
NUM_PROMPT_TOKENS = 64
# A text that goes on, so that rows with a grammar stay.
LONG = {"type": "array", "items": {"type": "string"}, "minItems": 200}


# In this process


def bench_step(arguments: argparse.Namespace) -> None:
    folder = resolve_model(arguments.model, cache_dir=cache_dir())
    use_compile_cache(Path(arguments.compile_cache or cache_dir() / "compiled"))
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
    vocab_size = loaded.config.vocab_size
    vocabulary = GrammarVocabulary.build(
        tokenizer.pieces, control_ids=tokenizer.special_ids, vocab_size=vocab_size
    )
    spec = GrammarSpec(kind="json_schema", source=json.dumps(LONG))
    tables = compile_grammar(spec, vocabulary)
    if not isinstance(tables, TokenTables):
        raise SystemExit("the grammar of the measurement has no tables")
    image = pack(tables, spec.digest, vocab_size, loaded.runner.arena_rows)
    grammar = Grammar(start=lambda: TablesGuide(tables), image=image)
    guidance = Guidance(grammar=grammar, end_ids=frozenset({1}))
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        _run_rows(loaded, temperature, guidance, 16)  # writes the grammar, too
        rounds = [
            [_run_rows(loaded, temperature, each, arguments.steps) for each in (None, guidance)]
            for _ in range(arguments.repeats)
        ]
        for k, unit in enumerate(("step wall ms", "step CPU ms", "host work ms a step")):
            free = [pair[0][k] * 1e3 for pair in rounds]
            guided = [pair[1][k] * 1e3 for pair in rounds]
            ratios = sorted(b / a for a, b in zip(free, guided, strict=True))
            print(
                f"{name:<14}{unit:<21}free {median(free):8.3f}  guided {median(guided):8.3f}"
                f"  ratio {median(ratios):.3f} ({ratios[0]:.3f} – {ratios[-1]:.3f})",
                flush=True,
            )


def _run_rows(
    loaded: LoadedModel, temperature: float, guidance: Guidance | None, num_steps: int
) -> tuple[float, float, float]:
    """Decode 8 rows; return medians of a step's wall, CPU and host seconds."""
    scheduler = make_scheduler(loaded, prefill_stall_factor=1.5, reuses_prefixes=False)
    inbox = Inbox()
    core = EngineCore(
        loaded.runner,
        scheduler,
        inbox,
        publish=lambda events: None,
        on_death=lambda fault: None,
        metrics=Metrics(),
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

#!/usr/bin/env python3
"""Measure the server's step programs on the chip that is here, each in a fresh process.

On a TPU it measures Gemma 4 E2B; with `--estimate` it asks the TPU compiler, which needs the extra
`tpu` and no chip; on a CPU that JAX_PLATFORMS names it measures a small model, which tries this
script and nothing else. One JSON file holds all results, and a run goes on from it: docs/tpu.md.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import FrameType

from jaxserve.device.plan import PAGE_SIZE, pages_for
from jaxserve.models.kv_cache import bytes_per_page
from scripts.revalidate_case import Case, Mode, argument_bytes, config_of
from scripts.revalidate_process import Answer, ask_process
from scripts.revalidate_record import Record

SMALL_BYTES = 8 << 20  # of the small model's device, which is no more than a number

DEVICE_S = 600.0  # what a device may take to say which it is

MAX_GUESSES = 6
"""Questions of a search at a row count that bytes predict; later ones halve what is left."""


def cases(model: str) -> Iterator[Case]:
    """List what is measured: grids of rows and context, then one thing changed at a time."""
    contexts, rows = ((128, 256), (1, 4)) if model == "small" else ((1024, 8192), (1, 8, 32))
    base = Case(program="decode", size=rows[-1], context=contexts[-1], model=model)
    for kv_dtype in ("int8", "bf16"):
        for context in contexts:
            for size in rows:
                yield replace(base, size=size, context=context, kv_dtype=kv_dtype)
        yield replace(base, donates=False, kv_dtype=kv_dtype)
        chunk = replace(base, program="extend", kv_dtype=kv_dtype)
        for size in (64, 256) if model == "small" else (256, 2048):
            yield replace(chunk, size=size)
    for size in rows:
        yield replace(base, size=size, ple_dtype="bf16")
        yield replace(base, size=size, weights="bf16", ple_dtype="bf16", kv_dtype="bf16")


def capacities(model: str, limit_bytes: int | None) -> Iterator[Case]:
    """List the cases whose most rows are searched; `limit_bytes` as in Case."""
    context, chunk = (256, 256) if model == "small" else (8192, 2048)
    base = Case(program="decode", size=1, context=context, model=model, is_probe=True)
    for kv_dtype in ("int8", "bf16"):
        decode = replace(base, kv_dtype=kv_dtype, limit_bytes=limit_bytes)
        yield from (decode, replace(decode, program="extend", size=chunk))


def name_of(case: Case) -> str:
    """Write a case, or what is searched with it, on one line; `--only` looks for parts of it."""
    if case.is_probe:
        question = "decode residency" if case.program == "decode" else "prefill admission"
        return f"capacity, {question}, context {case.context}, {case.kv_dtype} KV"
    parts = [case.program, str(case.size), f"context {case.context}", f"{case.weights} weights"]
    parts += [f"{case.ple_dtype} table", f"{case.kv_dtype} KV"]
    return ", ".join([*parts, "donated" if case.donates else "copying"])


def bisect(fits: Callable[[int], bool], high: int, guess: Callable[[], int | None]) -> int:
    """Return the most of [0, high] that fits, where less than what fits does too; 0 is not asked.

    Each question lies where the border is guessed to be, or in the middle of what is left. So a
    good guess is confirmed by two questions, and the worst cost no more than MAX_GUESSES.
    """
    low = 0
    for asked in count():
        if low >= high:
            break
        guessed = guess() if asked < MAX_GUESSES else None
        middle = (low + high + 1) // 2
        n = middle if guessed is None else min(max(guessed, low + 1), high)
        if fits(n):
            low = n
        else:
            high = n - 1
    return low


def guess_rows(probes: Sequence[Answer], limit_bytes: int) -> int | None:
    """Return the most rows that fit by the line through the two probes nearest to the limit.

    Weights are the bytes of no rows. None: no probe told its bytes.
    """
    points = {p["rows"]: p["device_bytes"] for p in probes if "device_bytes" in p}
    if not points:
        return None
    points |= {0: next(p["weight_bytes"] for p in probes if "weight_bytes" in p)}
    (a, bytes_a), (b, bytes_b) = sorted(points.items(), key=lambda p: abs(p[1] - limit_bytes))[:2]
    if bytes_a == bytes_b:
        return None
    return int((a + (limit_bytes - bytes_a) * (b - a) / (bytes_b - bytes_a)) // 1)


class Revalidation:
    """Asks one question a process, and keeps the answers."""

    def __init__(self, record: Record, ask: Callable[[Case], Answer], limit_bytes: int) -> None:
        """`limit_bytes` are the device's, as far as it tells."""
        self._record, self._ask, self._limit_bytes = record, ask, limit_bytes
        self.num_faults = 0

    def run(self, case: Case) -> str:
        """Measure or estimate a case, or search the most rows; returns what came of it."""
        if case.is_probe:
            return self._search(case)
        answer = self._answer(case)
        if "error" in answer:
            self.num_faults += "fits" not in answer
            return str(answer["error"])
        if "median_ms" in answer:
            low_ms, high_ms = answer["iqr_ms"]
            return f"{answer['median_ms']:.3f} ms (IQR {low_ms:.3f} to {high_ms:.3f})"
        return f"estimated {answer['estimated_ms']:.3f} ms"

    def _search(self, case: Case) -> str:
        """Find the most rows of full context that fit a probe of this case."""
        probes: list[Answer] = []

        def fits(rows: int) -> bool:
            answer = self._answer(with_rows(case, rows))
            if "fits" not in answer:
                raise _NoAnswerError(f"{rows} rows: {answer['error']}")
            probes.append({"rows": rows, **answer})
            verb = "fit" if answer["fits"] else "do not fit"
            print(f"  {rows} rows {verb}", flush=True)
            return bool(answer["fits"])

        found: Answer = {"question": name_of(case), "case": asdict(case)}
        try:
            rows = bisect(
                fits,
                most_rows(case, self._limit_bytes),
                lambda: guess_rows(probes, self._limit_bytes),
            )
        except _NoAnswerError as error:
            self.num_faults += 1
            self._record.add_capacity({**found, "error": str(error)})
            return str(error)
        tokens = rows * case.context
        asked = [(probe["rows"], probe["fits"]) for probe in probes]
        self._record.add_capacity({**found, "rows": rows, "tokens": tokens, "asked": asked})
        return f"{rows} rows, {tokens} tokens, by {len(probes)} probes"

    def _answer(self, case: Case) -> Answer:
        known = self._record.find(asdict(case))
        if known is None:
            known = self._ask(case)
            self._record.add(asdict(case), known)
        return known


class _NoAnswerError(Exception):
    """A probe says neither that it fits nor that it does not."""


def with_rows(case: Case, rows: int) -> Case:
    """Return a probe for so many rows, which a decode decodes at once."""
    return replace(case, rows=rows, size=rows if case.program == "decode" else case.size)


def most_rows(case: Case, limit_bytes: int) -> int:
    """Return rows that more than which cannot fit, by weights, pages and slots alone."""
    stored = "int8" if case.kv_dtype == "int8" else "bfloat16"
    page_bytes = bytes_per_page(config_of(case.model), "full", PAGE_SIZE, stored)
    return bisect(
        lambda rows: argument_bytes(with_rows(case, rows)) <= limit_bytes,
        limit_bytes // (pages_for(case.context) * page_bytes),
        lambda: None,
    )


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--all", action="store_true", help="every case, and the capacities")
    chosen.add_argument("--only", metavar="TEXT", help="what has this in its name: capacity, …")
    parser.add_argument("--out", type=Path, required=True, help="JSON; gone on with if it is there")
    parser.add_argument("--estimate", action="store_true", help="by the TPU compiler, not measured")
    parser.add_argument("--limit-bytes", type=int, help="of capacities; default: the device's")
    parser.add_argument("--case-s", type=float, default=3600.0, help="longest that a case may take")
    return parser.parse_args()


def stop_on_signals(out: Path) -> None:
    """End with what is started, by an exception, where a signal would leave that behind."""

    def stop(number: int, _: FrameType | None) -> None:
        sys.stderr.write(f"\nstopped; the same command goes on with {out}\n")
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, stop)


def main() -> int:
    """Run what is asked for; return 1 where something has no answer."""
    parser = argparse.ArgumentParser(description="Measure the step programs, each by itself.")
    arguments = read_arguments(parser)
    stop_on_signals(arguments.out)
    mode: Mode = "estimate" if arguments.estimate else "measure"
    device = ask_process(mode, None, DEVICE_S)
    if "error" in device:
        sys.exit(f"no device answers: {device['error']}")
    model = "small" if mode == "measure" and device["platform"] == "cpu" else "e2b"
    record = Record(arguments.out, mode, device)
    if len(record):
        print(f"{arguments.out} has {len(record)} answers already, which stay", flush=True)
    # Measured, the limit is what the chip refuses, unless a smaller one is asked for.
    limit_bytes = arguments.limit_bytes or (
        SMALL_BYTES if model == "small" else device["limit_bytes"]
    )
    if limit_bytes is None:
        parser.error("the device does not tell its memory: --limit-bytes has to")
    asks_chip = mode == "measure" and model != "small" and arguments.limit_bytes is None
    questions = [*cases(model), *capacities(model, None if asks_chip else limit_bytes)]
    chosen = [q for q in questions if arguments.all or arguments.only in name_of(q)]
    if not chosen:
        names = "\n".join(map(name_of, questions))
        sys.exit(f"nothing has {arguments.only!r} in its name:\n{names}")
    run = Revalidation(record, lambda case: ask_process(mode, case, arguments.case_s), limit_bytes)
    for i, question in enumerate(chosen, 1):
        print(f"{i} of {len(chosen)}: {name_of(question)}", flush=True)
        print(f"  {run.run(question)}", flush=True)
    if run.num_faults:
        sys.stderr.write(f"{run.num_faults} have no answer; the same command asks them again\n")
    return int(run.num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())

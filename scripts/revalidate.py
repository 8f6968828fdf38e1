#!/usr/bin/env python3
"""Measure the server's step programs on the chip that is here, each in a fresh process.

On a TPU it measures Gemma 4 E2B; with `--estimate` it asks the TPU compiler, which needs the extra
`tpu` and no chip; on a CPU it measures a small model, which tries this script and nothing else. One
JSON file holds all results, written anew after each: docs/tpu.md.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxserve.device.plan import PAGE_SIZE, pages_for
from jaxserve.models.kv_cache import bytes_per_page
from scripts.revalidate_one import Case, Mode, config_of
from scripts.tpu_kernels import QUIET

ROOT = Path(__file__).parent.parent
SMALL_BYTES = 8 << 20  # of the small model's device, which is no more than a number


def cases(model: str, *, contexts: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[Case]:
    """List what is measured: grids of rows and context, then one thing changed at a time."""
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


def bisect(fits: Callable[[int], bool], high: int) -> int:
    """Return the most of [0, high] that fits, where less than what fits does too; 0 is not asked.

    Halves the interval at each question: log2(high) of them, not one for each doubling.
    """
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class Revalidation:
    """Asks one question a process, and keeps the answers."""

    def __init__(self, mode: Mode, out: Path, ask: Callable[[Case | None], dict[str, Any]]) -> None:
        self._ask, self._out = ask, out
        made = datetime.now(UTC).isoformat(timespec="seconds")
        self.record: dict[str, Any] = {
            "mode": mode,
            "made": made,
            "device": ask(None),
            "results": [],
            "capacity": [],
        }

    def step(self, case: Case) -> None:
        """Measure or estimate a case."""
        result = self._ask(case)
        self.record["results"].append({"case": asdict(case), **result})
        self._save()
        if "error" in result:
            print(f"{name_of(case)}: {result['error']}", flush=True)
        elif "median_ms" in result:
            low_ms, high_ms = result["iqr_ms"]
            times = f"{result['median_ms']:.3f} ms (IQR {low_ms:.3f} to {high_ms:.3f})"
            print(f"{name_of(case)}: {times}", flush=True)
        else:
            print(f"{name_of(case)}: estimated {result['estimated_ms']:.3f} ms", flush=True)

    def capacity(self, case: Case, limit_bytes: int | None) -> None:
        """Find the most rows of full context that fit a probe of this case."""
        probes: list[dict[str, Any]] = []

        def fits(rows: int) -> bool:
            size = rows if case.program == "decode" else case.size
            probe = replace(case, is_probe=True, rows=rows, size=size, limit_bytes=limit_bytes)
            probes.append({"rows": rows, **self._ask(probe)})
            if "fits" not in probes[-1]:
                raise SystemExit(f"{name_of(probe)}, {rows} rows: {probes[-1]['error']}")
            return bool(probes[-1]["fits"])

        rows = bisect(fits, most_rows(case, limit_bytes or self.record["device"]["limit_bytes"]))
        question = "decode residency" if case.program == "decode" else "prefill admission"
        self.record["capacity"].append(
            {
                "question": question,
                "case": asdict(case),
                "rows": rows,
                "tokens": rows * case.context,
                "probes": probes,
            }
        )
        self._save()
        found = f"{rows} rows, {rows * case.context} tokens, by {len(probes)} probes"
        print(f"{question}, context {case.context}, {case.kv_dtype} KV: {found}", flush=True)

    def _save(self) -> None:
        partial = self._out.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=1), encoding="utf-8")
        partial.replace(self._out)


def most_rows(case: Case, limit_bytes: int) -> int:
    """Return rows that more than which cannot fit, by their full-attention pages alone."""
    dtype = "int8" if case.kv_dtype == "int8" else "bfloat16"
    page_bytes = bytes_per_page(config_of(case.model), "full", PAGE_SIZE, dtype)
    return limit_bytes // (pages_for(case.context) * page_bytes)


def ask_process(mode: Mode, case: Case | None) -> dict[str, Any]:
    """Answer in a fresh process: a chip's memory is then empty, and libtpu is loaded once."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.revalidate_one"],
        input=json.dumps({"mode": mode, "case": None if case is None else asdict(case)}),
        cwd=ROOT,
        env={**os.environ, **(QUIET if mode == "estimate" else {})},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        if case is None:
            sys.exit("no device answers")
        return {"error": f"the process ended with {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def name_of(case: Case) -> str:
    """Write a case on one line; `--only` looks for parts of it."""
    parts = [case.program, str(case.size), f"context {case.context}", f"{case.weights} weights"]
    parts += [f"{case.ple_dtype} table", f"{case.kv_dtype} KV"]
    return ", ".join([*parts, "donated" if case.donates else "copying"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the step programs, each by itself.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--all", action="store_true", help="every case, and the capacities")
    chosen.add_argument("--only", metavar="TEXT", help="cases whose name has this, or 'capacity'")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--estimate", action="store_true", help="by the TPU compiler, not measured")
    parser.add_argument("--limit-bytes", type=int, help="of capacities; default: the device's")
    arguments = parser.parse_args()
    mode: Mode = "estimate" if arguments.estimate else "measure"
    run = Revalidation(mode, arguments.out, lambda case: ask_process(mode, case))
    device = run.record["device"]
    is_small = mode == "measure" and device["platform"] == "cpu"
    model = "small" if is_small else "e2b"
    contexts, rows = ((128, 256), (1, 4)) if is_small else ((1024, 8192), (1, 8, 32))
    for case in cases(model, contexts=contexts, rows=rows):
        if arguments.all or arguments.only in name_of(case):
            run.step(case)
    if not arguments.all and arguments.only != "capacity":
        return
    limit_bytes = arguments.limit_bytes or (SMALL_BYTES if is_small else None)
    if mode == "estimate":
        limit_bytes = limit_bytes or device["limit_bytes"]
    for kv_dtype in ("int8", "bf16"):
        largest = Case(
            program="decode", size=1, context=contexts[-1], model=model, kv_dtype=kv_dtype
        )
        run.capacity(largest, limit_bytes)
        chunk = 256 if is_small else 2048
        run.capacity(replace(largest, program="extend", size=chunk), limit_bytes)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compile the server's own step programs for one TPU v6e, without one, and print what they cost.

Needs the extra `tpu`, for libtpu holds the compiler; shapes stand for the weights. All times are
estimated, by the compiler, from its instructions, or as bytes over bandwidth: docs/tpu.md. A
program takes minutes. `--check` holds them against scripts/tpu_limits.toml.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.memory import PageMix
from jaxserve.device.plan import AttentionKernel, extend_buckets, make_plan
from jaxserve.device.runner import StepProgram, lowerings, step_programs
from jaxserve.models.config import ModelConfig
from jaxserve.models.fields import Fields
from jaxserve.models.gemma4 import read_config
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.specs import Use, abstract_params
from scripts.tpu_kernels import QUIET
from scripts.tpu_steps import Estimate, estimate_step, on_chip, tree_bytes

DTYPE = "bfloat16"
MAX_COMPILES = 2
TOKENS_PER_RESUME_POINT = 8192
HBM_BYTES = 32e9
RESIDENT_BYTES = 28e9  # weights and KV: a pool smaller than VMEM would be copied there and back
HEADROOM = 1.15
LIMITS = Path(__file__).with_name("tpu_limits.toml")

SIZES = {  # model dim, ffn, layers, of them sharing KV, kv heads, sliding layers to each full one
    "e2b": (1536, 6144, 35, 20, 1, 4),
    "e4b": (2560, 10240, 42, 18, 2, 5),
}

COLUMNS = (
    *("program", "weights", "KV", "temp", "aliased", "compile s"),
    *("cycles", "kernels", "gathers", "estimated", "floor", "ratio", "all branches", "sorts"),
)


def model_config(name: str, num_layers: int | None = None) -> ModelConfig:
    """Describe a Gemma 4 size as its config.json would.

    With `num_layers`, whole periods of sliding layers and a full one, later ones share KV.
    """
    model_dim, mlp_dim, all_layers, num_shared, num_kv_heads, num_sliding = SIZES[name]
    period = num_sliding + 1
    if num_layers is not None:
        all_layers, num_shared = num_layers, num_layers // period // 2 * period
    full_rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    text = {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": model_dim,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": mlp_dim,
        "use_double_wide_mlp": name == "e2b",
        "num_hidden_layers": all_layers,
        "num_kv_shared_layers": num_shared,
        "layer_types": [*["sliding_attention"] * num_sliding, "full_attention"]
        * (all_layers // period),
        "sliding_window": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": full_rope,
        },
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
    }
    return read_config(Fields(text, name))


def name_of(program: StepProgram) -> str:
    """Name a program as the options do."""
    if isinstance(program, DecodeBucket):
        return f"decode {program.rows}"
    return f"{'score' if program.scores else 'extend'} {program.bucket.tokens}"


def find_faults(
    made: Estimate, measured: Mapping[str, float], limits: Mapping[str, float]
) -> list[str]:
    """Say what `--check` refuses in a program.

    `measured` and `limits` are by the same names; what has no limit is not checked.
    """
    found = []
    if made.alias_bytes < made.donated_bytes:
        found.append(
            f"{made.alias_bytes} bytes are aliased, of {made.donated_bytes} of KV and state"
        )
    if made.pool_copies:
        found.append(f"whole KV arrays are made by {', '.join(made.pool_copies)}")
    for name, limit in limits.items():
        if measured[name] > limit:
            found.append(f"{name} {measured[name]:.3f} exceeds {limit}")
    return found


class Report:
    """Compiles programs of one model and prints a row for each."""

    def __init__(
        self,
        config: ModelConfig,
        max_batch: int,
        context: int,
        packed_uses: set[Use],
        kv_dtype: KVDtype,
        attention: AttentionKernel,
        limits: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._config = config
        self._limits = limits
        self.reached: dict[str, dict[str, float]] = {}
        self._params = on_chip(abstract_params(config, DTYPE, packed_uses))
        mix = PageMix.of_model(
            config,
            kv_dtype,
            max_batch=max_batch,
            chunk_tokens=extend_buckets(context, is_accelerator=True)[-1].tokens,
            tokens_per_point=TOKENS_PER_RESUME_POINT,
        )
        num_pages = mix.num_pages(int(RESIDENT_BYTES) - tree_bytes(self._params))
        self._plan = make_plan(
            dtype=DTYPE,
            kv_dtype=kv_dtype,
            num_pages=num_pages,
            num_sliding_pages=mix.num_sliding_pages(num_pages),
            max_batch=max_batch,
            max_model_len=context,
            is_accelerator=True,
            attention=attention,
        )
        lower = lowerings(self._plan, config, self._params)
        self.programs = {
            name_of(program): (program, lower[program])
            for program in step_programs(self._plan)
            if program.table_size == self._plan.table_sizes[-1]
        }

    def compile(self, name: str) -> list[str]:
        """Compile a program, print its row, and return its faults."""
        program, lower = self.programs[name]
        made = estimate_step(program, self._plan, self._config, self._params, lower)
        ratio = sum(made.least) / made.floor_ms
        sizes = (made.weight_bytes, made.kv_bytes, made.temp_bytes, made.alias_bytes)
        cells = [name, *(f"{n / 1e9:.3f}" for n in sizes), f"{made.compile_s:.0f}"]
        calls = ", ".join(f"{count} {kernel}" for kernel, count in made.kernels.items()) or "none"
        cells += [f"{made.least.cycles_ms:.2f}", f"{made.least.kernel_ms:.2f} ({calls})"]
        times = (made.least.gather_ms, sum(made.least), made.floor_ms, ratio, sum(made.most))
        cells += [f"{value:.2f}" for value in times]
        cells.append(str(made.num_sorts))
        print("|", " | ".join(cells), "|", flush=True)
        self.reached[name] = {"temp_gb": made.temp_bytes / 1e9, "ratio": ratio}
        measured = {**self.reached[name], "device_gb": made.device_bytes / 1e9}
        limits = {"device_gb": HBM_BYTES / 1e9, **self._limits.get(name, {})}
        return [f"{name}: {fault}" for fault in find_faults(made, measured, limits)]


def limit_line(name: str, reached: Mapping[str, float]) -> str:
    """Return a line of scripts/tpu_limits.toml that leaves what a program reached some room."""
    limits = (f"{key} = {value * HEADROOM:.2g}" for key, value in reached.items())
    return f'"{name}" = {{ {", ".join(limits)} }}'


def read_limits(options: str) -> dict[str, dict[str, float]]:
    """Return the limits of each program that scripts/tpu_limits.toml has for these options."""
    limits: dict[str, Any] = tomllib.loads(LIMITS.read_text(encoding="utf-8"))
    found: dict[str, dict[str, float]] = limits.get(options, {})
    return found


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Estimate the step programs on one TPU v6e.")
    parser.add_argument("--model", choices=SIZES, default="e2b")
    parser.add_argument("--layers", type=int, help="only so many; whole periods of 5, for E4B 6")
    parser.add_argument("--weights", choices=("bf16", "int4"), default="bf16", help="of linears")
    parser.add_argument("--ple-dtype", choices=("bf16", "int4"), default="bf16")
    parser.add_argument("--head-dtype", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--kv-dtype", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--attention", choices=("pallas", "xla"), default="pallas")
    parser.add_argument("--batch", default="1,8,32", help="rows of decodes, powers of two")
    parser.add_argument("--extend", default="256,2048", help="tokens of extends; may be empty")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--check", action="store_true", help="exit 1 where something is wrong")
    return parser.parse_args()


def main() -> int:
    """Print the table; return 1 where `--check` finds fault."""
    args = read_arguments()
    os.environ |= QUIET
    jax.config.update("jax_platforms", "cpu")

    options = (
        f"{args.model}, {args.weights} weights, {args.ple_dtype} table, {args.kv_dtype} KV,"
        f" {args.attention} attention, context {args.context}"
    )
    if args.head_dtype == "int8":
        options += ", int8 head"
    if args.layers:
        options += f", {args.layers} layers"
    packed_uses: set[Use] = {"linear"} if args.weights == "int4" else set()
    if args.ple_dtype == "int4":
        packed_uses.add("ple_table")
    if args.head_dtype == "int8":
        packed_uses.add("embedding")
    rows = [int(n) for n in args.batch.split(",") if n]
    config = model_config(args.model, args.layers)
    kv_dtype: KVDtype = "int8" if args.kv_dtype == "int8" else "bfloat16"
    max_batch = max(rows, default=8)
    limits = read_limits(options)
    report = Report(config, max_batch, args.context, packed_uses, kv_dtype, args.attention, limits)
    names = [f"decode {n}" for n in rows] + [f"extend {n}" for n in args.extend.split(",") if n]
    if unknown := set(names) - set(report.programs):
        sys.exit(f"not among {', '.join(report.programs)}: {', '.join(unknown)}")
    print(f"{options}: on one v6e; GB, and estimated ms\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    with ThreadPoolExecutor(MAX_COMPILES) as pool:
        faults = [fault for found in pool.map(report.compile, names) for fault in found]
    lines = [limit_line(name, report.reached[name]) for name in names]
    print(f'\nAs limits, with room:\n\n["{options}"]', *lines, sep="\n", flush=True)
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return int(args.check and bool(faults))


if __name__ == "__main__":
    sys.exit(main())

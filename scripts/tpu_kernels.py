#!/usr/bin/env python3
"""Estimate Pallas kernels, which carry no cycles in the compiler's HLO, from their instructions.

Run by scripts/tpu_report.py in a process of its own, for libtpu reads its flags once: it compiles
each kernel alone, has libtpu write its final instruction bundles, and multiplies those of the
grid's loop by its steps. A bundle is a cycle, unless it waits: a lower bound of the computing. The
kernel takes that or its bytes' time, whichever is longer, and before it the transfer of the first
step's blocks, which nothing hides.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxserve.device import targets
from jaxserve.kernels import int4_kernels
from jaxserve.kernels.attention_layer import AttentionLayer
from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.extend_attention import extend_attention
from jaxserve.kernels.extend_writer import write_windows
from jaxserve.kernels.int4_matrix import Int4Matrix
from jaxserve.kernels.page_reader import chunk_pages
from scripts.tpu_hlo import CLOCK_HZ, HBM_BYTES_PER_S, Kernel

QUIET = targets.QUIET | {"JAX_PLATFORMS": "cpu"}
Shapes = tuple[tuple[int, ...], ...]
EPS = 1e-6

MAX_BLOCK_MOVE = 64
"""Bundles, at most, that start or await the transfer of a step's blocks."""


def lower_int4(kernel: Kernel, chip: SingleDeviceSharding) -> jax.stages.Lowered:
    """Lower a product with int4 weights for operands of these shapes, as the kernel takes them."""

    def array(shape: tuple[int, ...], dtype: object) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct(shape, dtype, sharding=chip)

    name, shapes = kernel.name, kernel.shapes
    words, steps = (shapes[2], shapes[3]) if name in NORMED else (shapes[1], shapes[2])
    weight = Int4Matrix(
        words_WO=array(words, jnp.int32),
        steps_GO=array(steps, jnp.bfloat16),
        shape=(words[1], words[0] * 8),
    )
    function: Any = int4_kernels.matmul_kernel
    operands = [array(shapes[0], DTYPES[kernel.dtypes[0]])]
    if name in NORMED:
        function = partial(NORMED[name], eps=EPS)
        operands.append(array(shapes[1][1:], jnp.float32))
    elif name == "int4_added_matmul":
        function = partial(int4_kernels.added_kernel, eps=EPS)
        operands += [array(shapes[3], jnp.float32), array(shapes[4][1:], jnp.float32)]
    traced = jax.jit(function).trace(weight, *operands)
    lowered: jax.stages.Lowered = traced.lower(lowering_platforms=("tpu",))
    return lowered


def lower_attention(kernel: Kernel, chip: SingleDeviceSharding) -> jax.stages.Lowered:
    """Lower an attention kernel for operands of these shapes; its name has its parameters."""
    table, *others, norms, cos, sin, first, second = (
        jax.ShapeDtypeStruct(shape, DTYPES[dtype], sharding=chip)
        for shape, dtype in zip(kernel.shapes, kernel.dtypes, strict=True)
    )
    if second.shape[1] == 1:  # rows of scales
        shape = (second.shape[0], second.shape[2])
        second = jax.ShapeDtypeStruct(shape, second.dtype, sharding=chip)
    pages = (first, second)
    row = jax.ShapeDtypeStruct(table.shape[:1], jnp.int32, sharding=chip)
    kind, work, how, heads, kv_heads, window, flags = kernel.name.split("_")
    layer = AttentionLayer(
        num_heads=int(heads),
        num_kv_heads=int(kv_heads),
        head_dim=2 * cos.shape[1],
        eps=EPS,
        scale=1.0,
        window=int(window) or None,
        has_v=flags[0] == "t",
        norms_v=flags[1] == "t",
        dtype=jnp.bfloat16,
    )
    # A kernel alone returns its pages: they must be donated, or they would be copied.
    donated: int | tuple[()] = 3
    rows: tuple[Any, ...] = (table, row, row, row)
    if kind == "decode":
        function: Any = partial(decode_attention, layer=layer, writes=how == "writes")
    else:
        norms = jax.ShapeDtypeStruct(norms.shape[1:], norms.dtype, sharding=chip)
        if work == "writer":
            function, rows = partial(write_windows, layer=layer, block=int(how)), (table, others[0])
        else:
            function, donated = partial(extend_attention, layer=layer, block=int(how)), ()
    traced = jax.jit(function, donate_argnums=donated).trace(
        others[-1], norms, (cos, sin), pages, *rows
    )
    lowered: jax.stages.Lowered = traced.lower(lowering_platforms=("tpu",))
    return lowered


def inner_trips(kernel: Kernel) -> int | None:
    """Return the trips of the loop within a step of the grid: a row's chunks at full context."""
    if not kernel.name.startswith(ATTENTION) or kernel.name.startswith(WRITER):
        return None
    table_size, page_size = kernel.shapes[0][1], kernel.shapes[-2][1]
    return -(-table_size // chunk_pages(table_size, page_size))


DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "s16": jnp.int16, "s32": jnp.int32}
WRITER = "extend_writer"
ATTENTION = ("extend_attention", "decode_attention", WRITER)
NORMED = {
    "int4_normed_matmul": int4_kernels.normed_kernel,
    "int4_gated_matmul": int4_kernels.gated_kernel,
}


def read_bundles(text: str, trips: int | None = None, usual: str = "vmatmul") -> tuple[int, int]:
    """Return the steps of a kernel's grid and the bundles of all, of final bundles as dumped.

    A loop within a step makes `trips`, each a step of its own; what loops within it counts once.
    What is skipped by a branch and has no `usual` operation, such as a norm or zeros for a new sum,
    runs in one step of each innermost loop; if it is short, it moves blocks and runs in each.
    """
    parts = re.split(r"^ *0x[0-9a-f]+ *(?:[A-Z]+)? *: *(>*) *(?=\{)", text, flags=re.MULTILINE)
    depths, bundles = [len(depth) for depth in parts[1::2]], parts[2::2]
    if max(depths) == 0:  # a grid of one step is no loop
        return 1, len(bundles)
    grid = re.search(r"^iteration_bounds: \(([\d, ]+)\)", text, re.MULTILINE)
    bounds = [int(bound) for bound in grid[1].split(",")] if grid else [1]
    num_steps = math.prod(bounds)
    own = 0 if num_steps == 1 else 1
    if max(depths) > own and trips is None:
        raise ValueError("the kernel has a loop that is not its grid, whose trips are not told")
    num_rare = {True: 0, False: 0}  # by whether it is in the inner loop
    for i, bundle in enumerate(bundles):
        for region in re.findall(r"sbr\.rel \(.*?\) target = \$region(\d+)", bundle):
            ends = (j for j, b in enumerate(bundles) if j > i and f"empty region {region} " in b)
            skipped = bundles[i + 1 : next(ends, i)]
            if len(skipped) > MAX_BLOCK_MOVE and not any(usual in b for b in skipped):
                num_rare[depths[i] > own] += len(skipped)
    num_inner = sum(depth > own for depth in depths) - num_rare[True]
    num_usual = depths.count(own) - num_rare[False] + num_rare[True]
    trips = trips or 1
    total = num_steps * (num_usual + trips * num_inner)
    return num_steps * trips, total + num_steps // bounds[-1] * num_rare[False]


def estimate_ms(kernel: Kernel, num_steps: int, bundles: int) -> float:
    """Return the kernel's time from its grid, the bundles of all steps and the bytes it moves."""
    compute_s = bundles / CLOCK_HZ
    move_s = kernel.num_bytes / HBM_BYTES_PER_S
    return (max(compute_s, move_s) + move_s / num_steps) * 1e3


def estimate(kernels: Iterable[Kernel]) -> dict[Kernel, float]:
    """Estimate distinct kernels, ms each, in a process of its own."""
    todo = sorted(set(kernels))
    if not todo:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        done = subprocess.run(
            [sys.executable, __file__, folder],
            input=json.dumps(todo),
            env={**os.environ, **QUIET, "LIBTPU_INIT_ARGS": dump},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    grids = json.loads(done.stdout.splitlines()[-1])
    return {kernel: estimate_ms(kernel, *grid) for kernel, grid in zip(todo, grids, strict=True)}


def main() -> None:
    """Read kernels as JSON; write each one's grid steps and bundles."""
    from jax.experimental import topologies

    folder = Path(sys.argv[1])
    topology = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=(1, 1, 1))
    chip = SingleDeviceSharding(topology.devices[0])
    grids = []
    for name, shapes, num_bytes, dtypes in json.load(sys.stdin):
        kernel = Kernel(name, tuple(tuple(shape) for shape in shapes), num_bytes, tuple(dtypes))
        lower = lower_attention if name.startswith(ATTENTION) else lower_int4
        lower(kernel, chip).compile()
        (dumped,) = (
            path
            for path in folder.glob(f"*-{name}.*final_bundles.txt")
            if "schedule-analysis" not in path.name
        )
        usual = (
            "vrsqrt" if name.startswith(WRITER) else "vmatmul"
        )  # it norms and multiplies nothing
        grids.append(read_bundles(dumped.read_text(), inner_trips(kernel), usual))
        for path in folder.iterdir():
            path.unlink()
    print(json.dumps(grids))


if __name__ == "__main__":
    main()

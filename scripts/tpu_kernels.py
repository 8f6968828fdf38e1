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

from jaxserve.kernels import int4_kernels
from jaxserve.kernels.int4_matrix import Int4Matrix
from scripts.tpu_hlo import CLOCK_HZ, HBM_BYTES_PER_S, Kernel

QUIET = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
Shapes = tuple[tuple[int, ...], ...]
EPS = 1e-6

MAX_BLOCK_MOVE = 64
"""Bundles, at most, that start or await the transfer of a step's blocks."""


def lower_int4(name: str, shapes: Shapes, chip: SingleDeviceSharding) -> jax.stages.Lowered:
    """Lower a product with int4 weights for operands of these shapes, as the kernel takes them."""

    def array(shape: tuple[int, ...], dtype: object) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct(shape, dtype, sharding=chip)

    words, steps = (shapes[2], shapes[3]) if name in NORMED else (shapes[1], shapes[2])
    weight = Int4Matrix(
        words_WO=array(words, jnp.int32),
        steps_GO=array(steps, jnp.bfloat16),
        shape=(words[1], words[0] * 8),
    )
    kernel: Any = int4_kernels.matmul_kernel
    operands = [array(shapes[0], jnp.bfloat16)]
    if name in NORMED:
        kernel = partial(NORMED[name], eps=EPS)
        operands = [array(shapes[0], jnp.float32), array(shapes[1][1:], jnp.float32)]
    elif name == "int4_added_matmul":
        kernel = partial(int4_kernels.added_kernel, eps=EPS)
        operands += [array(shapes[3], jnp.float32), array(shapes[4][1:], jnp.float32)]
    traced = jax.jit(kernel).trace(weight, *operands)
    lowered: jax.stages.Lowered = traced.lower(lowering_platforms=("tpu",))
    return lowered


NORMED = {
    "int4_normed_matmul": int4_kernels.normed_kernel,
    "int4_gated_matmul": int4_kernels.gated_kernel,
}
LOWER = dict.fromkeys((*NORMED, "int4_matmul", "int4_added_matmul"), lower_int4)


def read_bundles(text: str) -> tuple[int, int]:
    """Return the steps of a kernel's grid and the bundles of all, of final bundles as dumped.

    What is skipped by a branch and multiplies nothing, such as a norm or zeros for a new sum, runs
    in one step of each innermost loop; if it is short, it moves blocks and runs in each.
    """
    parts = re.split(r"^ *0x[0-9a-f]+ *(?:[A-Z]+)? *: *(>*) *(?=\{)", text, flags=re.MULTILINE)
    depths, bundles = parts[1::2], parts[2::2]
    if ">>" in depths:
        raise ValueError("the kernel has a loop within its grid, whose trips are not told")
    if ">" not in depths:  # a grid of one step is no loop
        return 1, len(bundles)
    grid = re.search(r"^iteration_bounds: \(([\d, ]+)\)", text, re.MULTILINE)
    if grid is None:
        raise ValueError("the kernel has a loop, but tells no grid")
    bounds = [int(bound) for bound in grid[1].split(",")]
    num_rare = 0
    for i, bundle in enumerate(bundles):
        for region in re.findall(r"sbr\.rel \(.*?\) target = \$region(\d+)", bundle):
            ends = (j for j, b in enumerate(bundles) if j > i and f"empty region {region} " in b)
            skipped = bundles[i + 1 : next(ends, i)]
            if len(skipped) > MAX_BLOCK_MOVE and not any("vmatmul" in b for b in skipped):
                num_rare += len(skipped)
    num_steps = math.prod(bounds)
    num_usual = depths.count(">") - num_rare
    return num_steps, num_steps * num_usual + num_steps // bounds[-1] * num_rare


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
    for name, shapes, _ in json.load(sys.stdin):
        LOWER[name](name, tuple(tuple(shape) for shape in shapes), chip).compile()
        (dumped,) = (
            path
            for path in folder.glob(f"*-{name}.*final_bundles.txt")
            if "schedule-analysis" not in path.name
        )
        grids.append(read_bundles(dumped.read_text()))
        for path in folder.iterdir():
            path.unlink()
    print(json.dumps(grids))


if __name__ == "__main__":
    main()

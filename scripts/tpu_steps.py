"""What the TPU compiler says of one step program: bytes, estimated time, what it copies.

Shared by the scripts that ask it; needs libtpu only where it compiles. All times are estimated.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.plan import PAGE_SIZE, DevicePlan
from jaxserve.device.runner import StepProgram, empty_cache, empty_state
from jaxserve.device.targets import find_target_by_name
from jaxserve.errors import InvariantError
from jaxserve.kernels.int4_matrix import Int4Matrix
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.params import Params
from scripts.tpu_hlo import HBM_BYTES_PER_S, Cost, Hlo
from scripts.tpu_kernels import estimate

FLOPS_PER_S = 918e12


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a compiled program has on the device while it runs.

    Attributes:
        donated_bytes: of KV and state, all of which should be aliased.
        device_bytes: all of it: arguments, used or not, temp, and results with no argument's place.
    """

    weight_bytes: int
    kv_bytes: int
    donated_bytes: int
    temp_bytes: int
    alias_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(StepBytes):
    """A compiled program.

    Attributes:
        least: with each conditional's cheapest branch.
        most: with the dearest.
        kernels: calls of each Pallas kernel.
        pool_copies: what makes a whole KV array anew.
    """

    compile_s: float
    least: Cost
    most: Cost
    floor_ms: float
    kernels: Counter[str]
    num_sorts: int
    pool_copies: list[str]


def on_chip(shapes: Any) -> Any:
    """Place shapes on one v6e that is not there."""
    chip = find_target_by_name("v6e:1x1").sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), shapes
    )


def tree_bytes(tree: object) -> int:
    """Return the size of all leaves."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def num_weights(tree: object) -> int:
    """Return the weights of all leaves; an int4 matrix has more of them than elements."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Int4Matrix))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def floor_ms(program: StepProgram, config: ModelConfig, params: Params, kv_dtype: KVDtype) -> float:
    """Return the least time: what must come from HBM, or the products, whichever takes longer.

    Of HBM weights, and what each layer's attention reads; of products those with weights. An extend
    is counted for one sequence at full context, and without sampling unless it scores.
    """
    rows, new, num_layers, head = 1, 1, config.num_layers, [params.embed_VD]
    if isinstance(program, DecodeBucket):
        rows = program.rows
    else:
        new = program.bucket.tokens
        if not program.scores:
            num_layers, head = config.num_writing_layers, []
    num_bytes = 0
    for layer in config.layers[:num_layers]:
        full = program.table_size * PAGE_SIZE
        keys = full if layer.kind == "full" else min(full, config.window + new - 1)
        # A head's key or value: int8 with a float32 scale, or bfloat16.
        head_bytes = layer.head_dim + 4 if kv_dtype == "int8" else layer.head_dim * 2
        num_bytes += rows * keys * layer.num_kv_heads * head_bytes * 2
    weights = (params.layers[:num_layers], params.ple_model_proj, head)
    num_bytes += tree_bytes(weights)
    flops = 2 * rows * new * num_weights(weights)
    return max(num_bytes / HBM_BYTES_PER_S, flops / FLOPS_PER_S) * 1e3


def step_bytes(
    compiled: Compiled, plan: DevicePlan, config: ModelConfig, params: Params
) -> StepBytes:
    """Sum up the bytes of a program of the plan."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise InvariantError("this compiler tells nothing of its programs")
    weight_bytes = tree_bytes(params)
    kv_bytes = tree_bytes(jax.eval_shape(lambda: empty_cache(plan, config)))
    state_bytes = tree_bytes(jax.eval_shape(lambda: empty_state(plan, config)))
    new_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return StepBytes(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        donated_bytes=kv_bytes + state_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        device_bytes=weight_bytes
        + kv_bytes
        + state_bytes
        + memory.temp_size_in_bytes
        + max(new_bytes, 0),
    )


def estimate_step(
    program: StepProgram,
    plan: DevicePlan,
    config: ModelConfig,
    params: Params,
    lower: Callable[[], Lowered],
) -> Estimate:
    """Compile a program of the plan, which `lower` lowers, and read what came of it."""
    start_s = time.perf_counter()
    compiled = lower().compile()
    compile_s = time.perf_counter() - start_s
    text = compiled.as_text()
    if text is None:
        raise InvariantError("this compiler tells nothing of its programs")
    hlo = Hlo(text)
    hlo.kernel_ms = estimate(hlo.kernels())
    cache = jax.eval_shape(lambda: empty_cache(plan, config))
    return Estimate(
        **asdict(step_bytes(compiled, plan, config, params)),
        compile_s=compile_s,
        least=hlo.cost(min),
        most=hlo.cost(max),
        floor_ms=floor_ms(program, config, params, plan.kv_dtype),
        kernels=Counter(kernel.name for kernel in hlo.kernels()),
        num_sorts=sum(step.opcode == "sort" for step in hlo.steps()),
        pool_copies=hlo.pool_copies({math.prod(leaf.shape) for leaf in jax.tree.leaves(cache)}),
    )

"""One configuration of scripts/revalidate.py, in a process of its own: reads JSON, writes JSON.

Weights are synthetic, of a checkpoint's dimensions; the programs and the runner are the server's.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered

from jaxserve.device.buckets import DecodeBucket, ExtendChunk
from jaxserve.device.plan import PAGE_SIZE, DevicePlan, make_plan, pages_for
from jaxserve.device.runner import (
    ModelRunner,
    StepProgram,
    empty_cache,
    empty_state,
    lowerings,
    step_function,
    step_programs,
)
from jaxserve.device.targets import V6E_BYTES
from jaxserve.errors import InvariantError
from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.params import Params
from jaxserve.models.specs import Use, abstract_params
from jaxserve.models.windows import Windows
from jaxserve.types import SamplingParams
from scripts.tpu_report import SIZES, model_config
from scripts.tpu_steps import estimate_step, on_chip, tree_bytes

SAMPLES = 15
WARM_UPS = 3
STEPS_PER_SAMPLE = 8
"""Steps queued one behind another, as serving does, and timed together."""

SLOTS = 8
"""Of an extend's plan: it takes in so many sequences at once, at most."""

LEAST_PAGES = 8192
"""Of each kind, on a chip: pools that fit its VMEM would be moved there, which no server's are."""

Mode = Literal["measure", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        size: rows of a decode, tokens of an extend.
        context: positions of each row: what the step's last token attends to.
        donates: whether a step updates cache and state in place, as the server's do.
        is_probe: whether to say only if it fits.
        rows: of a probe: so many have pages of their full context, and are what a decode decodes;
            beside them an extend takes in one more.
        limit_bytes: of the device; None: what it has.
    """

    program: Literal["decode", "extend"]
    size: int
    context: int
    model: str = "e2b"
    weights: Literal["bf16", "int4"] = "int4"
    ple_dtype: Literal["bf16", "int4"] = "int4"
    kv_dtype: Literal["bf16", "int8"] = "int8"
    donates: bool = True
    is_probe: bool = False
    rows: int = 0
    limit_bytes: int | None = None

    @property
    def resident(self) -> int:
        """Rows whose pages are in use."""
        if self.is_probe:
            return self.rows
        return self.size if self.program == "decode" else 1


def config_of(model: str) -> ModelConfig:
    """Describe a model; "small" is one whose every step is quick on a CPU."""
    if model in SIZES:
        return model_config(model)
    config = model_config("e2b", 10)

    def layer(i: int, source: int) -> LayerConfig:
        big = config.layers[i]
        rope = replace(big.rope, num_pairs=big.rope.num_pairs // 8)
        return replace(
            big, head_dim=big.head_dim // 8, mlp_dim=256, kv_source=source, rope=rope, num_heads=4
        )

    layers = (layer(0, 0), layer(4, 1), layer(5, 0), layer(9, 1))
    return replace(
        config,
        layers=layers,
        model_dim=128,
        vocab_size=2048,
        ple_vocab_size=2048,
        ple_dim=128,
        window=64,
    )


def plan_of(case: Case, config: ModelConfig, *, is_accelerator: bool) -> DevicePlan:
    """Return a plan whose programs hold the case's, with pools for what the case is about."""
    windows = Windows(page_size=PAGE_SIZE, window=config.window)
    resident = case.resident + (case.is_probe and case.program == "extend")
    least = LEAST_PAGES if is_accelerator and not case.is_probe else 0
    num_new = case.size if case.program == "extend" else 1
    num_sliding = resident * windows.row_pages + pages_for(num_new)
    kv_dtype: KVDtype = "int8" if case.kv_dtype == "int8" else "bfloat16"
    return make_plan(
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        num_pages=1 + max(resident * pages_for(case.context), least),
        num_sliding_pages=1 + max(num_sliding, least),
        max_batch=max(case.resident, SLOTS if case.program == "extend" else 1),
        max_model_len=case.context,
        is_accelerator=is_accelerator,
        attention="pallas" if is_accelerator else "xla",
    )


def program_of(case: Case, plan: DevicePlan) -> StepProgram:
    """Find the case's program among the plan's."""
    for program in step_programs(plan):
        if program.table_size != plan.table_sizes[-1]:
            continue
        if isinstance(program, DecodeBucket):
            if case.program == "decode" and program.rows == plan.num_slots:
                return program
        elif case.program == "extend" and program.bucket.tokens == case.size and not program.scores:
            return program
    raise ValueError(f"no {case.program} of {case.size} in a context of {case.context}")


def int4_uses(case: Case) -> set[Use]:
    linear: set[Use] = {"linear"} if case.weights == "int4" else set()
    table: set[Use] = {"ple_table"} if case.ple_dtype == "int4" else set()
    return linear | table


def lower(
    program: StepProgram, plan: DevicePlan, config: ModelConfig, params: Params, *, donates: bool
) -> Lowered:
    """Lower a program as the server does, or without donation."""
    function, staged_shape = step_function(program, plan, config)
    return jax.jit(function, donate_argnums=(1, 2) if donates else ()).lower(
        params,
        jax.eval_shape(lambda: empty_cache(plan, config)),
        jax.eval_shape(lambda: empty_state(plan, config)),
        jax.ShapeDtypeStruct(staged_shape, jnp.int32),
    )


def synthetic_params(config: ModelConfig, uses: set[Use]) -> Params:
    """Make weights on the device: small values, words of any bits, and a table of zeros."""
    shapes = abstract_params(config, "bfloat16", uses)
    params: Params = jax.tree.map(
        lambda leaf: _pattern(leaf.shape, leaf.dtype), replace(shapes, ple_embed=None)
    )
    # Words of any bits would be steps that are not finite.
    table = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.ple_embed)
    return replace(params, ple_embed=table)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _pattern(shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    # A multiplicative hash: PRNGs take a second to compile, for each shape.
    bits: jax.Array = lax.iota(jnp.int32, math.prod(shape)).reshape(shape) * jnp.int32(-1640531527)
    if dtype == jnp.int32:
        return bits
    values: jax.Array = (bits >> 24).astype(jnp.float32) * 2.0**-12
    return values.astype(dtype)


def open_rows(runner: ModelRunner, plan: DevicePlan, config: ModelConfig, rows: int) -> None:
    """Give rows pages of their own; sliding tables repeat theirs, which only a window reads."""
    per_row = pages_for(plan.max_model_len)
    per_window = Windows(page_size=plan.page_size, window=config.window).row_pages
    greedy = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    for slot in range(rows):
        runner.open_slot(slot, greedy, (), ())
        kinds: dict[AttentionKind, Sequence[int]] = {
            "full": range(1 + slot * per_row, 1 + (slot + 1) * per_row),
            "sliding": [1 + slot * per_window + i % per_window for i in range(per_row)],
        }
        for kind, pages in kinds.items():
            runner.set_pages(slot, 0, pages, kind)


def run_steps(case: Case, runner: ModelRunner, times: int) -> float:
    """Queue so many steps, wait for the last, and return the seconds of one."""
    started_s = time.perf_counter()
    for _ in range(times):
        if case.program == "decode":
            pending = runner.decode(range(case.resident), [case.context - 1] * case.resident)
        else:
            ids = [2] * case.size
            chunk = ExtendChunk(slot=0, token_ids=ids, start=case.context - case.size, sample=False)
            pending = runner.extend([chunk])
    pending.token_ids()
    return (time.perf_counter() - started_s) / times


def measure(case: Case) -> dict[str, Any]:
    """Run a case on the device that is here."""
    config = config_of(case.model)
    is_accelerator = jax.default_backend() != "cpu"
    plan = plan_of(case, config, is_accelerator=is_accelerator)
    program = program_of(case, plan)
    params = synthetic_params(config, int4_uses(case))
    started_s = time.perf_counter()
    lowered = lower(program, plan, config, params, donates=case.donates)
    # What a CPU measures of the small model means nothing, and unoptimized it compiles sooner.
    compiled = lowered.compile(None if is_accelerator else {"xla_backend_optimization_level": "0"})
    compile_s = time.perf_counter() - started_s
    memory = compiled.memory_analysis()
    if memory is None:
        raise InvariantError("this compiler tells nothing of its programs")
    cache = jax.eval_shape(lambda: empty_cache(plan, config))
    sizes = {
        "weight_bytes": tree_bytes(params),
        "kv_bytes": tree_bytes(cache),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "device_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
    }
    if case.limit_bytes is not None and sizes["device_bytes"] > case.limit_bytes:
        return {"fits": False, **sizes}
    allocate = lowerings(plan, config, params)["allocate"]().compile()
    runner = ModelRunner(params, config, plan, {program: compiled, "allocate": allocate})
    open_rows(runner, plan, config, case.resident)
    if case.is_probe:
        run_steps(case, runner, 1)
        return {"fits": True, **sizes}
    for _ in range(WARM_UPS):
        run_steps(case, runner, STEPS_PER_SAMPLE)
    samples_ms = [1e3 * run_steps(case, runner, STEPS_PER_SAMPLE) for _ in range(SAMPLES)]
    low_ms, median_ms, high_ms = np.percentile(samples_ms, [25, 50, 75]).tolist()
    return {
        "median_ms": median_ms,
        "iqr_ms": [low_ms, high_ms],
        "samples_ms": samples_ms,
        "compile_s": compile_s,
        **sizes,
    }


def estimate(case: Case) -> dict[str, Any]:
    """Ask the TPU compiler; times are estimated."""
    config = config_of(case.model)
    plan = plan_of(case, config, is_accelerator=True)
    params = on_chip(abstract_params(config, "bfloat16", int4_uses(case)))
    program = program_of(case, plan)
    lowers = partial(lower, program, plan, config, params, donates=case.donates)
    made = estimate_step(program, plan, config, params, lowers)
    sizes = {
        "weight_bytes": made.weight_bytes,
        "kv_bytes": made.kv_bytes,
        "temp_bytes": made.temp_bytes,
        "alias_bytes": made.alias_bytes,
        "device_bytes": made.device_bytes,
    }
    if case.is_probe:
        fits = case.limit_bytes is None or made.device_bytes <= case.limit_bytes
        return {"fits": fits, **sizes}
    return {
        "estimated_ms": sum(made.least),
        "floor_ms": made.floor_ms,
        "compile_s": made.compile_s,
        **sizes,
    }


def answer(case: Case, mode: Mode) -> dict[str, Any]:
    """Measure or estimate; a case that does not fit the device says so."""
    try:
        return measure(case) if mode == "measure" else estimate(case)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fits": False, "error": str(error).splitlines()[0]}


def describe_device(mode: Mode) -> dict[str, Any]:
    """Return what the figures are of."""
    if mode == "estimate":
        return {
            "platform": "tpu",
            "kind": "v6e:1x1, estimated by its compiler",
            "limit_bytes": V6E_BYTES,
            "jax": jax.__version__,
            "version": f"libtpu {version('libtpu')}",
        }
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "limit_bytes": stats.get("bytes_limit"),
        "jax": jax.__version__,
        "version": device.client.platform_version,
    }


def main() -> None:
    """Read {"mode", "case"} from standard input; write what `answer` says as the last line."""
    request = json.load(sys.stdin)
    mode, case = request["mode"], request["case"]
    result = describe_device(mode) if case is None else answer(Case(**case), mode)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

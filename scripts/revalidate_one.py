"""One configuration of scripts/revalidate.py, in a process of its own: reads JSON, writes JSON.

Weights are synthetic, of a checkpoint's dimensions; the programs and the runner are the server's.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered

from jaxserve.device.buckets import ExtendChunk
from jaxserve.device.bundle_identity import code_digest, compiler_flags
from jaxserve.device.plan import DevicePlan, pages_for
from jaxserve.device.runner import (
    ModelRunner,
    StepProgram,
    empty_cache,
    empty_state,
    lowerings,
    step_function,
)
from jaxserve.device.targets import V6E_BYTES, find_target, find_target_by_name
from jaxserve.errors import ConfigError, InvariantError
from jaxserve.models.config import AttentionKind, ModelConfig
from jaxserve.models.params import Params
from jaxserve.models.specs import Use, abstract_params
from jaxserve.models.windows import Windows
from jaxserve.types import SamplingParams
from scripts.revalidate_case import Case, Mode, config_of, int4_uses, plan_of, program_of
from scripts.tpu_steps import StepBytes, estimate_step, on_chip, step_bytes

SAMPLES = 15
WARM_UPS = 3
STEPS_PER_SAMPLE = 8
"""Steps queued one behind another, as serving does, and timed together."""


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
            start, slot = case.context - case.size, case.resident - 1
            chunk = ExtendChunk(slot=slot, token_ids=ids, start=start, sample=False)
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
    sizes = asdict(step_bytes(compiled, plan, config, params))
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
    if case.is_probe:
        sizes = step_bytes(lowers().compile(), plan, config, params)
        fits = case.limit_bytes is None or sizes.device_bytes <= case.limit_bytes
        return {"fits": fits, **asdict(sizes)}
    made = estimate_step(program, plan, config, params, lowers)
    return {
        "estimated_ms": sum(made.least),
        "floor_ms": made.floor_ms,
        "compile_s": made.compile_s,
        **{field.name: getattr(made, field.name) for field in fields(StepBytes)},
    }


def answer(case: Case, mode: Mode) -> dict[str, Any]:
    """Measure or estimate; a case that does not fit the device says so."""
    try:
        return measure(case) if mode == "measure" else estimate(case)
    except jax.errors.JaxRuntimeError as error:
        if not is_full(str(error)):
            raise
        return {"fits": False, "error": str(error).splitlines()[0]}


def is_full(message: str) -> bool:
    """Say whether the device's memory is what a JaxRuntimeError lacks, and not a kernel's VMEM."""
    lacks_other = "memory space" in message and "memory space hbm" not in message
    return "RESOURCE_EXHAUSTED" in message and not lacks_other


def describe_device(mode: Mode) -> dict[str, Any]:
    """Return what the figures are of.

    Raises:
        ConfigError: there is no device of the mode; a CPU has to be asked for by JAX_PLATFORMS.
    """
    made_of = {"jax": jax.__version__, "code": code_digest(), **compiler_flags()}
    if mode == "estimate":
        find_target_by_name("v6e:1x1")
        kind = "v6e:1x1, estimated by its compiler"
        device = {"platform": "tpu", "kind": kind, "limit_bytes": V6E_BYTES}
        return {**device, "version": f"libtpu {version('libtpu')}", **made_of}
    found = find_target().device
    if found.platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise ConfigError(
            f"no accelerator was found ({why_no_tpu()}); JAX_PLATFORMS=cpu tries this script on a"
            " small model"
        )
    return {
        "platform": found.platform,
        "kind": found.device_kind,
        "limit_bytes": (found.memory_stats() or {}).get("bytes_limit"),
        "version": found.client.platform_version,
        **made_of,
    }


def why_no_tpu() -> str:
    """Return JAX's reason, which it passes over where a CPU does too."""
    try:
        jax.devices("tpu")
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise InvariantError("there is a TPU, and JAX prefers the CPU")


def main() -> None:
    """Read {"mode", "case"} from standard input; write what `answer` says as the last line."""
    request = json.load(sys.stdin)
    mode, case = request["mode"], request["case"]
    try:
        result = describe_device(mode) if case is None else answer(Case(**case), mode)
    except ConfigError as error:
        sys.exit(str(error))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

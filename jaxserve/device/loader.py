"""From a checkpoint folder to a runner that is ready to serve, or to programs for such a start.

Runs once, in the thread that will own the device. It reports phases and knows nothing of serving.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax

from jaxserve.device.bundle import Bundle, BundleWriter, read_bundle
from jaxserve.device.bundle_identity import identity
from jaxserve.device.choices import Choices, LoadOptions
from jaxserve.device.compiler import (
    compile_all,
    make_writable,
    max_temp_bytes,
    without_compile_cache,
)
from jaxserve.device.memory import MemoryBudget, PoolSizes
from jaxserve.device.plan import DevicePlan
from jaxserve.device.runner import ModelRunner, StepProgram, lowerings
from jaxserve.device.targets import Target, find_target
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.key_balance import balance_keys
from jaxserve.models.params import Params
from jaxserve.models.weights import LoadedParams
from jaxserve.progress import Phases

logger = logging.getLogger(__name__)

Progress = Callable[[Literal["loading", "compiling", "warming"], int, int], None]
"""Called with a phase, its steps done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A runner and the model it runs.

    Attributes:
        head_dtype: of the table of token embeddings.
        warm_up_s: what its programs took when they were warmed up.
    """

    config: ModelConfig
    runner: ModelRunner
    head_dtype: str
    warm_up_s: dict[StepProgram, float]


def load_model(
    folder: Path,
    options: LoadOptions,
    progress: Progress,
    bundle_folder: Path | None = None,
    phases: Phases | None = None,
) -> LoadedModel:
    """Load a checkpoint, and compile all that serving it needs or load it from a bundle.

    `phases` gets what the parts of it took.

    Raises:
        ConfigError: an option is out of range, what is asked for does not fit the device, or there
            is no device.
        ModelLoadError: the checkpoint cannot be served.
    """
    phases = phases or Phases(time.perf_counter())
    target = find_target()
    phases.end("opening the device")
    choices = Choices.make(folder, options, target)
    loaded = choices.open().load(lambda done, total: progress("loading", done, total))
    if choices.kv_dtype == "int8":
        loaded = replace(loaded, params=balance_keys(loaded.params, choices.config))
    phases.end("loading weights")
    bundle = None
    if bundle_folder is not None:
        bundle = read_bundle(bundle_folder, identity(target, choices.config, options, loaded))
    plan, budget, bundle = _make_plan(choices, loaded, bundle, progress)
    phases.end("planning memory")
    lower = lowerings(plan, choices.config, loaded.params, target.sharding)
    ready = bundle.load(lower, target.device) if bundle is not None else {}
    phases.end("loading programs")
    compiled = compile_all(
        {program: make for program, make in lower.items() if program not in ready},
        lambda done, total: progress("compiling", done, total),
    )
    phases.end("compiling programs")
    temp_bytes = max_temp_bytes(compiled.values())
    if bundle is not None:
        temp_bytes = max(temp_bytes, bundle.sizes.temp_bytes)
    budget = replace(budget, temp_bytes=temp_bytes)
    logger.info("memory:\n%s", budget.table(plan.max_model_len))
    budget.check(plan.max_model_len)
    runner = ModelRunner(loaded.params, choices.config, plan, ready | compiled)
    warm_up_s = runner.warm_up(lambda done, total: progress("warming", done, total))
    phases.end("warming up")
    logger.info(
        "%s on %s (%s%s, KV %s, attention by %s): %d programs from the bundle, %d compiled or read"
        " from the cache",
        choices.config.model_type,
        target.device.device_kind,
        choices.dtype,
        "".join(f", {packed}" for packed in loaded.packed),
        choices.kv_dtype,
        choices.attention,
        len(ready),
        len(compiled),
    )
    return LoadedModel(
        config=choices.config,
        runner=runner,
        head_dtype="int8" if "embedding" in loaded.packed_uses else choices.dtype,
        warm_up_s=warm_up_s,
    )


def compile_bundle(
    folder: Path, options: LoadOptions, target: Target, out: Path, progress: Progress
) -> tuple[int, int]:
    """Compile all that serving a checkpoint on a device needs, for shapes alone, into a bundle.

    Each program is kept as soon as it is compiled: the next call goes on where one has ended.
    Returns the number of programs and their bytes. Raises what load_model does.
    """
    make_writable(out, "--out")
    compiling = partial(progress, "compiling")
    choices = Choices.make(folder, options, target)
    loaded = choices.open().describe()
    placed: Params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target.sharding),
        loaded.params,
    )
    loaded = replace(loaded, params=placed)
    same = identity(target, choices.config, options, loaded)  # of the source as it is now
    writer = BundleWriter(out, same)
    with without_compile_cache():
        plan, budget = choices.make_plan(loaded, writer.sizes, compiling)
        writer.plan(PoolSizes(kv_bytes=budget.kv_bytes, temp_bytes=budget.temp_bytes))
        lower = lowerings(plan, choices.config, placed, target.sharding)
        missing = {program: make for program, make in lower.items() if program not in writer}
        if len(missing) < len(lower):
            logger.info(
                "going on: %d of %d programs are there", len(lower) - len(missing), len(lower)
            )
        compile_all(missing, compiling, writer.add, target.max_compiles)
    budget = replace(budget, temp_bytes=writer.temp_bytes)
    logger.info("memory:\n%s", budget.table(plan.max_model_len))
    budget.check(plan.max_model_len)
    return writer.finish()


def _make_plan(
    choices: Choices, loaded: LoadedParams, bundle: Bundle | None, progress: Progress
) -> tuple[DevicePlan, MemoryBudget, Bundle | None]:
    """Plan for a bundle's pools; one whose pools do not fit is dropped, and the log says so."""
    if bundle is not None:
        try:
            return *choices.make_plan(loaded, bundle.sizes), bundle
        except ConfigError as error:
            bundle.warn_unused(str(error))
    compiling = partial(progress, "compiling")
    return *choices.make_plan(loaded, progress=compiling), None

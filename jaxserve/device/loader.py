"""From a checkpoint folder to a runner that is ready to serve: load, size, compile, warm up.

Runs once, in the thread that will own the device. It reports phases and knows nothing of serving.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax

from jaxserve.device.arena import row_words
from jaxserve.device.compiler import compile_all, max_temp_bytes
from jaxserve.device.memory import GIB, MemoryBudget, PageMix
from jaxserve.device.plan import (
    PAGE_SIZE,
    AttentionKernel,
    DevicePlan,
    extend_buckets,
    make_plan,
    pages_for,
)
from jaxserve.device.programs import ExtendShape
from jaxserve.device.runner import ModelRunner, StepProgram, lowerings, step_programs
from jaxserve.device.state import state_num_bytes
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.key_balance import balance_keys
from jaxserve.models.kv_cache import LANES, KVDtype
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.weights import Int4, LoadedParams, load_params

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = GIB
DEVICE_FRACTION = 0.92
"""Share of an accelerator's memory to use: the rest is for its runtime and fragmentation."""

Progress = Callable[[Literal["loading", "compiling", "warming"], int, int], None]
"""Called with a phase, its steps done and their total."""

KERNEL_HEAD_DIM = 256
"""Attention kernels turn halves of a head, each of whole lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a user can choose of the device's side; None: chosen here."""

    dtype: str
    weights: str
    ple_dtype: str
    kv_dtype: str
    max_model_len: int | None
    max_batch: int
    kv_cache_bytes: int | None
    tokens_per_resume_point: int
    attention: str = "auto"
    grammar_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A runner, the model it runs, and what its programs took when they were warmed up."""

    config: ModelConfig
    runner: ModelRunner
    warm_up_s: dict[StepProgram, float]


def load_model(folder: Path, options: LoadOptions, progress: Progress) -> LoadedModel:
    """Load a checkpoint and compile all that serving it needs.

    Raises:
        ConfigError: an option is out of range, what is asked for does not fit the device, or there
            is no device.
        ModelLoadError: the checkpoint cannot be served.
    """
    started_s = time.perf_counter()
    device = _find_device()
    dtype = _choose_dtype(options.dtype, device)
    config = load_config(folder)
    kv_dtype = _choose_kv_dtype(options.kv_dtype, dtype)
    attention = _choose_attention(options.attention, config, kv_dtype, device.platform)
    _check_options(config, kv_dtype, options, is_accelerator=device.platform != "cpu")
    loaded = load_params(
        folder,
        config,
        dtype,
        progress=lambda done, total: progress("loading", done, total),
        linears=_choose_int4("--weights", options.weights, dtype, device),
        ple_table=_choose_int4("--ple-dtype", options.ple_dtype, dtype, device),
    )
    if kv_dtype == "int8":
        loaded = replace(loaded, params=balance_keys(loaded.params, config))
    loaded_s = time.perf_counter()
    plan, budget = _make_plan(config, loaded, dtype, kv_dtype, attention, options, device)
    compiled = compile_all(
        lowerings(plan, config, loaded.params),
        lambda done, total: progress("compiling", done, total),
    )
    compiled_s = time.perf_counter()
    budget = replace(budget, temp_bytes=max_temp_bytes(compiled.values()))
    logger.info("memory:\n%s", budget.table(plan.max_model_len))
    budget.check(plan.max_model_len)
    runner = ModelRunner(loaded.params, config, plan, compiled)
    warm_up_s = runner.warm_up(lambda done, total: progress("warming", done, total))
    logger.info(
        "%s on %s (%s%s, KV %s, attention by %s): loaded in %.1f s, %d programs compiled or read"
        " from the cache in %.1f s, warmed up in %.1f s",
        config.model_type,
        device.device_kind,
        dtype,
        "".join(f", {use} int4" for use in sorted(loaded.int4_uses)),
        kv_dtype,
        attention,
        loaded_s - started_s,
        len(compiled),
        compiled_s - loaded_s,
        time.perf_counter() - compiled_s,
    )
    return LoadedModel(config=config, runner=runner, warm_up_s=warm_up_s)


def _find_device() -> jax.Device:
    try:
        return jax.devices()[0]
    except RuntimeError as error:  # JAX_PLATFORMS names what is not here or cannot be opened
        raise ConfigError(f"no device to serve on: {error}") from error


def _choose_dtype(dtype: str, device: jax.Device) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.platform != "cpu" or _cpu_multiplies_bfloat16() else "float32"


def _choose_kv_dtype(choice: str, dtype: str) -> KVDtype:
    """Read --kv-dtype."""
    choices: dict[str, KVDtype] = {"bf16": "bfloat16", "int8": "int8"}
    return choices.get(choice) or ("bfloat16" if dtype == "bfloat16" else "float32")


def _choose_attention(
    choice: str, config: ModelConfig, kv_dtype: KVDtype, platform: str
) -> AttentionKernel:
    """Read --attention; auto takes the kernels where they can be had."""
    lacking = None
    if platform != "tpu":
        lacking = f"a TPU; here is a {platform}"
    elif any(layer.head_dim % KERNEL_HEAD_DIM for layer in config.layers):
        lacking = f"heads of whole multiples of {KERNEL_HEAD_DIM} channels"
    elif kv_dtype == "int8" and any(
        2 * layer.num_kv_heads * PAGE_SIZE > LANES for layer in config.layers
    ):
        lacking = f"--kv-dtype bf16 where a layer has more than {LANES // 2 // PAGE_SIZE} KV heads"
    if choice == "pallas" and lacking is not None:
        raise ConfigError(f"--attention pallas needs {lacking}")
    return "xla" if choice == "xla" or lacking is not None else "pallas"


def _cpu_multiplies_bfloat16() -> bool:
    """Say whether this processor has bfloat16 products; those without emulate them, far slower."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _check_options(
    config: ModelConfig, kv_dtype: KVDtype, options: LoadOptions, *, is_accelerator: bool
) -> None:
    """Refuse, before the weights are read, what no weights could make fit."""
    longest, kv_bytes = options.max_model_len, options.kv_cache_bytes
    if longest is not None and longest > config.max_position:
        raise ConfigError(
            f"--max-model-len {longest} exceeds the model's {config.max_position} positions"
        )
    mix = _page_mix(config, kv_dtype, options, is_accelerator=is_accelerator)
    # One of them is the scratch page.
    if kv_bytes is not None and mix.num_pages(kv_bytes) < 2:
        raise ConfigError(
            f"--kv-cache-bytes {kv_bytes} holds no page for tokens; one page of both kinds is"
            f" {mix.bytes_per_page + mix.bytes_per_sliding_page} bytes, and two are the least"
        )


def _page_mix(
    config: ModelConfig, kv_dtype: KVDtype, options: LoadOptions, *, is_accelerator: bool
) -> PageMix:
    longest = options.max_model_len or config.max_position
    return PageMix.of_model(
        config,
        kv_dtype,
        max_batch=options.max_batch,
        chunk_tokens=extend_buckets(longest, is_accelerator=is_accelerator)[-1].tokens,
        tokens_per_point=options.tokens_per_resume_point,
    )


def _choose_int4(flag: str, choice: str, dtype: str, device: jax.Device) -> Int4:
    """Read --weights or --ple-dtype; only on a TPU is there a kernel that makes int4 the faster."""
    if choice == "int4" and dtype != "bfloat16":
        raise ConfigError(f"{flag} int4 needs --dtype bfloat16, in which int4 is multiplied")
    if choice == "auto":
        return "if_stored" if device.platform == "tpu" and dtype == "bfloat16" else "never"
    return "always" if choice == "int4" else "never"


def _make_plan(
    config: ModelConfig,
    loaded: LoadedParams,
    dtype: str,
    kv_dtype: KVDtype,
    attention: AttentionKernel,
    options: LoadOptions,
    device: jax.Device,
) -> tuple[DevicePlan, MemoryBudget]:
    """Size the page pools, then choose the buckets; refuse what does not fit, with the table."""
    longest = options.max_model_len or config.max_position
    is_accelerator = device.platform != "cpu"

    def plan_for(num_pages: int, num_sliding_pages: int, max_model_len: int) -> DevicePlan:
        return make_plan(
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_pages=num_pages,
            num_sliding_pages=num_sliding_pages,
            max_batch=options.max_batch,
            max_model_len=max_model_len,
            is_accelerator=is_accelerator,
            attention=attention,
            arena_rows=arena_rows,
        )

    arena_rows = options.grammar_bytes // (4 * row_words(config.vocab_size))
    state_bytes = state_num_bytes(options.max_batch, config.vocab_size, arena_rows)
    if not is_accelerator:
        limit_bytes, temp_bytes = _host_memory_bytes(), 0
        kv_bytes = options.kv_cache_bytes or CPU_KV_CACHE_BYTES
    else:
        # What a program needs beside its arguments does not depend on the pool's size.
        num_pages = pages_for(longest) + 1
        probe = plan_for(num_pages, num_pages, longest)
        limit_bytes = int(device.memory_stats()["bytes_limit"] * DEVICE_FRACTION)
        temp_bytes = _probe_temp_bytes(probe, config, loaded.params)
        free_bytes = limit_bytes - loaded.num_bytes - state_bytes - temp_bytes
        kv_bytes = options.kv_cache_bytes or free_bytes
    budget = MemoryBudget(
        limit_bytes=limit_bytes,
        weight_bytes=loaded.num_bytes,
        int4_bytes=loaded.int4_bytes,
        state_bytes=state_bytes,
        temp_bytes=temp_bytes,
        kv_bytes=kv_bytes,
        mix=_page_mix(config, kv_dtype, options, is_accelerator=is_accelerator),
    )
    if options.max_model_len is None and budget.num_tokens < longest:
        longest = max(budget.num_tokens, 2)
        logger.info(
            "the KV pages cut the context to %d of the model's %d tokens; --kv-cache-bytes sets"
            " their size",
            longest,
            config.max_position,
        )
    budget.check(longest)
    return plan_for(budget.num_pages, budget.num_sliding_pages, longest), budget


def _host_memory_bytes() -> int | None:
    """Return the machine's memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _probe_temp_bytes(plan: DevicePlan, config: ModelConfig, params: Params) -> int:
    """Compile the largest of each kind of program, and return what they need most."""
    largest: dict[object, StepProgram] = {}
    for shape in step_programs(plan):  # the largest first
        kind = shape.scores if isinstance(shape, ExtendShape) else type(shape)
        largest.setdefault(kind, shape)
    lower = lowerings(plan, config, params)
    probes = compile_all({s: lower[s] for s in largest.values()}, lambda done, total: None)
    return max_temp_bytes(probes.values())

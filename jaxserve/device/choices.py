"""What is served and how: a checkpoint, what the user chose, and what the device makes of both."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from jaxserve.config import ServeConfig
from jaxserve.device.arena import row_words
from jaxserve.device.compiler import compile_all, max_temp_bytes
from jaxserve.device.memory import GIB, MemoryBudget, PageMix, PoolSizes
from jaxserve.device.plan import (
    PAGE_SIZE,
    AttentionKernel,
    DevicePlan,
    extend_buckets,
    make_plan,
    pages_for,
)
from jaxserve.device.programs import ExtendShape
from jaxserve.device.runner import StepProgram, lowerings, step_programs
from jaxserve.device.state import state_num_bytes
from jaxserve.device.targets import Target
from jaxserve.errors import ConfigError
from jaxserve.kernels.constants import LANES
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.registry import load_config
from jaxserve.models.weights import CheckpointParams, Int4, LoadedParams

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = GIB
DEVICE_FRACTION = 0.92
"""Share of an accelerator's memory to use: the rest is for its runtime and fragmentation."""

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
    head_dtype: str = "auto"
    attention: str = "auto"
    grammar_bytes: int = 0

    @classmethod
    def of(cls, settings: ServeConfig) -> "LoadOptions":
        """Return those of all settings."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A checkpoint, options, a device, and what follows: dtypes, and how attention is computed."""

    folder: Path
    config: ModelConfig
    options: LoadOptions
    target: Target
    dtype: str
    kv_dtype: KVDtype
    attention: AttentionKernel

    @classmethod
    def make(cls, folder: Path, options: LoadOptions, target: Target) -> "Choices":
        """Read the config; refuse, before any weight is read, what no weights could make fit.

        Raises:
            ConfigError: naming the option.
            ModelLoadError: the model is not served.
        """
        dtype = options.dtype
        if dtype == "auto":
            dtype = "bfloat16" if target.multiplies_bfloat16 else "float32"
        config, kv_dtype = load_config(folder), _choose_kv_dtype(options.kv_dtype, dtype)
        platform = target.device.platform
        choices = cls(
            folder=folder,
            config=config,
            options=options,
            target=target,
            dtype=dtype,
            kv_dtype=kv_dtype,
            attention=_choose_attention(options.attention, config, kv_dtype, platform),
        )
        choices._check()
        return choices

    def open(self) -> CheckpointParams:
        """Open the weights, in the forms that the options choose."""
        return CheckpointParams(
            self.folder,
            self.config,
            self.dtype,
            linears=self._int4("--weights", self.options.weights),
            ple_table=self._int4("--ple-dtype", self.options.ple_dtype),
            int8_embedding=self.options.head_dtype == "int8",
        )

    def make_plan(
        self,
        loaded: LoadedParams,
        sizes: PoolSizes | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[DevicePlan, MemoryBudget]:
        """Size the page pools, then choose the buckets; refuse what does not fit, with the table.

        `sizes` are those that there is a bundle for. None: what the device's memory allows, for
        which an accelerator's largest programs are compiled; `progress` gets (done, total) of them.

        Raises:
            ConfigError: it does not fit the device.
        """
        config, options = self.config, self.options
        longest = self._longest
        state_bytes = state_num_bytes(options.max_batch, config.vocab_size, self._arena_rows)
        limit_bytes = self.target.memory_bytes
        if self.target.is_accelerator and limit_bytes is not None:
            limit_bytes = int(limit_bytes * DEVICE_FRACTION)
        if sizes is None:
            used_bytes = loaded.num_bytes + state_bytes
            sizes = self._pool_sizes(loaded, limit_bytes, used_bytes, progress)
        budget = MemoryBudget(
            limit_bytes=limit_bytes,
            weight_bytes=loaded.num_bytes,
            packed_bytes=loaded.packed_bytes,
            state_bytes=state_bytes,
            temp_bytes=sizes.temp_bytes,
            kv_bytes=sizes.kv_bytes,
            mix=self._page_mix(),
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
        return self._plan(budget.num_pages, budget.num_sliding_pages, longest), budget

    @property
    def _longest(self) -> int:
        return self.options.max_model_len or self.config.max_position

    @property
    def _arena_rows(self) -> int:
        return self.options.grammar_bytes // (4 * row_words(self.config.vocab_size))

    def _check(self) -> None:
        longest, kv_bytes = self.options.max_model_len, self.options.kv_cache_bytes
        if longest is not None and longest > self.config.max_position:
            raise ConfigError(
                f"--max-model-len {longest} exceeds the model's {self.config.max_position}"
                " positions"
            )
        mix = self._page_mix()
        # One of them is the scratch page.
        if kv_bytes is not None and mix.num_pages(kv_bytes) < 2:
            raise ConfigError(
                f"--kv-cache-bytes {kv_bytes} holds no page for tokens; one page of both kinds is"
                f" {mix.bytes_per_page + mix.bytes_per_sliding_page} bytes, and two are the least"
            )

    def _page_mix(self) -> PageMix:
        buckets = extend_buckets(self._longest, is_accelerator=self.target.is_accelerator)
        return PageMix.of_model(
            self.config,
            self.kv_dtype,
            max_batch=self.options.max_batch,
            chunk_tokens=buckets[-1].tokens,
            tokens_per_point=self.options.tokens_per_resume_point,
        )

    def _int4(self, flag: str, choice: str) -> Int4:
        """Read --weights or --ple-dtype; only a TPU has a kernel that makes int4 the faster."""
        if choice == "int4" and self.dtype != "bfloat16":
            raise ConfigError(f"{flag} int4 needs --dtype bfloat16, in which int4 is multiplied")
        if choice == "auto":
            is_faster = self.target.device.platform == "tpu" and self.dtype == "bfloat16"
            return "if_stored" if is_faster else "never"
        return "always" if choice == "int4" else "never"

    def _plan(self, num_pages: int, num_sliding_pages: int, max_model_len: int) -> DevicePlan:
        return make_plan(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            num_pages=num_pages,
            num_sliding_pages=num_sliding_pages,
            max_batch=self.options.max_batch,
            max_model_len=max_model_len,
            is_accelerator=self.target.is_accelerator,
            attention=self.attention,
            arena_rows=self._arena_rows,
        )

    def _pool_sizes(
        self,
        loaded: LoadedParams,
        limit_bytes: int | None,
        used_bytes: int,
        progress: Callable[[int, int], None],
    ) -> PoolSizes:
        """Return what the device leaves for pages; on a CPU, what it is to leave."""
        asked_bytes = self.options.kv_cache_bytes
        if not self.target.is_accelerator or limit_bytes is None:
            return PoolSizes(kv_bytes=asked_bytes or CPU_KV_CACHE_BYTES, temp_bytes=0)
        # What a program needs beside its arguments does not depend on the pool's size.
        num_pages = pages_for(self._longest) + 1
        probe = self._plan(num_pages, num_pages, self._longest)
        temp_bytes = self._probe_temp_bytes(probe, loaded, progress)
        free_bytes = limit_bytes - used_bytes - temp_bytes
        return PoolSizes(kv_bytes=asked_bytes or free_bytes, temp_bytes=temp_bytes)

    def _probe_temp_bytes(
        self, plan: DevicePlan, loaded: LoadedParams, progress: Callable[[int, int], None]
    ) -> int:
        """Compile the largest of each kind of program, and return what they need most."""
        largest: dict[object, StepProgram] = {}
        for shape in step_programs(plan):  # the largest first
            kind = shape.scores if isinstance(shape, ExtendShape) else type(shape)
            largest.setdefault(kind, shape)
        lower = lowerings(plan, self.config, loaded.params, self.target.sharding)
        probes = compile_all(
            {s: lower[s] for s in largest.values()},
            progress,
            max_compiles=self.target.max_compiles,
        )
        return max_temp_bytes(probes.values())


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

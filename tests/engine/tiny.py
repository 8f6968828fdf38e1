"""Tiny random models on real runners, for tests of what only the device's side can get wrong."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from jaxserve.device.buckets import ExtendBucket, ExtendChunk
from jaxserve.device.plan import DevicePlan
from jaxserve.device.runner import ModelRunner, Program, lowerings
from jaxserve.engine.runner import Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.models.config import ModelConfig
from jaxserve.models.int8_table import pack_table
from jaxserve.models.layers import take_rows
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.specs import random_params
from jaxserve.types import GenerationRequest, SamplingParams
from tests import oracle
from tests.checkpoints import Array, Kind, Tensors, config_json, named_tensors, write_json_files
from tests.compiling import OPTIONS
from tests.driven_engine import DrivenEngine

# Small pages and chunks of 2 and 4 pages, so that short sequences cross their borders; extends walk
# the window of 16 tokens in chunks, decodes read it at once.
PLAN = DevicePlan(
    dtype="float32",
    kv_dtype="float32",
    is_accelerator=False,
    page_size=8,
    num_pages=129,
    num_sliding_pages=137,
    num_slots=8,
    max_model_len=128,
    row_buckets=(1, 2, 4, 8),
    table_sizes=(16,),
    extend_buckets=(ExtendBucket(tokens=16, block=8), ExtendBucket(tokens=64, block=16)),
    decode_chunk_pages=4,
    extend_chunk_pages=2,
    arena_rows=70,
)

# Two logits this close may swap where float32 sums run in another order.
CLOSE = 4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A model with the programs of one plan."""

    config: ModelConfig
    params: Params
    tensors: Tensors
    plan: DevicePlan
    compiled: dict[Program, Compiled]
    runner: ModelRunner

    def logits(self, ids: Sequence[int]) -> Array:
        """Return the oracle's logits, float32 [T, V]."""
        is_int8 = self.plan.kv_dtype == "int8"
        return oracle.logits(self.tensors, self.config, list(ids), int8_kv=is_int8)

    def assert_greedy(self, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Check that each id is the likeliest by the oracle, after those before it."""
        assert len(ids) > 0
        steps_NV = self.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :]
        chosen_N = steps_NV[np.arange(len(ids)), list(ids)]
        assert (steps_NV.max(-1) - chosen_N).max() < CLOSE


def make_tiny_model(
    folder: Path,
    kind: Kind,
    *,
    plan: DevicePlan = PLAN,
    int8_head: bool = False,
    options: dict[str, str | bool | int] | None = OPTIONS,
) -> TinyModel:
    """Compile all programs of a plan for random weights of its dtype."""
    write_json_files(folder, config_json(kind))
    config = load_config(folder)
    params = random_params(config, jnp.dtype(plan.dtype), seed=3)
    tensors = named_tensors(params, config)
    if int8_head:
        table = pack_table(jnp.asarray(params.embed_VD))
        params = replace(params, embed_VD=table)
        tensors["embed_tokens.weight"] = np.asarray(take_rows(table, jnp.arange(config.vocab_size)))
    lower = lowerings(plan, config, params)
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda make: make().compile(options), lower.values())
        compiled = dict(zip(lower, made, strict=True))
    return TinyModel(
        config=config,
        params=params,
        tensors=tensors,
        plan=plan,
        compiled=compiled,
        runner=ModelRunner(params, config, plan, compiled),
    )


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return random ids below the media placeholders."""
    return tuple(np.random.default_rng([length, seed]).integers(2, 1000, length).tolist())


class HandDriven:
    """Sequences on a runner without an engine, each with a slot and scattered pages of its own."""

    def __init__(self, model: TinyModel, seed: int = 0) -> None:
        self._runner, plan = model.runner, model.plan
        rng = np.random.default_rng(seed)
        self._slots: list[int] = rng.permutation(plan.num_slots).tolist()
        pages = rng.permutation(np.arange(1, plan.num_pages))
        per_slot = plan.max_model_len // plan.page_size
        self._pages = pages[: plan.num_slots * per_slot].reshape(plan.num_slots, -1).tolist()
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._num_written: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}

    def add(self, prompt: tuple[int, ...], sampling: SamplingParams | None = None) -> int:
        """Open a slot for a sequence, greedy if not told otherwise, and return its slot."""
        slot = self._slots.pop()
        self._runner.open_slot(
            slot, sampling or SamplingParams(max_tokens=1, seed=0, temperature=0.0), prompt, ()
        )
        self._runner.set_pages(slot, 0, self._pages[slot], "full")
        self._runner.set_pages(slot, 0, self._pages[slot][::-1], "sliding")
        self._prompts[slot], self._num_written[slot], self.outputs[slot] = prompt, 0, []
        return slot

    def extend(self, *parts: tuple[int, int]) -> None:
        """Take in the next so many prompt ids of these slots, in one call."""
        chunks = []
        for slot, length in parts:
            start, prompt = self._num_written[slot], self._prompts[slot]
            end = start + length
            chunks.append(
                ExtendChunk(
                    slot=slot,
                    token_ids=prompt[start:end],
                    start=start,
                    sample=end == len(prompt),
                )
            )
            self._num_written[slot] = end
        sampled = [chunk.slot for chunk in chunks if chunk.sample]
        self._keep(sampled, self._runner.extend(chunks).token_ids())

    def prefill(self, slot: int, chunk: int) -> None:
        """Take in all of a prompt, by chunks."""
        while left := len(self._prompts[slot]) - self._num_written[slot]:
            self.extend((slot, min(chunk, left)))

    def decode(self, slots: Sequence[int], steps: int = 1) -> None:
        for _ in range(steps):
            positions = [self._num_written[slot] for slot in slots]
            pending = self._runner.decode(slots, positions)
            for slot in slots:
                self._num_written[slot] += 1
            self._keep(slots, pending.token_ids())

    def _keep(self, slots: Sequence[int], ids: Iterable[int]) -> None:
        for slot, token_id in zip(slots, ids, strict=True):
            self.outputs[slot].append(token_id)


def assert_the_cache_stays_in_place(model: TinyModel) -> None:
    """Check that no step copies an array of keys and values."""
    driven, runner = HandDriven(model, seed=3), model.runner
    slot = driven.add(prompt_of(40))

    def addresses() -> list[int]:
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(runner._cache)]

    before = addresses()
    driven.prefill(slot, chunk=16)
    driven.decode([slot], steps=2)
    runner.copy_pages([(1, 2, 3, 4)])

    assert len(before) == 2 * len(model.config.kv_owners)
    assert addresses() == before


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a scheduler is told of a runner; it may be told of fewer pages and slots than exist."""

    num_pages: int = PLAN.num_pages
    num_sliding_pages: int = PLAN.num_sliding_pages
    window: int = 16
    page_size: int = PLAN.page_size
    num_slots: int = PLAN.num_slots
    max_model_len: int = PLAN.max_model_len
    extend_buckets: tuple[ExtendBucket, ...] = PLAN.extend_buckets


class TinyEngine(DrivenEngine):
    """An engine on a real runner."""

    def __init__(
        self, runner: Runner, sizes: Sizes | None = None, *, forces_runs: bool = True
    ) -> None:
        super().__init__(runner, Scheduler(sizes or Sizes(), forces_runs=forces_runs))


def run_alone(
    runner: Runner, request: GenerationRequest, *, forces_runs: bool = True
) -> tuple[int, ...]:
    """Return what a request gets that has the engine to itself."""
    engine = TinyEngine(runner, forces_runs=forces_runs)
    engine.run(request)
    return engine.tokens_of(request.request_id)


def request_of(
    name: str, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams | None = None
) -> GenerationRequest:
    """Make a request, greedy if not told otherwise."""
    sampling = sampling or SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=replace(sampling, max_tokens=max_tokens),
    )

"""Every program maps cache and state to arrays of their own shapes, and samples an id for each row.

Checked by tracing alone: nothing is compiled.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from jaxserve.device import programs
from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.logprobs import RESULT_SIZE
from jaxserve.device.plan import DevicePlan
from jaxserve.device.programs import ExtendShape
from jaxserve.device.runner import StepProgram, step_programs
from jaxserve.device.state import make_state, row_size
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache, make_cache, stored_dtype
from jaxserve.models.registry import load_config
from jaxserve.models.specs import abstract_params
from tests.checkpoints import Kind, config_json, write_json_files
from tests.engine.tiny import PLAN

Step = Callable[..., tuple[Any, ...]]


def step_of(
    program: StepProgram, plan: DevicePlan, config: ModelConfig
) -> tuple[Step, tuple[int, ...], int]:
    """Return a program's function, the shape of what is staged for it, and its number of ids."""
    if isinstance(program, DecodeBucket):
        decode = partial(programs.decode, config=config, chunk_pages=plan.chunk_pages)
        return decode, (program.rows, row_size(program.table_size)), program.rows
    extend = partial(programs.extend, config=config, shape=program, scratch_slot=plan.num_slots)
    return extend, (program.staged_size,), program.num_sequences


def empty_cache(plan: DevicePlan, config: ModelConfig) -> KVCache:
    dtype = stored_dtype(plan.kv_dtype, is_accelerator=plan.is_accelerator)
    return make_cache(
        config,
        num_pages=plan.num_pages,
        num_sliding_pages=plan.num_sliding_pages,
        page_size=plan.page_size,
        dtype=dtype,
    )


@pytest.mark.parametrize(
    ("kind", "is_accelerator"), [*((kind, False) for kind in get_args(Kind)), ("e2b", True)]
)
def test_programs_keep_the_shapes_of_what_they_are_given(
    kind: Kind, is_accelerator: bool, tmp_path: Path
) -> None:
    write_json_files(tmp_path, config_json(kind))
    config = load_config(tmp_path)
    plan = replace(PLAN, dtype="bfloat16", is_accelerator=is_accelerator, row_buckets=(8,))
    params = abstract_params(config, plan.dtype)
    cache = jax.eval_shape(lambda: empty_cache(plan, config))
    state = jax.eval_shape(lambda: make_state(plan.num_slots, config.vocab_size))

    for program in step_programs(plan):
        step, staged_shape, num_ids = step_of(program, plan, config)
        staged = jax.ShapeDtypeStruct(staged_shape, jnp.int32)
        new_cache, new_state, result, *scores = jax.eval_shape(step, params, cache, state, staged)

        assert new_cache == cache
        assert new_state == state
        assert (result.shape, result.dtype) == ((num_ids, RESULT_SIZE), jnp.int32)
        if isinstance(program, ExtendShape) and program.scores:
            assert [score.shape for score in scores] == [(program.bucket.tokens, RESULT_SIZE)]
        else:
            assert scores in ([], [None])

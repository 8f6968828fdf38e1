"""Every program maps cache and state to arrays of their own shapes, and samples an id for each row.

Checked by tracing alone: nothing is compiled.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from jaxserve.device.logprobs import RESULT_SIZE
from jaxserve.device.programs import ExtendShape
from jaxserve.device.runner import empty_cache, empty_state, step_function, step_programs
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.registry import load_config
from jaxserve.models.specs import abstract_params
from tests.checkpoints import Kind, config_json, write_json_files
from tests.engine.tiny import PLAN


@pytest.mark.parametrize(
    ("kind", "is_accelerator", "kv_dtype"),
    [
        *((kind, False, "bfloat16") for kind in get_args(Kind)),
        *((kind, False, "int8") for kind in ("e2b", "dense")),
        *(("e2b", True, kv_dtype) for kv_dtype in ("bfloat16", "int8")),
    ],
)
def test_programs_keep_the_shapes_of_what_they_are_given(
    kind: Kind, is_accelerator: bool, kv_dtype: KVDtype, tmp_path: Path
) -> None:
    write_json_files(tmp_path, config_json(kind))
    config = load_config(tmp_path)
    plan = replace(
        PLAN,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        is_accelerator=is_accelerator,
        row_buckets=(8,),
    )
    params = abstract_params(config, plan.dtype)
    cache = jax.eval_shape(lambda: empty_cache(plan, config))
    state = jax.eval_shape(lambda: empty_state(plan, config))

    for program in step_programs(plan):
        step, staged_shape = step_function(program, plan, config)
        staged = jax.ShapeDtypeStruct(staged_shape, jnp.int32)
        new_cache, new_state, result, *scores = jax.eval_shape(step, params, cache, state, staged)

        assert new_cache == cache
        assert new_state == state
        num_ids = program.num_sequences if isinstance(program, ExtendShape) else program.rows
        assert (result.shape, result.dtype) == ((num_ids, RESULT_SIZE), jnp.int32)
        if isinstance(program, ExtendShape) and program.scores:
            assert [score.shape for score in scores] == [(program.bucket.tokens, RESULT_SIZE)]
        else:
            assert scores in ([], [None])

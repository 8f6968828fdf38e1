"""The step programs with attention kernels, on a simulated TPU, against those in plain JAX."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.stages import Compiled

from jaxserve.device.buckets import DecodeBucket, ExtendBucket
from jaxserve.device.programs import ExtendShape
from jaxserve.device.runner import ModelRunner, Program, lowerings
from jaxserve.kernels import page_reader
from jaxserve.models.registry import load_config
from jaxserve.models.specs import random_params
from tests.checkpoints import config_json, write_json_files
from tests.compiling import OPTIONS
from tests.engine import tiny
from tests.engine.tiny import HandDriven, TinyModel, prompt_of

PLAN = replace(
    tiny.PLAN,
    kv_dtype="int8",
    num_pages=33,
    num_sliding_pages=33,
    num_slots=3,
    max_model_len=64,
    row_buckets=(3,),
    table_sizes=(8,),
    extend_buckets=(ExtendBucket(tokens=16, block=8),),
    arena_rows=0,
)


def outputs(folder: Path, chunk_pages: int | None) -> dict[int, list[int]]:
    """Return the tokens of ragged rows: around borders of pages, past the window, and padding."""
    write_json_files(folder, config_json("dense"))
    config = load_config(folder)
    sliding, full = config.layers[1:]
    layers = (replace(sliding, kv_source=0), replace(full, kv_source=1))
    config = replace(config, layers=layers)
    params = random_params(config, jnp.float32, seed=3)
    plan = replace(PLAN, decode_chunk_pages=chunk_pages, extend_chunk_pages=chunk_pages)
    compiler_options: Any = OPTIONS  # jax takes integers, but does not say so
    compiled: dict[Program, Compiled] = {
        program: lower().compile(compiler_options)
        for program, lower in lowerings(plan, config, params).items()
        if program == "allocate"
        or isinstance(program, DecodeBucket)
        or (isinstance(program, ExtendShape) and not program.scores)
    }
    runner = ModelRunner(params, config, plan, compiled)
    driven = HandDriven(
        TinyModel(
            config=config, params=params, tensors={}, plan=plan, compiled=compiled, runner=runner
        )
    )
    slots = [driven.add(prompt_of(length)) for length in (33, 7)]
    for slot in slots:
        driven.prefill(slot, chunk=16)
    driven.decode(slots, steps=3)
    return driven.outputs


@pytest.mark.timeout(300)  # a simulated TPU takes long to compile
def test_tokens_are_those_of_plain_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outputs(tmp_path, chunk_pages=4)
    monkeypatch.setattr(page_reader, "UNROLLS", False)  # smaller programs to simulate
    with pltpu.force_tpu_interpret_mode():
        actual = outputs(tmp_path, chunk_pages=None)

    assert [len(ids) for ids in actual.values()] == [4, 4]
    assert actual == expected

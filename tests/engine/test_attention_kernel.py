"""The attention kernel in the step programs, on a simulated TPU, against attention in plain JAX."""

from dataclasses import replace
from pathlib import Path

import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.device.buckets import ExtendBucket
from tests.engine import tiny
from tests.engine.tiny import HandDriven, TinyModel, make_tiny_model, prompt_of

PLAN = replace(
    tiny.PLAN,
    num_pages=33,
    num_sliding_pages=33,
    num_slots=3,
    max_model_len=64,
    row_buckets=(3,),
    table_sizes=(8,),
    extend_buckets=(ExtendBucket(tokens=16, block=8),),
    arena_rows=0,
)


@pytest.fixture(scope="module", params=["float32", "int8"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyModel, TinyModel]:
    """The same weights with the kernel and without."""
    folder = tmp_path_factory.mktemp("e2b")
    plan = replace(PLAN, kv_dtype=request.param)
    plain = make_tiny_model(folder, "e2b", plan=plan, optimize=False)
    with pltpu.force_tpu_interpret_mode():
        kernel = make_tiny_model(
            folder, "e2b", plan=replace(plan, chunk_pages=None), optimize=False
        )
    return kernel, plain


def test_tokens_are_those_of_plain_attention(models: tuple[TinyModel, TinyModel]) -> None:
    outputs = []
    for model in models:
        driven = HandDriven(model)
        # Ragged lengths around page borders and past the window; decode has a row of padding.
        slots = [driven.add(prompt_of(n)) for n in (33, 7)]
        for slot in slots:
            driven.prefill(slot, chunk=16)
        driven.decode(slots, steps=4)
        outputs.append(driven.outputs)

    assert outputs[0] == outputs[1]

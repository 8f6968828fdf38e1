"""int8 keys and values, and an int8 head, through runner and engine.

A request's tokens are its own here too.
"""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.types import SamplingParams
from tests import oracle
from tests.engine.test_prefixes import PROMPT, assert_hit_equals_miss
from tests.engine.tiny import (
    PLAN,
    HandDriven,
    Sizes,
    TinyEngine,
    TinyModel,
    assert_the_cache_stays_in_place,
    make_tiny_model,
    prompt_of,
    request_of,
    run_alone,
)

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Layers that share a cache and layers that own one, two programs."""
    few = replace(PLAN, row_buckets=(8,), extend_buckets=PLAN.extend_buckets[1:])
    folder = tmp_path_factory.mktemp("int8")
    return make_tiny_model(folder, "e2b", plan=replace(few, kv_dtype="int8"), int8_head=True)


def test_sequences_of_many_lengths_follow_an_oracle_that_rounds_alike(model: TinyModel) -> None:
    driven = HandDriven(model)
    prompts = {driven.add(prompt := prompt_of(n)): prompt for n in (1, 8, 15, 17, 33, 64, 80, 119)}
    for slot in prompts:
        driven.prefill(slot, chunk=64)

    driven.decode(list(prompts), steps=9)

    for slot, prompt in prompts.items():
        model.assert_greedy(prompt, driven.outputs[slot])


def test_a_prompt_in_chunks_follows_it_too(model: TinyModel) -> None:
    driven = HandDriven(model, seed=7)
    prompt = prompt_of(60)
    slot = driven.add(prompt)
    for part in (33, 8, 7, 11, 1):
        driven.extend((slot, part))

    driven.decode([slot], steps=6)

    model.assert_greedy(prompt, driven.outputs[slot])


def test_the_oracle_does_round(model: TinyModel) -> None:
    rounded = model.logits(PROMPT)
    exact = oracle.logits(model.tensors, model.config, list(PROMPT))

    assert 1e-3 < np.abs(rounded - exact).mean() / exact.std() < 0.1


@pytest.mark.parametrize("cut", [1, 8, 17, 31, 33, 40])
def test_hit_equals_miss(model: TinyModel, cut: int) -> None:
    assert_hit_equals_miss(model, cut)


def test_tokens_stay_the_same_in_company_and_where_requests_are_preempted(
    model: TinyModel,
) -> None:
    sampling = SamplingParams(max_tokens=1, seed=5, temperature=1.0)
    requests = [
        request_of(str(i), PROMPT[: 9 * (i % 5)] + prompt_of(20, seed=i), 30, sampling)
        for i in range(12)
    ]
    alone = [run_alone(model.runner, request) for request in requests]
    sizes = Sizes(num_pages=24, num_sliding_pages=24, num_slots=4)
    engine = TinyEngine(model.runner, sizes)
    engine.run(*requests)

    assert engine.num_preemptions > 0
    assert [engine.tokens_of(request.request_id) for request in requests] == alone


def test_no_step_copies_an_array_of_the_cache(model: TinyModel) -> None:
    assert_the_cache_stays_in_place(model)

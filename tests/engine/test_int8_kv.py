"""int8 keys and values through runner and engine: a request's tokens are its own here too."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.types import SamplingParams
from tests import oracle
from tests.engine.test_prefixes import PROMPT, assert_as_cold, cached_tokens, run, sizes_of
from tests.engine.tiny import (
    PLAN,
    HandDriven,
    Sizes,
    TinyEngine,
    TinyModel,
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
    return make_tiny_model(folder, "e2b", plan=replace(few, kv_dtype="int8"))


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
    engine = TinyEngine(model.runner, sizes_of(model))
    run(engine, "first", PROMPT, *range(1, len(PROMPT)))
    other = PROMPT[:cut] + prompt_of(45 - cut, seed=1)
    run(engine, "second", other)

    assert cached_tokens(engine, "second") == cut
    assert_as_cold(model, engine, "second", other)


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
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.run_until_idle()

    assert engine.num_preemptions > 0
    assert [engine.tokens_of(request.request_id) for request in requests] == alone


def test_no_step_copies_an_array_of_the_cache(model: TinyModel) -> None:
    driven = HandDriven(model, seed=3)
    slot = driven.add(prompt_of(40))
    runner = model.runner

    def addresses() -> list[int]:
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(runner._cache)]

    before = addresses()
    driven.prefill(slot, chunk=16)
    driven.decode([slot], steps=2)
    runner.copy_pages([(1, 2, 3, 4)])

    assert len(before) == 2 * len(model.config.kv_owners)
    assert addresses() == before

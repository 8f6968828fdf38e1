"""The step programs on a TPU or GPU, in bfloat16, against the oracle's float32."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests import oracle
from tests.engine import tiny
from tests.engine.tiny import HandDriven, TinyModel, make_tiny_model, prompt_of

pytestmark = [pytest.mark.accelerator, pytest.mark.timeout(600)]  # it waits for the compiler

PLAN = replace(tiny.PLAN, dtype="bfloat16", is_accelerator=True, row_buckets=(8,))

# Two logits this far apart keep their order when every product rounds its operands to bfloat16.
CLEAR = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    if jax.default_backend() == "cpu":
        pytest.skip("no accelerator here")
    folder = tmp_path_factory.mktemp("e2b")
    return make_tiny_model(folder, "e2b", plan=PLAN, options=None)


def test_greedy_ids_are_the_oracles_wherever_its_choice_is_clear(model: TinyModel) -> None:
    driven = HandDriven(model)
    prompts = {driven.add(prompt := prompt_of(n)): prompt for n in (1, 9, 33, 100)}
    for slot in prompts:
        driven.prefill(slot, chunk=64)

    driven.decode(list(prompts), steps=12)

    num_clear = 0
    for slot, prompt in prompts.items():
        ids = np.array(driven.outputs[slot])
        logits_TV = oracle.logits(model.tensors, model.config, [*prompt, *ids[:-1].tolist()])
        second_N, first_N = np.sort(logits_TV[len(prompt) - 1 :])[:, -2:].T
        is_clear_N = first_N - second_N > CLEAR
        expected_N = logits_TV[len(prompt) - 1 :].argmax(-1)
        np.testing.assert_array_equal(ids[is_clear_N], expected_N[is_clear_N])
        num_clear += int(is_clear_N.sum())
    assert num_clear >= 10

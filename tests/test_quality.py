"""scripts/quality.py: its sums on logits worked out by hand, and a run on a tiny checkpoint."""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.registry import load_config
from jaxserve.models.weights import load_params
from scripts.quality import Comparison, compare, with_int8_head

E2B = Path(__file__).parent / "data/checkpoints/gemma4-e2b"


def test_figures_are_those_of_the_tokens_that_came() -> None:
    # Probabilities of ½, ½ and ¼, ¾; of ½, ½ and ½, ½. A constant on all logits means nothing.
    reference = np.log(np.array([[1.0, 1.0], [1.0, 3.0]], np.float32))
    other = np.array([[5.0, 5.0], [0.0, 0.0]], np.float32)
    compared = Comparison()

    compared.add([reference, other], [0, 1])

    assert compared.perplexities == pytest.approx((math.sqrt(2 * 4 / 3), 2.0))
    assert compared.kl == pytest.approx([0.0, math.log(0.5) / 4 + 3 * math.log(1.5) / 4])
    assert compared.agrees == [True, False]
    assert compared.difference == pytest.approx([0.0, math.log(3) / 2])


def test_positions_without_a_next_token_do_not_count() -> None:
    compared = Comparison()
    compared.add([np.zeros((3, 4), np.float32)] * 2, [0, 1])
    assert [len(compared.nll), len(compared.kl), len(compared.agrees)] == [2, 2, 2]


def test_int8_keys_and_values_cost_little() -> None:
    config = load_config(E2B)
    loaded = load_params(E2B, config, jnp.float32, progress=lambda done, total: None)
    ids = np.random.default_rng(0).integers(2, config.vocab_size, 128).tolist()

    forced, decoded = compare((loaded.params, loaded.params), config, ids, 0, "int8")

    assert len(forced.nll) == 127
    assert decoded == []
    assert np.mean(forced.agrees) > 0.93
    assert 0 < np.mean(forced.kl) < 0.01


def test_an_int8_head_costs_little() -> None:
    config = load_config(E2B)
    loaded = load_params(E2B, config, jnp.float32, progress=lambda done, total: None)
    ids = np.random.default_rng(0).integers(2, config.vocab_size, 64).tolist()

    forced, _ = compare((loaded.params, with_int8_head(loaded.params)), config, ids, 0, None)

    assert np.mean(forced.agrees) > 0.93
    assert 0 < np.mean(forced.kl) < 0.01

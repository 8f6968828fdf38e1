"""Balanced keys: the same logits, channels of one size."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.key_balance import balance_keys
from jaxserve.models.registry import load_config
from jaxserve.models.specs import random_params
from tests import oracle
from tests.checkpoints import Kind, config_json, named_tensors, write_json_files


@pytest.mark.parametrize("kind", get_args(Kind))
def test_logits_stay_and_key_channels_become_alike(kind: Kind, tmp_path: Path) -> None:
    write_json_files(tmp_path, config_json(kind))
    config = load_config(tmp_path)
    params = random_params(config, jnp.float32, seed=3)
    ids = np.random.default_rng(4).integers(0, config.vocab_size, 40).tolist()

    balanced = balance_keys(params, config)

    before, after = (
        oracle.logits(named_tensors(each, config), config, ids) for each in (params, balanced)
    )
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-3)
    for i in config.kv_owners:
        head_dim = config.layers[i].head_dim
        norm_E = np.asarray(balanced.head_norms_L2E[i, 1])
        pairs = norm_E[:head_dim].reshape(2, -1)
        np.testing.assert_allclose((pairs**2).mean(axis=0), 1.0, rtol=1e-5)
        assert not norm_E[head_dim:].any()


def test_channels_without_a_weight_stay(tmp_path: Path) -> None:
    write_json_files(tmp_path, config_json("gemma3"))
    config = load_config(tmp_path)
    none = np.zeros((config.num_layers, 2, config.max_head_dim), np.float32)
    params = replace(random_params(config, jnp.float32, seed=3), head_norms_L2E=jnp.array(none))

    np.testing.assert_array_equal(balance_keys(params, config).head_norms_L2E, none)

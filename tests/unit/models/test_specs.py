"""The description of every weight."""

from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import load_config
from jaxserve.models.specs import abstract_params, param_specs, random_params
from tests.checkpoints import Kind, config_json, write_json_files


def tiny_config(folder: Path, kind: Kind) -> ModelConfig:
    write_json_files(folder, config_json(kind))
    return load_config(folder)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_weights_have_the_abstract_shapes(
    kind: Kind, dtype: jnp.dtype, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, kind)
    params = random_params(config, dtype, seed=0)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_params(config, dtype)
    )


def test_leaves_of_a_layer(tmp_path: Path) -> None:
    params = abstract_params(tiny_config(tmp_path, "e2b"), jnp.bfloat16)
    owner, shared = params.layers[2], params.layers[5]
    assert owner.qkv_OD.shape == ((4 + 1 + 1) * 32, 64)
    assert shared.qkv_OD.shape == (4 * 32, 64)
    assert shared.gate_up_OD.shape == (2 * 192, 64)
    assert owner.ple_gate_PD is not None
    assert owner.ple_gate_PD.shape == (32, 64)
    assert params.norms_LND.dtype == jnp.float32
    assert params.head_norms_L2E.shape == (6, 2, 32)


def test_a_dense_full_layer_has_no_value_rows(tmp_path: Path) -> None:
    params = abstract_params(tiny_config(tmp_path, "dense"), jnp.bfloat16)
    assert params.layers[2].qkv_OD.shape == ((4 + 1) * 32, 64)
    assert params.ple_embed is None
    assert params.layers[2].ple_gate_PD is None


@pytest.mark.parametrize("kind", get_args(Kind))
def test_matrices_are_covered_by_their_sources(kind: Kind, tmp_path: Path) -> None:
    for spec in param_specs(tiny_config(tmp_path, kind)):
        if spec.use != "vector":
            assert sum(source.shape[0] for source in spec.sources) == spec.shape[0]


def test_a_seed_repeats(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "gemma3")
    one, same, other = (random_params(config, jnp.float32, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.norms_LND, same.norms_LND)
    assert not np.array_equal(one.norms_LND, other.norms_LND)


def test_what_a_model_lacks_is_neutral(tmp_path: Path) -> None:
    params = random_params(tiny_config(tmp_path, "gemma3"), jnp.float32, seed=0)
    np.testing.assert_array_equal(params.layer_scalar_L, np.ones(4))
    np.testing.assert_array_equal(params.norms_LND[:, 4], np.ones((4, 64)))

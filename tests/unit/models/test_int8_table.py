"""The table of token embeddings as int8 rows: rounding, lookups, the head, loading."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.models import transformer
from jaxserve.models.int8_table import Int8Table, pack_table, round_rows
from jaxserve.models.layers import linear_transposed, take_rows
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.specs import abstract_params, random_params
from jaxserve.models.weights import CheckpointParams, Int4
from tests.checkpoints import DATA, Array, config_json, make_checkpoint, write_json_files


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def table_of(values_VD: Array) -> Int8Table:
    return pack_table(jnp.asarray(values_VD))


def test_a_value_is_off_by_half_a_level_at_most() -> None:
    values = draw(50, 96) * np.exp(3 * draw(50, 1, seed=1))
    levels, scale = round_rows(values)
    np.testing.assert_array_equal(np.abs(levels).max(-1), np.full(50, 127))
    error = np.abs(levels * scale[:, None] - values)
    assert (error <= 0.50001 * scale[:, None]).all()


def test_levels_times_their_scale_are_rounded_to_themselves() -> None:
    levels = np.random.default_rng(0).integers(-127, 128, (20, 64)).astype(np.int8)
    levels[:, 5] = np.where(levels[:, 5] < 0, -127, 127)
    scale = np.exp(draw(20)).astype(np.float32)
    again, same_scale = round_rows(levels * scale[:, None])
    np.testing.assert_array_equal(again, levels)
    np.testing.assert_allclose(same_scale, scale, rtol=1e-6)


def test_rows_of_zeros_and_of_the_largest_and_the_least_values() -> None:
    values = np.zeros((4, 8), ml_dtypes.bfloat16)
    values[1], values[2], values[3, 2] = 3e38, -1e-40, 1.0
    assert (values[2] < 0).all()
    levels, scale = round_rows(values)
    np.testing.assert_array_equal(levels[0], np.zeros(8))
    np.testing.assert_array_equal(levels[1], np.full(8, 127))
    np.testing.assert_array_equal(levels[3], 127 * np.eye(8)[2])
    assert np.abs(levels[2].astype(int)).max() <= 127
    assert np.isfinite(scale).all()
    z_VN = linear_transposed(table_of(values.astype(np.float32)), jnp.full((1, 8), 2.0**-8))
    np.testing.assert_array_equal(z_VN[0], [0.0])
    assert np.isfinite(z_VN).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_lookup_takes_levels_times_their_scale(dtype: jnp.dtype) -> None:
    values = jnp.asarray(draw(10, 64), dtype)
    levels, scale = round_rows(np.asarray(values))
    table = pack_table(values)
    assert table.dtype == dtype
    taken = take_rows(table, jnp.array([7, 0, 7]))
    np.testing.assert_array_equal(taken, (levels * scale[:, None])[[7, 0, 7]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_head_scales_the_products_of_the_levels(dtype: jnp.dtype, tmp_path: Path) -> None:
    write_json_files(tmp_path, config_json("gemma3"))
    config = load_config(tmp_path)
    dense = random_params(config, dtype, seed=0)
    table = pack_table(jnp.asarray(dense.embed_VD))
    x_ND = jnp.asarray(draw(3, config.model_dim))

    def logits(params: Params) -> jax.Array:
        return transformer.logits(params, config, x_ND)

    of_levels = logits(replace(dense, embed_VD=table.levels_VD.astype(dtype)))
    int8, exact = logits(replace(dense, embed_VD=table)), logits(dense)
    np.testing.assert_array_equal(int8, of_levels * table.scale_V[:, None])
    assert np.abs(int8 - exact).mean() < 0.01 * np.asarray(exact).std()


def test_equal_rows_have_equal_logits_whoever_is_beside_them() -> None:
    values = draw(600, 64)
    values[[3, 599]] = values[41]
    x_ND = jnp.asarray(draw(16, 64, seed=1))
    z_VN = np.asarray(linear_transposed(table_of(values), x_ND))
    np.testing.assert_array_equal(z_VN[[3, 599]], z_VN[[41, 41]])
    alone_VN = linear_transposed(table_of(values), x_ND[5:6])
    np.testing.assert_array_equal(alone_VN[:, 0], z_VN[:, 5])


@pytest.mark.parametrize(("form", "linears"), [("", "never"), ("-w4a16", "always")])
def test_a_checkpoint_loads_with_it(form: str, linears: Int4) -> None:
    folder = DATA / "checkpoints" / f"gemma4-e2b{form}"
    config = load_config(folder)
    source = CheckpointParams(folder, config, jnp.bfloat16, linears=linears, int8_embedding=True)
    loaded, described = source.load(lambda done, total: None), source.describe()
    assert loaded.packed_uses == {"embedding"} | ({"linear"} if linears == "always" else set())
    assert replace(loaded, params=described.params) == described
    abstract = abstract_params(config, jnp.bfloat16, loaded.packed_uses)
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
        for params in (loaded.params, described.params, abstract)
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert loaded.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert loaded.packed_bytes["int8"] == config.vocab_size * (config.model_dim + 4)
    dense = CheckpointParams(folder, config, jnp.bfloat16).load(lambda done, total: None)
    expected = pack_table(jnp.asarray(dense.params.embed_VD))
    jax.tree.map(np.testing.assert_array_equal, loaded.params.embed_VD, expected)


def test_a_table_is_rounded_by_blocks_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "gemma3")
    monkeypatch.setattr("jaxserve.models.weights._BLOCK_VALUES", 100 * 64)
    source = CheckpointParams(folder, load_config(folder), jnp.float32, int8_embedding=True)
    dense = CheckpointParams(folder, load_config(folder), jnp.float32)
    tables = [part.load(lambda done, total: None).params.embed_VD for part in (source, dense)]
    expected = pack_table(jnp.asarray(tables[1]))
    jax.tree.map(np.testing.assert_array_equal, tables[0], expected)

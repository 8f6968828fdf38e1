"""Loading of checkpoints whose weights stay int4, and what is computed with them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.evaluate import prompt_logits
from jaxserve.errors import ModelLoadError
from jaxserve.kernels.int4_matrix import Int4Matrix, unpack
from jaxserve.models.int4_table import Int4Table, take_int4_rows
from jaxserve.models.registry import load_config
from jaxserve.models.specs import abstract_params
from jaxserve.models.weights import CheckpointParams, Int4, LoadedParams
from tests.checkpoints import DATA, Array, make_checkpoint

W4A16 = DATA / "checkpoints" / "gemma4-e2b-w4a16"
Q4_0 = DATA / "checkpoints" / "gemma4-e2b-q4_0"


def load(folder: Path, linears: Int4 = "never", ple_table: Int4 = "never") -> LoadedParams:
    """Load a checkpoint; what it is said to be before must be what it is."""
    config = load_config(folder)
    source = CheckpointParams(folder, config, jnp.bfloat16, linears=linears, ple_table=ple_table)
    loaded, described = source.load(lambda done, total: None), source.describe()
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (loaded.params, described.params))
    assert shapes[0] == shapes[1]
    assert replace(loaded, params=described.params) == described
    return loaded


def dense(leaf: Any) -> Array:
    """Return a leaf's values, [out, in]."""
    if isinstance(leaf, Int4Matrix):
        return np.asarray(unpack(leaf), np.float32).T
    if isinstance(leaf, Int4Table):
        return np.asarray(take_int4_rows(leaf, jnp.arange(len(leaf.rows_VW))))
    return np.asarray(leaf, np.float32)


def leaves(loaded: LoadedParams) -> list[Any]:
    return jax.tree.leaves(
        loaded.params, is_leaf=lambda leaf: isinstance(leaf, Int4Matrix | Int4Table)
    )


def test_a_packed_checkpoint_stays_packed_bit_for_bit() -> None:
    loaded = load(W4A16, "if_stored")
    assert loaded.packed_uses == {"linear"}
    assert sum(isinstance(leaf, Int4Matrix) for leaf in leaves(loaded)) == 5 * 6 + 1
    for leaf, expected in zip(leaves(loaded), leaves(load(W4A16)), strict=True):
        np.testing.assert_array_equal(dense(leaf), dense(expected))


def test_values_on_a_grid_are_packed_at_load() -> None:
    loaded = load(Q4_0, "if_stored", "if_stored")
    assert loaded.packed_uses == {"linear", "ple_table"}
    for leaf, expected in zip(leaves(loaded), leaves(load(Q4_0)), strict=True):
        error = np.abs(dense(leaf) - dense(expected))
        # Half a digit of the step, of the product and of the stored value.
        assert (error <= 3 * 2**-8 * np.abs(dense(expected))).all()


def test_logits_are_those_of_the_unpacked_weights() -> None:
    config, ids = load_config(W4A16), [2, 7, 300, 41, 900, 5, 6, 7]
    int4, wide = (
        prompt_logits(loaded.params, config, ids, page_size=8, chunk=8)
        for loaded in (load(W4A16, "always", "always"), load(W4A16))
    )
    # Sums of the same products in another order, and the table's steps rounded to bfloat16.
    assert np.abs(int4 - wide).mean() < 0.05 * wide.std()


def test_the_size_is_that_of_the_arrays_and_of_the_abstract_ones() -> None:
    loaded = load(Q4_0, "always", "always")
    assert loaded.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert 0 < loaded.packed_bytes["int4"] < loaded.num_bytes
    abstract = abstract_params(load_config(Q4_0), jnp.bfloat16, loaded.packed_uses)
    structure: Any = jax.tree.structure(abstract)
    assert structure == jax.tree.structure(loaded.params)
    sizes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(loaded.params)]
    assert sizes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)]


def test_a_checkpoint_that_is_not_int4_is_left_or_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    assert load(folder, "if_stored", "if_stored").packed_uses == frozenset()
    with pytest.raises(ModelLoadError, match=r"is not int4: \d+ of its \d+ groups of 32"):
        load(folder, "always")


def test_a_table_is_rounded_if_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    with caplog.at_level(logging.WARNING):
        loaded = load(folder, "never", "always")
    assert "embed_tokens_per_layer.weight was rounded to int4" in caplog.text
    assert loaded.packed_uses == {"ple_table"}
    x = dense(load(folder).params.ple_embed)
    assert np.linalg.norm(dense(loaded.params.ple_embed) - x) < 0.1 * np.linalg.norm(x)


def test_int4_for_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no per-layer embeddings"):
        load(make_checkpoint(tmp_path, "gemma3"), "never", "always")

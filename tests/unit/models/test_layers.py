"""The arithmetic of layers: sums whose order depends on no other row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.layers import rms, sum_rows


@pytest.mark.parametrize("shape", [(4, 256), (1, 256), (8, 128), (640,)])
def test_a_norm_has_the_same_bits_whatever_the_rows_of_a_step(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1024, *shape)), jnp.float32)
    normed = jax.jit(partial(rms, eps=1e-6))
    all_rows = np.asarray(normed(x))
    for num_rows in (1, 2, 3, 8, 64):
        np.testing.assert_array_equal(normed(x[:num_rows]), all_rows[:num_rows])


@pytest.mark.parametrize("size", [1, 2, 7, 96, 128, 640])
def test_sums_of_rows(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((3, 5, size)).astype(np.float32)
    np.testing.assert_allclose(sum_rows(jnp.asarray(x)), x.sum(-1, np.float64), atol=1e-4)

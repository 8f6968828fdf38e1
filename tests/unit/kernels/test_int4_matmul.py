"""The int4 product's kernel on a simulated TPU against plain numpy, and the packed form."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.kernels.int4_matmul import (
    GROUP,
    Int4Matrix,
    int4_matmul,
    int4_matmul_kernel,
    largest_tile,
    pack,
    packed_shapes,
    unpack,
)

Levels = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]


def random_weight(num_outputs: int, num_inputs: int) -> tuple[Levels, Floats, Int4Matrix]:
    """Draw levels and steps of either sign, and pack them."""
    rng = np.random.default_rng([num_outputs, num_inputs])
    levels = rng.integers(-8, 8, (num_outputs, num_inputs), np.int8)
    steps = rng.uniform(-0.1, 0.1, (num_outputs, num_inputs // GROUP)).astype(ml_dtypes.bfloat16)
    return levels, steps.astype(np.float32), pack(jnp.asarray(levels), jnp.asarray(steps))


def dense(levels: Levels, steps: Floats) -> Floats:
    """Multiply out as a checkpoint's reader does: products rounded to bfloat16."""
    values = levels.astype(np.float32) * np.repeat(steps, GROUP, axis=1)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def rows_of(count: int, num_inputs: int) -> jax.Array:
    x = np.random.default_rng(count).standard_normal((count, num_inputs), np.float32)
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("shape", [(128, 128), (40, 96), (384, 640)])
def test_unpacking_gives_the_weights_bit_for_bit(shape: tuple[int, int]) -> None:
    levels, steps, weight = random_weight(*shape)
    np.testing.assert_array_equal(np.asarray(unpack(weight), np.float32).T, dense(levels, steps))
    assert (weight.words_WO.shape, weight.steps_GO.shape) == packed_shapes(shape)


def test_four_and_a_half_bits_a_weight() -> None:
    words, steps = packed_shapes((24576, 1536))
    assert np.prod(words) * 4 + np.prod(steps) * 2 == 24576 * 1536 * 4.5 / 8


@pytest.mark.parametrize("shape", [(128, 256), (24, 96)])
def test_every_input_meets_its_own_weight(shape: tuple[int, int]) -> None:
    # Row i is one-hot at input i: the answer is the weight's column i, exactly.
    levels, steps, weight = random_weight(*shape)
    one_hot = jnp.eye(shape[1], dtype=jnp.bfloat16)
    y = int4_matmul_kernel(weight, one_hot, interpret=True)
    np.testing.assert_array_equal(np.asarray(y).T, dense(levels, steps))


# The last two take several tiles along inputs and outputs, and along the rows.
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 256, 384), (8, 1536, 256), (13, 200, 160), (8, 3072, 2560), (1100, 128, 128)],
)
def test_the_kernel_multiplies_as_numpy_does(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    levels, steps, weight = random_weight(num_outputs, num_inputs)
    x = rows_of(num_rows, num_inputs)
    y = int4_matmul_kernel(weight, x, interpret=True)
    assert y.shape == (num_rows, num_outputs)
    expected = np.asarray(x, np.float32) @ dense(levels, steps).T
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-4, atol=1e-4)


def test_elsewhere_the_reference_multiplies() -> None:
    levels, steps, weight = random_weight(48, 96)
    x = rows_of(3, 96)
    y = jax.jit(int4_matmul)(weight, x)
    expected = np.asarray(x, np.float32) @ dense(levels, steps).T
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "limit", "tile"), [(1536, 2048, 1536), (8960, 1024, 896)])
def test_tiles_divide(size: int, limit: int, tile: int) -> None:
    assert largest_tile(size, limit) == tile

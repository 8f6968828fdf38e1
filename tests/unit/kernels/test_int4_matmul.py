"""The int4 products' kernels on a simulated TPU against plain numpy, and the packed form."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.kernels.int4_kernels import (
    added_kernel,
    gated_kernel,
    largest_tile,
    matmul_kernel,
    normed_kernel,
)
from jaxserve.kernels.int4_matmul import (
    int4_added_matmul,
    int4_gated_matmul,
    int4_matmul,
    int4_normed_matmul,
)
from jaxserve.kernels.int4_matrix import GROUP, Int4Matrix, pack, packed_shapes, unpack

Levels = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]
EPS = 1e-6


def random_weight(num_outputs: int, num_inputs: int) -> tuple[Levels, Floats, Int4Matrix]:
    """Draw levels and steps of either sign, and pack them."""
    rng = np.random.default_rng([num_outputs, num_inputs])
    levels = rng.integers(-8, 8, (num_outputs, num_inputs), np.int8)
    steps = rng.uniform(-0.1, 0.1, (num_outputs, num_inputs // GROUP)).astype(ml_dtypes.bfloat16)
    return levels, steps.astype(np.float32), pack(jnp.asarray(levels), jnp.asarray(steps))


def dense(levels: Levels, steps: Floats) -> Floats:
    """Multiply out as a checkpoint's reader does: products rounded to bfloat16."""
    return rounded(levels.astype(np.float32) * np.repeat(steps, GROUP, axis=1))


def rounded(x: Floats) -> Floats:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def draw(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def norm(x: Floats, weight: Floats) -> Floats:
    y: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return y


def gelu(x: Floats) -> Floats:
    y: Floats = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


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
    y = matmul_kernel(weight, one_hot, interpret=True)
    np.testing.assert_array_equal(np.asarray(y).T, dense(levels, steps))


# The last two take several tiles along inputs and outputs, and along the rows.
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 256, 384), (13, 200, 160), (8, 3072, 2560), (1100, 128, 128)],
)
def test_the_kernel_multiplies_as_numpy_does(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    levels, steps, weight = random_weight(num_outputs, num_inputs)
    x = rounded(draw(num_rows, num_inputs))
    y = matmul_kernel(weight, jnp.asarray(x), interpret=True)
    assert y.shape == (num_rows, num_outputs)
    np.testing.assert_allclose(y, x @ dense(levels, steps).T, rtol=1e-4, atol=1e-4)


# Several tiles of outputs; inputs and outputs that are no whole tiles; several tiles of rows.
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(8, 5120, 512), (3, 72, 96), (1030, 256, 128)]
)
def test_a_kernel_norms_its_input(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    levels, steps, weight = random_weight(num_outputs, num_inputs)
    x, factor = 5 * draw(num_rows, num_inputs), draw(num_inputs, seed=1)
    y = normed_kernel(weight, jnp.asarray(x), jnp.asarray(factor), eps=EPS, interpret=True)
    expected = rounded(norm(x, factor)) @ dense(levels, steps).T
    assert y.shape == expected.shape
    # A row's rounding to bfloat16 may differ in the last digit of an input.
    np.testing.assert_allclose(y, expected, rtol=0, atol=0.01 * expected.std())


@pytest.mark.parametrize(("num_rows", "num_gates"), [(8, 4096), (5, 96)])
def test_a_kernel_gates(num_rows: int, num_gates: int) -> None:
    levels, steps, weight = random_weight(2 * num_gates, 512)
    x, factor = 5 * draw(num_rows, 512), draw(512, seed=1)
    y = gated_kernel(weight, jnp.asarray(x), jnp.asarray(factor), eps=EPS, interpret=True)
    gate, up = np.split(rounded(norm(x, factor)) @ dense(levels, steps).T, 2, axis=1)
    expected = gelu(gate) * up
    assert (y.shape, y.dtype) == (expected.shape, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=0.01, atol=0.01)


# Several tiles of inputs; no whole tiles; several tiles of rows.
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(8, 1536, 3072), (3, 72, 96), (520, 256, 128)]
)
def test_a_kernel_adds_to_the_stream(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    levels, steps, weight = random_weight(num_outputs, num_inputs)
    x, factor = rounded(draw(num_rows, num_inputs)), draw(num_outputs, seed=1)
    stream = draw(num_rows, num_outputs, seed=2)
    operands = (jnp.asarray(operand) for operand in (x, stream, factor))
    y = added_kernel(weight, *operands, eps=EPS, interpret=True)
    expected = stream + norm(x @ dense(levels, steps).T, factor)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_elsewhere_the_references_compute_the_same() -> None:
    _, _, weight = random_weight(256, 256)
    x, stream = jnp.asarray(draw(8, 256)), jnp.asarray(draw(8, 256, seed=2))
    factor = jnp.asarray(draw(256, seed=1))
    pairs = [
        (jax.jit(int4_matmul)(weight, x), matmul_kernel(weight, x, interpret=True)),
        (
            int4_normed_matmul(weight, x, factor, EPS),
            normed_kernel(weight, x, factor, eps=EPS, interpret=True),
        ),
        (
            int4_gated_matmul(weight, x, factor, EPS),
            gated_kernel(weight, x, factor, eps=EPS, interpret=True),
        ),
        (
            int4_added_matmul(weight, x, stream, factor, EPS),
            added_kernel(weight, x, stream, factor, eps=EPS, interpret=True),
        ),
    ]
    for reference, kernel in pairs:
        assert reference.dtype == kernel.dtype
        expected = np.asarray(reference, np.float32)
        np.testing.assert_allclose(np.asarray(kernel, np.float32), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("size", "limit", "tile"), [(1536, 2048, 1536), (8960, 1024, 896), (640, 64, 128)]
)
def test_tiles_divide(size: int, limit: int, tile: int) -> None:
    assert largest_tile(size, limit) == tile

"""int4 weights of checkpoints: unpacking, and fitting values to the grid that they lie on."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.models.int4_table import Int4Table, pack_rows, row_size, take_int4_rows
from jaxserve.models.quantization import fit_grid, stored_shapes, unpack_int4

GROUP = 32
Array = npt.NDArray[Any]


def test_the_lowest_bits_hold_the_first_input() -> None:
    # Levels -8, -7, ... 7 twice: nibbles 0 to 15, eight to a word, the first in the lowest bits.
    words = np.array([[0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]], np.uint32).view(np.int32)
    steps = np.array([[2.0]], ml_dtypes.bfloat16)
    levels = np.tile(np.arange(-8, 8), 2)
    np.testing.assert_array_equal(unpack_int4(words, steps).astype(np.float32)[0], 2.0 * levels)


def test_each_group_has_its_step_and_products_round_to_the_steps_dtype() -> None:
    words = np.full((1, 8), -1, np.int32)  # level 7 everywhere
    steps = np.array([[1.0, 1.0078125]], ml_dtypes.bfloat16)
    values = unpack_int4(words, steps)
    assert values.dtype == ml_dtypes.bfloat16
    # 7 * 1.0078125 = 7.0546875 lies between the bf16 values 7.03125 and 7.0625.
    np.testing.assert_array_equal(values.astype(np.float32)[0], [7.0] * 32 + [7.0625] * 32)


def test_shapes() -> None:
    assert stored_shapes(6, 64) == ((6, 8), (6, 2), (2,))


def bfloat16_groups(levels_RI: Array, seed: int = 0) -> Array:
    """Multiply by float16 steps of either sign, as Q4_0 holds them, and round to bfloat16."""
    rng = np.random.default_rng(seed)
    shape = (len(levels_RI), levels_RI.shape[1] // GROUP)
    steps = rng.uniform(0.001, 0.1, shape) * rng.choice([-1.0, 1.0], shape)
    steps = steps.astype(np.float16).astype(np.float32)
    values = levels_RI.astype(np.float32) * np.repeat(steps, GROUP, axis=1)
    rounded: Array = values.astype(ml_dtypes.bfloat16)
    return rounded


def restored(levels: Any, steps: Any) -> Array:
    steps = np.repeat(np.asarray(steps, np.float32), GROUP, axis=1)
    restored: Array = np.asarray(levels, np.float32) * steps
    return restored


def levels_with_peak(peak: int, num_rows: int = 64) -> Array:
    """Draw rows of two groups whose level of largest size is exactly `peak` (8: minus 8)."""
    rng = np.random.default_rng(peak)
    levels = rng.integers(-peak, min(peak, 7) + 1, (num_rows, 2 * GROUP))
    levels[:, ::GROUP] = -peak
    return levels


@pytest.mark.parametrize("peak", range(1, 9))
def test_a_grid_is_found_whatever_its_largest_level(peak: int) -> None:
    values = bfloat16_groups(levels_with_peak(peak))
    fitted = fit_grid(jnp.asarray(values))
    assert bool(fitted.fits_RG.all())
    x = values.astype(np.float32)
    # The step is rounded to bfloat16, and so was the value: two half digits.
    error = np.abs(restored(fitted.levels_RI, fitted.steps_RG) - x)
    assert (error <= 2**-7 * np.abs(x)).all()


@pytest.mark.parametrize("peak", [5, 7])
def test_the_largest_value_is_not_taken_for_level_8(peak: int) -> None:
    # The shortcut that these groups defeat: it is off by more than a third of a step.
    x = bfloat16_groups(levels_with_peak(peak)).astype(np.float32)
    steps = np.abs(x.reshape(-1, GROUP)).max(axis=1, keepdims=True) / 8
    shortcut = (np.round(x.reshape(-1, GROUP) / steps) * steps).reshape(x.shape)
    assert (np.abs(shortcut - x) / np.repeat(steps, GROUP).reshape(x.shape)).max() > 1 / 3
    fitted = fit_grid(jnp.asarray(x))
    assert bool(fitted.fits_RG.all())


def test_groups_on_no_grid_are_marked() -> None:
    values = bfloat16_groups(levels_with_peak(8))
    rng = np.random.default_rng(0)
    values[3, GROUP:] = rng.standard_normal(GROUP).astype(ml_dtypes.bfloat16)
    values[5, :2] = [1.0, -1.0]  # both would be level 8 ...
    values[5, 2:GROUP] = 1 / 8  # ... of this step
    fits = np.array(fit_grid(jnp.asarray(values)).fits_RG)
    assert not fits[3, 1]
    assert not fits[5, 0]
    fits[[3, 5], [1, 0]] = True
    assert fits.all()


def test_other_values_are_rounded_to_a_near_grid() -> None:
    x = np.random.default_rng(1).standard_normal((50, 4 * GROUP)).astype(np.float32)
    fitted = fit_grid(jnp.asarray(x))
    assert np.asarray(fitted.levels_RI).min() == -8
    error = np.linalg.norm(restored(fitted.levels_RI, fitted.steps_RG) - x) / np.linalg.norm(x)
    assert error < 0.1


def test_zeros_stay_zeros() -> None:
    fitted = fit_grid(jnp.zeros((1, GROUP), jnp.bfloat16))
    assert bool(fitted.fits_RG.all())
    np.testing.assert_array_equal(restored(fitted.levels_RI, fitted.steps_RG), np.zeros((1, GROUP)))


@pytest.mark.parametrize("num_columns", [64, 224])
def test_a_table_gives_its_rows_back(num_columns: int) -> None:
    rng = np.random.default_rng(num_columns)
    levels = rng.integers(-8, 8, (10, num_columns), np.int8)
    steps = rng.standard_normal((10, num_columns // GROUP)).astype(ml_dtypes.bfloat16)
    rows_VW = pack_rows(jnp.asarray(levels), jnp.asarray(steps))
    assert rows_VW.shape == (10, row_size(num_columns))
    taken = take_int4_rows(
        Int4Table(rows_VW=rows_VW, num_columns=num_columns), jnp.array([7, 0, 7])
    )
    np.testing.assert_array_equal(taken, restored(levels, steps)[[7, 0, 7]])

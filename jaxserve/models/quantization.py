"""int4 weights of checkpoints: compressed-tensors' packed form, and bfloat16 values on a grid.

Symmetric, a step for every GROUP inputs of a row, levels -8 to 7, no zero points. Decided by
tensors' shapes and values alone: other forms that a quantization_config may name do not fit them.
R rows, I inputs of a row, G groups of inputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.kernels.int4_matrix import GROUP, PER_WORD

SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape")

LEVEL_LIMIT = 8
GRID_TOLERANCE = 2**-7 * 1.01
"""Relative: half a bfloat16 digit of the value itself, and half of the one its step came from."""


class Fitted(NamedTuple):
    """Values as levels of a step.

    Attributes:
        levels_RI: int8 of [-8, 7].
        steps_RG: bfloat16, of either sign.
        fits_RG: whether the levels reproduce the group as bfloat16 would round it.
    """

    levels_RI: jax.Array
    steps_RG: jax.Array
    fits_RG: jax.Array


def stored_shapes(out: int, cols: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int]]:
    """Return the shapes of the words, the steps and the shape tensor of an [out, in] weight."""
    return (out, cols // PER_WORD), (out, cols // GROUP), (2,)


def stored_levels(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
    """Return the levels [out, in] of words int32 [out, in / 8].

    Input 8c + j lies in bits [4j, 4j + 4) of word c, as level + 8.
    """
    out, num_words = words.shape
    # On a little-endian machine input 2b is the low nibble of byte b.
    packed = words.view(np.uint8)
    levels = np.empty((out, num_words * PER_WORD), np.int8)
    levels[:, 0::2] = packed & 15
    levels[:, 1::2] = packed >> 4
    levels -= 8
    return levels


def unpack_int4(words: npt.NDArray[np.int32], steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return level times step, [out, in], rounded to the steps' dtype as the reference does."""
    grouped = stored_levels(words).reshape(len(words), -1, GROUP).astype(np.float32)
    grouped *= steps.astype(np.float32)[:, :, None]
    return grouped.astype(steps.dtype).reshape(len(words), -1)


@jax.jit
def fit_grid(values_RI: jax.Array) -> Fitted:
    """Find the grid that values lie on, group by group; where none is, round to a near one.

    A group may peak below level 8, so its largest value can be any level: all are tried, and the
    largest step that reproduces the group wins. Least squares then refine it, for the largest value
    was rounded itself.
    """
    num_rows = values_RI.shape[0]
    x = values_RI.astype(jnp.float32).reshape(num_rows, -1, GROUP)
    peak = jnp.abs(x).max(axis=-1, keepdims=True)
    signed_peak = jnp.where(x.max(axis=-1, keepdims=True) == peak, peak, -peak)

    # Q4_0's own rule, which clips: the value of largest size is level -8.
    best = jnp.clip(jnp.round(_divide(x, signed_peak / -LEVEL_LIMIT)), -LEVEL_LIMIT, 7)
    fits_RG = jnp.zeros(x.shape[:2], bool)

    def try_level(i: jax.Array | int, found: tuple[jax.Array, jax.Array]) -> Any:
        best, fits_RG = found
        step = peak / (LEVEL_LIMIT - i)
        levels = jnp.round(_divide(x, step))
        is_near = (jnp.abs(levels * step - x) <= GRID_TOLERANCE * jnp.abs(x)).all(axis=-1)
        # Level 8 exists on one side only: a negative step has it on the other.
        levels = jnp.where(levels.max(axis=-1, keepdims=True) > 7, -levels, levels)
        fits = is_near & (levels.max(axis=-1) <= 7)
        return jnp.where(fits[..., None], levels, best), fits_RG | fits

    best, fits_RG = lax.fori_loop(0, LEVEL_LIMIT, try_level, (best, fits_RG))
    steps_RG = _divide((x * best).sum(axis=-1), (best * best).sum(axis=-1))
    return Fitted(
        levels_RI=best.astype(jnp.int8).reshape(num_rows, -1),
        steps_RG=steps_RG.astype(jnp.bfloat16),
        fits_RG=fits_RG,
    )


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Divide; 0 where the divisor is 0, as in a group of zeros."""
    return x / jnp.where(y == 0, jnp.inf, y)

"""The table of token embeddings as int8 rows: looked up, and multiplied by as the head.

A row has one float32 scale, its largest value over 127, which serves both uses: a lookup multiplies
the levels that it takes, a product its sums. Levels are exact in bfloat16, so the product rounds
its input and nothing else (docs/decisions/0021). V rows, D columns, N rows taken.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

MAX_LEVEL = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Table:
    """Rows of levels [-127, 127] and a scale for each.

    Attributes:
        levels_VD: int8.
        scale_V: float32; 0 of a row of zeros.
        dtype: of a product's operands.
    """

    levels_VD: jax.Array
    scale_V: jax.Array
    dtype: np.dtype[Any] = field(metadata={"static": True})


def round_rows(
    values_ND: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Return the nearest levels [N, D] of rows and their scales [N]."""
    x_ND = values_ND.astype(np.float32)
    scale_N = np.abs(x_ND).max(axis=-1) / np.float32(MAX_LEVEL)
    x_ND /= np.where(scale_N > 0, scale_N, np.inf)[:, None]
    # A scale without all its digits, below 1e-38, would let a level exceed the largest.
    np.clip(np.rint(x_ND, out=x_ND), -MAX_LEVEL, MAX_LEVEL, out=x_ND)
    return x_ND.astype(np.int8), scale_N


def pack_table(values_VD: jax.Array) -> Int8Table:
    """Round a whole table, for products whose operands have its dtype."""
    levels_VD, scale_V = round_rows(np.asarray(values_VD))
    return Int8Table(
        levels_VD=jnp.asarray(levels_VD), scale_V=jnp.asarray(scale_V), dtype=values_VD.dtype
    )


def take_int8_rows(table: Int8Table, index_N: jax.Array) -> jax.Array:
    """Return level times scale, float32 [N, D]."""
    return table.levels_VD[index_N].astype(jnp.float32) * table.scale_V[index_N][:, None]

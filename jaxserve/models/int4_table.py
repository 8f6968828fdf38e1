"""A table of int4 rows that are gathered and then unpacked: the per-layer embeddings.

One int32 array, so that a lookup is one gather: a row's levels, then its steps. Eighths of a row
lie over each other, level + 8 of column j·C/8 + c at bits [4j, 4j + 4) of word c; steps are
bfloat16, that of group g in the low half of word g, of group g + G/2 in the high half. V rows, C
columns, G groups of columns, N rows taken.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.constants import LANES
from jaxserve.kernels.int4_matrix import GROUP, PER_WORD


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Table:
    """Rows of `num_columns` int4 values, packed in int32 [V, row_size(num_columns)]."""

    rows_VW: jax.Array
    num_columns: int = field(metadata={"static": True})


def row_size(num_columns: int) -> int:
    """Return the words of a row; columns are a multiple of GROUP.

    Whole LANES of words: else each gather would copy the whole table.
    """
    num_words = num_columns // PER_WORD + _num_step_words(num_columns)
    return -(-num_words // LANES) * LANES


def _num_step_words(num_columns: int) -> int:
    return -(-num_columns // (2 * GROUP))


@jax.jit
def pack_rows(levels_NC: jax.Array, steps_NG: jax.Array) -> jax.Array:
    """Pack levels of [-8, 7], int8, and bfloat16 steps; returns int32 [N, row_size(C)]."""
    num_rows, num_columns = levels_NC.shape
    nibbles = (levels_NC.astype(jnp.int32) + 8).reshape(num_rows, PER_WORD, -1)
    shift = 4 * jnp.arange(PER_WORD)[:, None]
    words = (nibbles << shift).sum(axis=1, dtype=jnp.int32)  # no two overlap
    num_words = _num_step_words(num_columns)
    steps = jnp.pad(steps_NG, ((0, 0), (0, 2 * num_words - steps_NG.shape[1])))
    halves = lax.bitcast_convert_type(steps, jnp.uint16).astype(jnp.int32)
    halves = halves.reshape(num_rows, 2, num_words)
    row = jnp.concatenate([words, halves[:, 0] | (halves[:, 1] << 16)], axis=1)
    return jnp.pad(row, ((0, 0), (0, row_size(num_columns) - row.shape[1])))


def take_int4_rows(table: Int4Table, index_N: jax.Array) -> jax.Array:
    """Return level times step, float32 [N, C]."""
    num_columns = table.num_columns
    rows_NW = table.rows_VW[index_N]
    num_words = num_columns // PER_WORD
    words, pairs, _ = jnp.split(
        rows_NW, [num_words, num_words + _num_step_words(num_columns)], axis=1
    )
    shift = 4 * jnp.arange(PER_WORD)[:, None]
    levels = ((words[:, None] >> shift) & 15) - 8
    # A bfloat16 is the upper half of a float32.
    steps = jnp.concatenate([pairs << 16, pairs & -65536], axis=1)
    steps_NG = lax.bitcast_convert_type(steps, jnp.float32)[:, : num_columns // GROUP]
    grouped = levels.astype(jnp.float32).reshape(len(index_N), -1, GROUP)
    values: jax.Array = (grouped * steps_NG[..., None]).reshape(-1, num_columns)
    return values

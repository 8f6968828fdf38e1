"""The arithmetic of a decoder layer besides attention: products, norms, rotary embedding, GELU.

Activations are float32; a product rounds its input to the weight's dtype and accumulates in float32
(docs/decisions/0009). N flat tokens, O and I a product's output and input width, E head dim.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.kernels.int4_matmul import (
    int4_added_matmul,
    int4_gated_matmul,
    int4_matmul,
    int4_normed_matmul,
)
from jaxserve.kernels.int4_matrix import Int4Matrix
from jaxserve.models.config import RopeConfig
from jaxserve.models.int4_table import Int4Table, take_int4_rows
from jaxserve.models.int8_table import Int8Table, take_int8_rows
from jaxserve.models.params import Matrix

ROW_MULTIPLE = 8
"""Rows of a product are padded to a multiple of this.

XLA's CPU backend has slow forms for fewer, and rounds them differently.
"""

LEFT_WEIGHT_MAX_ROWS = 32
"""Up to so many rows the weight is the left operand, the form that streams it fastest on a CPU."""

_LANES = 16
"""Numbers that a sum in order adds at once, as one AVX-512 register does."""

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def operand_dtype(w_OI: Matrix) -> DTypeLike:
    """Return what a product rounds its input to, and attention its operands."""
    return jnp.bfloat16 if isinstance(w_OI, Int4Matrix) else w_OI.dtype


def linear(w_OI: Matrix, x_NI: jax.Array) -> jax.Array:
    """Return x·Wᵀ as float32 [N, O]; a row's bits do not depend on how full a decode batch is."""
    if isinstance(w_OI, Int4Matrix):
        return int4_matmul(w_OI, x_NI)
    if x_NI.shape[0] <= LEFT_WEIGHT_MAX_ROWS:
        y_ON = linear_transposed(w_OI, x_NI)
        # XLA would turn a transposed product into one with the weight on the right.
        left_ON: jax.Array = lax.platform_dependent(
            y_ON, cpu=lax.optimization_barrier, default=lambda y_ON: y_ON
        )
        return left_ON.T
    x_NI, num_rows = pad_rows(x_NI), x_NI.shape[0]
    y_NO = lax.dot_general(
        x_NI.astype(w_OI.dtype), w_OI, _CONTRACT_LAST, preferred_element_type=jnp.float32
    )
    return y_NO[:num_rows]


def normed_linear(w_OI: Matrix, x_NI: jax.Array, norm_I: jax.Array, eps: float) -> jax.Array:
    """Return norm(x)·Wᵀ as float32 [N, O]."""
    if isinstance(w_OI, Int4Matrix):
        return int4_normed_matmul(w_OI, x_NI, norm_I, eps)
    return linear(w_OI, norm(x_NI, norm_I, eps))


def gated_linear(w_OI: Matrix, x_NI: jax.Array, norm_I: jax.Array, eps: float) -> jax.Array:
    """Return gelu(gate)·up [N, F] of norm(x); the weight's rows are F of gate, then F of up."""
    if isinstance(w_OI, Int4Matrix):
        return int4_gated_matmul(w_OI, x_NI, norm_I, eps)
    gate_NF, up_NF = jnp.split(normed_linear(w_OI, x_NI, norm_I, eps), 2, axis=1)
    return gelu(gate_NF) * up_NF


def add_linear(
    stream_NO: jax.Array, w_OI: Matrix, x_NI: jax.Array, norm_O: jax.Array, eps: float
) -> jax.Array:
    """Return stream + norm(x·Wᵀ), float32 [N, O]."""
    if isinstance(w_OI, Int4Matrix):
        return int4_added_matmul(w_OI, x_NI, stream_NO, norm_O, eps)
    return stream_NO + norm(linear(w_OI, x_NI), norm_O, eps)


def linear_transposed(w_OI: jax.Array | Int8Table, x_NI: jax.Array) -> jax.Array:
    """Return W·xᵀ as float32 [O, N], for few rows."""
    if isinstance(w_OI, Int8Table):
        levels_ON = linear_transposed(w_OI.levels_VD.astype(w_OI.dtype), x_NI)
        return levels_ON * w_OI.scale_V[:, None]
    x_NI, num_rows = pad_rows(x_NI), x_NI.shape[0]
    y_ON = lax.dot_general(
        w_OI, x_NI.astype(w_OI.dtype), _CONTRACT_LAST, preferred_element_type=jnp.float32
    )
    return y_ON[:, :num_rows]


def take_rows(table: jax.Array | Int4Table | Int8Table, index_N: jax.Array) -> jax.Array:
    """Return rows of a table as float32 [N, columns]."""
    if isinstance(table, Int4Table):
        return take_int4_rows(table, index_N)
    if isinstance(table, Int8Table):
        # A single row is sliced out by the TPU's compiler, which copies the whole table for it.
        return take_int8_rows(table, pad_rows(index_N))[: len(index_N)]
    return table[index_N].astype(jnp.float32)


def pad_rows(x: jax.Array) -> jax.Array:
    """Fill the first axis up to a multiple of ROW_MULTIPLE with zeros."""
    return jnp.pad(x, ((0, -x.shape[0] % ROW_MULTIPLE), *((0, 0),) * (x.ndim - 1)))


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum over the last axis; on a CPU in an order that no other axis changes.

    XLA's CPU backend chooses the order of a plain sum by the whole shape, so that a row's bits
    would depend on how many others there are.
    """
    summed: jax.Array = lax.platform_dependent(
        x, cpu=_sum_in_order, default=partial(jnp.sum, axis=-1)
    )
    return summed


def _sum_in_order(x: jax.Array) -> jax.Array:
    """Add pieces of _LANES side by side, then the lanes by halves."""
    x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -x.shape[-1] % _LANES)))
    total = reduce(jnp.add, jnp.split(x, x.shape[-1] // _LANES, axis=-1))
    while total.shape[-1] > 1:
        total = reduce(jnp.add, jnp.split(total, 2, axis=-1))
    return total[..., 0]


def rms(x32: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square of the last axis."""
    return x32 * lax.rsqrt(sum_rows(x32 * x32)[..., None] / x32.shape[-1] + eps)


def norm(x32: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm with a plain factor; a family's 1 + w was added at load."""
    return rms(x32, eps) * weight


def rope_tables(
    rope: RopeConfig, head_dim: int, positions_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, float32 [N, E/2], of positions int32 [N]."""
    pair = jnp.arange(head_dim // 2)
    frequency = jnp.float32(rope.theta) ** (-2.0 * pair / head_dim) / rope.factor
    frequency = jnp.where(pair < rope.num_pairs, frequency, 0.0)
    angle = positions_N[:, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x_NHE: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn channel pairs (c, c + E/2) of every head by the token's angles."""
    cos, sin = (table[:, None, :] for table in tables)
    first, second = jnp.split(x_NHE, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gelu(x32: jax.Array) -> jax.Array:
    """Return the tanh form of GELU, `gelu_pytorch_tanh` in checkpoints."""
    return jax.nn.gelu(x32, approximate=True)

"""TPU kernels that multiply by packed int4 weights, and do what surrounds the product in a layer.

Weights are unpacked a tile at a time on their way to the matrix unit, in five vector operations for
2,048 of them. Every axis is tiled. N rows, O outputs, I inputs, F outputs of a gate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.constants import BFLOAT16_128
from jaxserve.kernels.int4_matrix import GROUP, PLANES, TILE, WORD_ROWS, Int4Matrix

NIBBLES = 0x000F000F
"""Takes level + 8 of a plane out of a word, for two inputs at once."""

FEW_ROWS = 256
MAX_WEIGHTS = {True: 3 << 19, False: 3 << 18}
"""Weights of a grid step, at most, by whether rows are few: many amortise a step's fixed cost."""

MAX_ROWS = 1024
MAX_ROWS_WHOLE = 512
"""Rows of a tile, at most; fewer where a tile holds whole rows of the output."""

MAX_INPUTS = 2048
MXU_DEPTH = 256
VMEM_BYTES = 64 << 20


@partial(jax.jit, static_argnames="interpret")
def matmul_kernel(weight: Int4Matrix, x_NI: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Tile all three axes; inputs innermost. `interpret` runs it anywhere, on a simulated TPU."""
    inputs, lanes = _padded(weight)
    num_rows = x_NI.shape[0]
    rows, count = _row_tiles(num_rows, MAX_ROWS)
    tile_I = largest_tile(inputs, MAX_INPUTS)
    tile_O = largest_tile(lanes, MAX_WEIGHTS[rows <= FEW_ROWS] // tile_I)
    num_tiles_O = lanes // tile_O
    if num_tiles_O > 1:  # rounded once; else in the kernel, which saves an operation
        x_NI = x_NI.astype(jnp.bfloat16)
    x_NI = _pad(x_NI, rows * count, inputs)
    y_NO: jax.Array = pl.pallas_call(
        _matmul,
        grid=(count, num_tiles_O, inputs // tile_I),
        in_specs=[
            pl.BlockSpec((rows, tile_I), lambda n, o, i: (n, i)),
            *_weight_specs(tile_I, tile_O, lambda n, o, i: (i, o)),
        ],
        out_specs=pl.BlockSpec((rows, tile_O), lambda n, o, i: (n, o)),
        out_shape=jax.ShapeDtypeStruct((rows * count, lanes), jnp.float32),
        # With all inputs in one tile the block of rows stays while outputs change.
        cost_estimate=_cost(
            weight, count, x_NI.nbytes * (1 if tile_I == inputs else num_tiles_O), rows * lanes * 4
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="int4_matmul",
    )(x_NI, weight.words_WO, weight.steps_GO)
    return y_NO[:num_rows, : weight.shape[0]]


@partial(jax.jit, static_argnames=("eps", "interpret"))
def normed_kernel(
    weight: Int4Matrix, x_NI: jax.Array, norm_I: jax.Array, *, eps: float, interpret: bool = False
) -> jax.Array:
    """Norm the rows once, then tile the outputs."""
    lanes = _padded(weight)[1]
    num_rows = x_NI.shape[0]
    y_NO = _normed_call(weight, x_NI, norm_I, lanes, eps, gated=False, interpret=interpret)
    return y_NO[:num_rows, : weight.shape[0]]


@partial(jax.jit, static_argnames=("eps", "interpret"))
def gated_kernel(
    weight: Int4Matrix, x_NI: jax.Array, norm_I: jax.Array, *, eps: float, interpret: bool = False
) -> jax.Array:
    """Norm the rows once, then tile gate and up alike."""
    num_rows, num_gates = x_NI.shape[0], weight.shape[0] // 2
    if num_gates % TILE:  # up does not begin with a tile
        y_NO = normed_kernel(weight, x_NI, norm_I, eps=eps, interpret=interpret)
        return gate(*jnp.split(y_NO, 2, axis=1))
    y_NF = _normed_call(weight, x_NI, norm_I, num_gates, eps, gated=True, interpret=interpret)
    return y_NF[:num_rows]


def _normed_call(
    weight: Int4Matrix,
    x_NI: jax.Array,
    norm_I: jax.Array,
    width: int,
    eps: float,
    *,
    gated: bool,
    interpret: bool,
) -> jax.Array:
    """Call the kernel that norms its input, for `width` outputs; returns padded rows."""
    inputs, _ = _padded(weight)
    rows, count = _row_tiles(x_NI.shape[0], MAX_ROWS)
    num_inputs = x_NI.shape[1]
    x_NI = _pad(x_NI, rows * count, inputs)
    sides = 2 if gated else 1
    tile_O = largest_tile(width, MAX_WEIGHTS[rows <= FEW_ROWS] // inputs // sides)
    num_tiles = width // tile_O
    dtype = jnp.bfloat16 if gated else jnp.float32
    y_NO: jax.Array = pl.pallas_call(
        partial(_normed, num_inputs=num_inputs, eps=eps),
        grid=(count, num_tiles),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda n, o: (n, 0)),
            pl.BlockSpec((1, inputs), lambda n, o: (0, 0)),
            *_weight_specs(inputs, tile_O, lambda n, o: (0, o)),
            *(_weight_specs(inputs, tile_O, lambda n, o: (0, o + num_tiles)) if gated else ()),
        ],
        out_specs=pl.BlockSpec((rows, tile_O), lambda n, o: (n, o)),
        out_shape=jax.ShapeDtypeStruct((rows * count, width), dtype),
        scratch_shapes=[pltpu.VMEM((rows, inputs), jnp.bfloat16)],
        cost_estimate=_cost(weight, count, x_NI.nbytes, rows * width * jnp.dtype(dtype).itemsize),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="int4_gated_matmul" if gated else "int4_normed_matmul",
    )(x_NI, _pad(norm_I[None], 1, inputs), *(weight.words_WO, weight.steps_GO) * sides)
    return y_NO


@partial(jax.jit, static_argnames=("eps", "interpret"))
def added_kernel(
    weight: Int4Matrix,
    x_NI: jax.Array,
    stream_NO: jax.Array,
    norm_O: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> jax.Array:
    """Tile the inputs; the last tile's step norms whole rows of the output."""
    inputs, lanes = _padded(weight)
    num_rows, num_outputs = stream_NO.shape
    rows, count = _row_tiles(num_rows, MAX_ROWS_WHOLE)
    x_NI = _pad(x_NI.astype(jnp.bfloat16), rows * count, inputs)
    tile_I = largest_tile(inputs, max(MAX_WEIGHTS[rows <= FEW_ROWS] // lanes, TILE))
    whole = pl.BlockSpec((rows, lanes), lambda n, i: (n, 0))
    y_NO: jax.Array = pl.pallas_call(
        partial(_added, num_outputs=num_outputs, eps=eps),
        grid=(count, inputs // tile_I),
        in_specs=[
            pl.BlockSpec((rows, tile_I), lambda n, i: (n, i)),
            *_weight_specs(tile_I, lanes, lambda n, i: (i, 0)),
            whole,
            pl.BlockSpec((1, lanes), lambda n, i: (0, 0)),
        ],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((rows * count, lanes), jnp.float32),
        cost_estimate=_cost(weight, count, x_NI.nbytes, 2 * rows * lanes * 4),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="int4_added_matmul",
    )(
        x_NI,
        weight.words_WO,
        weight.steps_GO,
        _pad(stream_NO, rows * count, lanes),
        _pad(norm_O[None], 1, lanes),
    )
    return y_NO[:num_rows, :num_outputs]


def _matmul(x_ref: Any, words_ref: Any, steps_ref: Any, y_ref: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    y_ref[...] += _product(x_ref, words_ref, steps_ref)


def _normed(x_ref: Any, norm_ref: Any, *refs: Any, num_inputs: int, eps: float) -> None:
    *weight_refs, y_ref, normed_ref = refs

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        normed_ref[...] = rms_norm(x_ref[...], norm_ref[...], num_inputs, eps).astype(jnp.bfloat16)

    products = [
        _product(normed_ref, words_ref, steps_ref)
        for words_ref, steps_ref in zip(weight_refs[::2], weight_refs[1::2], strict=True)
    ]
    y_ref[...] = gate(*products) if len(products) == 2 else products[0]


def _added(
    x_ref: Any,
    words_ref: Any,
    steps_ref: Any,
    stream_ref: Any,
    norm_ref: Any,
    y_ref: Any,
    *,
    num_outputs: int,
    eps: float,
) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    y_ref[...] += _product(x_ref, words_ref, steps_ref)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        y_ref[...] = stream_ref[...] + rms_norm(y_ref[...], norm_ref[...], num_outputs, eps)


def _product(x_ref: Any, words_ref: Any, steps_ref: Any) -> jax.Array:
    """Multiply a tile of rows and a tile of weights; float32."""
    num_inputs = x_ref.shape[1]
    depth = largest_tile(num_inputs, MXU_DEPTH)
    sum_NO = jnp.zeros((x_ref.shape[0], words_ref.shape[1]), jnp.float32)
    for start in range(0, num_inputs, depth):
        tiles = range(start // TILE, (start + depth) // TILE)
        weight_IO = jnp.concatenate([_unpack_tile(words_ref, steps_ref, t) for t in tiles])
        x_NI = x_ref[:, start : start + depth].astype(jnp.bfloat16)
        sum_NO += jnp.dot(x_NI, weight_IO, preferred_element_type=jnp.float32)
    return sum_NO


def _unpack_tile(words_ref: Any, steps_ref: Any, tile: int) -> jax.Array:
    """Return the weights of TILE inputs, bfloat16 [TILE, O], in five vector operations each."""
    words = words_ref[tile * WORD_ROWS : (tile + 1) * WORD_ROWS]
    planes = []
    for p in range(PLANES):
        # 128 | level + 8 is 136 + level.
        bits = ((words >> (4 * p)) & NIBBLES) | BFLOAT16_128
        levels = pltpu.bitcast(bits, jnp.bfloat16) - jnp.bfloat16(136)
        planes.append(levels * steps_ref[tile * PLANES + p : tile * PLANES + p + 1])
    return jnp.concatenate(planes)


def rms_norm(x: jax.Array, weight: jax.Array, width: int, eps: float) -> jax.Array:
    """RMS norm of rows of `width` values, zeros behind them."""
    mean = jnp.sum(x * x, axis=-1, keepdims=True) / width
    return x * lax.rsqrt(mean + eps) * weight


def gate(gate_NF: jax.Array, up_NF: jax.Array) -> jax.Array:
    """Return gelu(gate)·up, rounded to be an operand."""
    return (jax.nn.gelu(gate_NF, approximate=True) * up_NF).astype(jnp.bfloat16)


def largest_tile(size: int, limit: int) -> int:
    """Return the largest divisor of `size` up to `limit`, at least one TILE, in whole TILEs."""
    count = size // TILE
    return TILE * next(n for n in range(max(limit // TILE, 1), 0, -1) if count % n == 0)


def _padded(weight: Int4Matrix) -> tuple[int, int]:
    """Return inputs and outputs as packed, in whole TILEs."""
    return weight.words_WO.shape[0] * 8, weight.words_WO.shape[1]


def _row_tiles(num_rows: int, limit: int) -> tuple[int, int]:
    """Return the rows of a tile, a multiple of 8, and how many tiles."""
    count = -(-num_rows // limit)
    return -(-num_rows // (count * 8)) * 8, count


def _pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def _weight_specs(
    tile_I: int, tile_O: int, index: Callable[..., tuple[Any, Any]]
) -> list[pl.BlockSpec]:
    """Return the blocks of words and of steps for a tile of weights."""
    return [
        pl.BlockSpec((tile_I // 8, tile_O), index),
        pl.BlockSpec((tile_I // GROUP, tile_O), index),
    ]


def _cost(
    weight: Int4Matrix, num_row_tiles: int, input_bytes: int, tile_bytes: int
) -> pl.CostEstimate:
    """Tell the compiler, and scripts/tpu_report.py, what a call moves."""
    weight_bytes = weight.words_WO.nbytes + weight.steps_GO.nbytes
    return pl.CostEstimate(
        flops=0,
        bytes_accessed=input_bytes + (weight_bytes + tile_bytes) * num_row_tiles,
        transcendentals=0,
    )

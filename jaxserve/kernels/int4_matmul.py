"""Products with int4 weights, which stay packed in device memory: a TPU kernel and its reference.

Owns the packed form. Words are int32 with eight levels each, outputs along the lanes, inputs down
the rows, so that a group's step is one row to broadcast (docs/decisions/0016). Of the 128 inputs of
a tile, word row i holds at bits [4·(4h + p), +4) input 32p + 2i + h, as level + 8: masked, shifted
by 4p and seen as bfloat16 pairs, plane p is group p in order. N rows, O outputs, I inputs, G groups
of inputs. Products are of bfloat16 operands, sums float32.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

GROUP = 32
"""Inputs of a row that share a step."""

TILE = 128
"""Inputs that are packed together, and lanes that outputs are padded to."""

PLANES = TILE // GROUP
WORD_ROWS = TILE // 8
NIBBLES = 0x000F000F
"""Takes level + 8 of a plane out of a word, for two inputs at once."""

BFLOAT16_128 = 0x43004300
"""Two bfloat16 of 128: their last mantissa bit counts 1, so 128 | level + 8 is 136 + level."""

MAX_ROWS = 1024
"""Rows of a tile, at most: with more, sums and outputs crowd the weights out of VMEM."""

MAX_INPUTS = 2048
FEW_ROWS = 256
MAX_WEIGHTS = {True: 3 << 19, False: 3 << 18}
"""Weights of a grid step, at most, by whether rows are few: many amortise a step's fixed cost."""

MXU_DEPTH = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Matrix:
    """A weight [O, I] of levels -8 to 7 and a step for every GROUP inputs of a row.

    Attributes:
        words_WO: int32 [16·⌈I/128⌉, 128·⌈O/128⌉].
        steps_GO: bfloat16 [4·⌈I/128⌉, 128·⌈O/128⌉].
        shape: (O, I).
    """

    words_WO: jax.Array
    steps_GO: jax.Array
    shape: tuple[int, int] = field(metadata={"static": True})


def packed_shapes(shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of words and steps of an [O, I] weight."""
    tiles = -(-shape[1] // TILE)
    lanes = -(-shape[0] // TILE) * TILE
    return (tiles * WORD_ROWS, lanes), (tiles * PLANES, lanes)


def pack(levels_OI: jax.Array, steps_OG: jax.Array) -> Int4Matrix:
    """Pack levels of [-8, 7], int8, with their steps; I is a multiple of GROUP."""
    num_outputs, num_inputs = levels_OI.shape
    (num_words, lanes), (num_groups, _) = packed_shapes((num_outputs, num_inputs))
    pad_outputs = (0, lanes - num_outputs)
    # Padded inputs have level 0 and step 0.
    pad_inputs = (0, num_groups * GROUP - num_inputs)
    nibbles_OI = jnp.pad(levels_OI.astype(jnp.int32) + 8, (pad_outputs, pad_inputs))
    nibbles = nibbles_OI.reshape(lanes, -1, PLANES, WORD_ROWS, 2)  # O, tile, p, i, h
    shift_p = 4 * jnp.arange(PLANES)[:, None, None]
    shift_h = 4 * PLANES * jnp.arange(2)
    words = (nibbles << (shift_p + shift_h)).sum(axis=(2, 4), dtype=jnp.int32)  # no two overlap
    steps_OG = jnp.pad(steps_OG, (pad_outputs, (0, num_groups - steps_OG.shape[1])))
    return Int4Matrix(
        words_WO=words.reshape(lanes, num_words).T,
        steps_GO=steps_OG.astype(jnp.bfloat16).T,
        shape=(num_outputs, num_inputs),
    )


def unpack(weight: Int4Matrix) -> jax.Array:
    """Return level times step, rounded to bfloat16, [I, O]: the reference's weights."""
    num_outputs, num_inputs = weight.shape
    words = weight.words_WO.reshape(-1, 1, WORD_ROWS, 1, weight.words_WO.shape[1])
    shift_p = 4 * jnp.arange(PLANES)[:, None, None, None]
    shift_h = 4 * PLANES * jnp.arange(2)[:, None]
    levels = ((words >> (shift_p + shift_h)) & 15) - 8  # tile, p, i, h, O
    levels_GJO = levels.reshape(-1, GROUP, words.shape[-1]).astype(jnp.bfloat16)
    weight_IO = (levels_GJO * weight.steps_GO[:, None]).reshape(-1, words.shape[-1])
    return weight_IO[:num_inputs, :num_outputs]


def int4_matmul_reference(weight: Int4Matrix, x_NI: jax.Array) -> jax.Array:
    """Return x·Wᵀ as float32 [N, O], in plain JAX."""
    x_NI = x_NI.astype(jnp.bfloat16)
    return jnp.dot(x_NI, unpack(weight), preferred_element_type=jnp.float32)


def int4_matmul(weight: Int4Matrix, x_NI: jax.Array) -> jax.Array:
    """Return x·Wᵀ as float32 [N, O]: by the kernel on a TPU, elsewhere as the reference does."""
    y_NO: jax.Array = lax.platform_dependent(
        x_NI,
        tpu=lambda x_NI: int4_matmul_kernel(weight, x_NI),
        default=lambda x_NI: int4_matmul_reference(weight, x_NI),
    )
    return y_NO


@partial(jax.jit, static_argnames="interpret")
def int4_matmul_kernel(
    weight: Int4Matrix, x_NI: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Run the kernel; `interpret` runs it anywhere, on a simulated TPU."""
    num_rows, num_inputs = x_NI.shape
    inputs, lanes = weight.words_WO.shape[0] * 8, weight.words_WO.shape[1]
    num_row_tiles = -(-num_rows // MAX_ROWS)
    rows = -(-num_rows // (num_row_tiles * 8)) * 8
    pad_rows = rows * num_row_tiles - num_rows
    x_NI = jnp.pad(x_NI.astype(jnp.bfloat16), ((0, pad_rows), (0, inputs - num_inputs)))
    tile_I = largest_tile(inputs, MAX_INPUTS)
    tile_O = largest_tile(lanes, MAX_WEIGHTS[rows <= FEW_ROWS] // tile_I)
    y_NO: jax.Array = pl.pallas_call(
        _kernel,
        grid=(num_row_tiles, lanes // tile_O, inputs // tile_I),
        in_specs=[
            pl.BlockSpec((rows, tile_I), lambda n, o, i: (n, i)),
            pl.BlockSpec((tile_I // 8, tile_O), lambda n, o, i: (i, o)),
            pl.BlockSpec((tile_I // GROUP, tile_O), lambda n, o, i: (i, o)),
        ],
        out_specs=pl.BlockSpec((rows, tile_O), lambda n, o, i: (n, o)),
        out_shape=jax.ShapeDtypeStruct((rows * num_row_tiles, lanes), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * num_row_tiles * inputs * lanes,
            # With all inputs in one tile the rows' block stays while the outputs change.
            bytes_accessed=x_NI.nbytes * (1 if tile_I == inputs else lanes // tile_O)
            + (weight.words_WO.nbytes + weight.steps_GO.nbytes) * num_row_tiles
            + rows * num_row_tiles * lanes * 4,
            transcendentals=0,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="int4_matmul",
    )(x_NI, weight.words_WO, weight.steps_GO)
    return y_NO[:num_rows, : weight.shape[0]]


def largest_tile(size: int, limit: int) -> int:
    """Return the largest divisor of `size` up to `limit`, both in whole TILEs."""
    count = size // TILE
    return TILE * next(n for n in range(limit // TILE, 0, -1) if count % n == 0)


def _kernel(x_ref: jax.Ref, words_ref: jax.Ref, steps_ref: jax.Ref, y_ref: jax.Ref) -> None:
    """Add the product of one tile of each axis; the last grid axis runs over the inputs."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    num_inputs = x_ref.shape[1]
    depth = largest_tile(num_inputs, MXU_DEPTH)
    sum_NO = jnp.zeros(y_ref.shape, jnp.float32)
    for start in range(0, num_inputs, depth):
        tiles = range(start // TILE, (start + depth) // TILE)
        weight_IO = jnp.concatenate([_unpack_tile(words_ref, steps_ref, t) for t in tiles])
        sum_NO += jnp.dot(
            x_ref[:, start : start + depth], weight_IO, preferred_element_type=jnp.float32
        )
    y_ref[...] += sum_NO


def _unpack_tile(words_ref: jax.Ref, steps_ref: jax.Ref, tile: int) -> jax.Array:
    """Return the weights of TILE inputs, bfloat16 [TILE, O], in five vector operations each."""
    words = words_ref[tile * WORD_ROWS : (tile + 1) * WORD_ROWS]
    planes = []
    for p in range(PLANES):
        bits = ((words >> (4 * p)) & NIBBLES) | BFLOAT16_128
        levels = pltpu.bitcast(bits, jnp.bfloat16) - jnp.bfloat16(136)
        planes.append(levels * steps_ref[tile * PLANES + p : tile * PLANES + p + 1])
    return jnp.concatenate(planes)

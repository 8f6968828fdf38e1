"""The packed form of int4 weights in device memory, which products read as it is.

Words are int32 with eight levels each, outputs along the lanes, inputs down
the rows, so that a group's step is one row to broadcast (docs/decisions/0016). Of the 128 inputs of
a tile, word row i holds at bits [4·(4h + p), +4) input 32p + 2i + h, as level + 8: masked, shifted
by 4p and seen as bfloat16 pairs, plane p is group p in order. O outputs, I inputs, G groups.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

GROUP = 32
"""Inputs of a row that share a step."""

TILE = 128
"""Inputs that are packed together, and lanes that outputs are padded to."""

PER_WORD = 8
"""Levels of an int32 word."""

PLANES = TILE // GROUP
WORD_ROWS = TILE // PER_WORD


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

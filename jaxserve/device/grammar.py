"""Grammars inside the step programs: what may be sampled, and the state after it was.

Reads the arena that device/arena.py lays out. All of it is data of a row: a row without a grammar
has every token, and costs nothing where no row has one. What a mask does not allow is never
sampled, whatever adjusts the logits; a mask always allows something.

B rows, N arena rows of R words, V vocab, W words of a mask, C classes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.device.arena import (
    FIRST_NEXT_WORD,
    FIRST_STATE_WORD,
    MASK_ROW_BITS,
    MAX_CLASSES,
    MAX_DISTANCE,
    NUM_CLASSES,
    mask_words,
    row_words,
)

ENDED = -1
"""The state after an end id: nothing but end ids may follow."""

_HALF = 0xFFFF


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRows:
    """Where each row's grammar is, int32 [B] each.

    Attributes:
        header: the arena row of its header; 0: none; -r: arena row r is its mask, made by the host.
        ends: the arena row of its end ids.
        state: before the token to be sampled.
        position: of that token.
        end_position: where the budget ends, if the text has to be complete by then; 0: it has not.
    """

    header: jax.Array
    ends: jax.Array
    state: jax.Array
    position: jax.Array
    end_position: jax.Array


def make_arena(num_rows: int, vocab_size: int) -> jax.Array:
    """Return an empty arena, uint32 [N, R]."""
    return jnp.zeros((num_rows, row_words(vocab_size)), jnp.uint32)


def write_rows(arena_NR: jax.Array, staged: jax.Array) -> jax.Array:
    """Write rows, staged as their numbers and behind them their words; N and above write none."""
    count = staged.shape[0] // (arena_NR.shape[1] + 1)
    row_K = staged[:count].astype(jnp.int32)
    return arena_NR.at[row_K].set(staged[count:].reshape(count, -1), mode="drop")


def allowed_words(arena_NR: jax.Array, rows: GrammarRows, vocab_size: int) -> jax.Array:
    """Return each row's mask, uint32 [B, W].

    End ids are allowed exactly where the text may end, and after it did. One that is text as well
    gives way elsewhere, unless the grammar has nothing else there.
    """

    def guided() -> jax.Array:
        num_words = mask_words(vocab_size)
        header_B = jnp.maximum(rows.header, 0)
        state_B = jnp.maximum(rows.state, 0)
        first_B = _constant(arena_NR, header_B, FIRST_STATE_WORD) + 2 * state_B
        info_B = _word(arena_NR, header_B, first_B)
        distances_B = _word(arena_NR, header_B, first_B + 1)
        image_row_B = (info_B & ((1 << MASK_ROW_BITS) - 1)).astype(jnp.int32)
        is_host_B = rows.header < 0
        mask_row_B = jnp.where(
            is_host_B, -rows.header, arena_NR[header_B, image_row_B].astype(jnp.int32)
        )
        mask_BW = arena_NR[mask_row_B, :num_words]
        ends_BW = arena_NR[rows.ends, :num_words]
        may_end_B = (info_B >> MASK_ROW_BITS) != 0

        text_BW = mask_BW & ~ends_BW
        only_ends_B = ~may_end_B & ~(text_BW != 0).any(axis=1)
        text_BW = jnp.where(only_ends_B[:, None], mask_BW, text_BW)
        num_left_B = rows.end_position - rows.position - 1  # tokens after this one
        may_be_cut_B = (rows.end_position > 0) & ~is_host_B & (rows.state >= 0)
        is_tight_B = may_be_cut_B & (num_left_B < (distances_B >> 16).astype(jnp.int32))
        text_BW = lax.cond(
            is_tight_B.any(),
            lambda: _cut(
                text_BW,
                _words_in_time(arena_NR, header_B, state_B, num_left_B, vocab_size),
                is_tight_B,
                may_end_B,
            ),
            lambda: text_BW,
        )
        words_BW = jnp.where(may_end_B[:, None], text_BW | ends_BW, text_BW)
        words_BW = jnp.where((rows.state == ENDED)[:, None], ends_BW, words_BW)
        words_BW = jnp.where(is_host_B[:, None], mask_BW, words_BW)
        return jnp.where((rows.header == 0)[:, None], jnp.uint32(0xFFFFFFFF), words_BW)

    def free() -> jax.Array:
        shape = (rows.header.shape[0], mask_words(vocab_size))
        return jnp.full(shape, 0xFFFFFFFF, jnp.uint32)

    words_BW: jax.Array = lax.cond((rows.header != 0).any(), guided, free)
    return words_BW


def next_states(
    arena_NR: jax.Array, rows: GrammarRows, ids_B: jax.Array, vocab_size: int
) -> jax.Array:
    """Return the states after these ids, int32 [B]; ENDED after an end id."""

    def guided() -> jax.Array:
        header_B = jnp.maximum(rows.header, 0)
        state_B = jnp.maximum(rows.state, 0)
        num_words = -(-vocab_size // 2)
        word_B = _word(arena_NR, header_B, ids_B % num_words)
        class_B = jnp.where(ids_B < num_words, word_B & _HALF, word_B >> 16).astype(jnp.int32)
        next_B = _next(arena_NR, header_B, state_B, class_B)
        return jnp.where(rows.state == ENDED, ENDED, next_B)

    has_tables_B = rows.header > 0
    states_B: jax.Array = lax.cond(has_tables_B.any(), guided, lambda: rows.state)
    return jnp.where(has_tables_B, states_B, 0)


def mask_logits(logits_BV: jax.Array, words_BW: jax.Array) -> jax.Array:
    """Set what a mask does not allow to -inf."""
    is_allowed_BV: jax.Array = lax.platform_dependent(
        words_BW, cpu=_unpack_by_stride, default=_unpack
    )
    return jnp.where(is_allowed_BV[:, : logits_BV.shape[1]], logits_BV, -jnp.inf)


def _unpack(words_BW: jax.Array) -> jax.Array:
    bit_32 = jnp.arange(32, dtype=jnp.uint32)
    return ((words_BW[:, None] >> bit_32[:, None]) & 1 != 0).reshape(words_BW.shape[0], -1)


def _unpack_by_stride(words_BW: jax.Array) -> jax.Array:
    """Do the same one stride at a time: shifts by an array take a CPU ten times as long."""
    rows, num_words = words_BW.shape

    def unpack(stride: jax.Array, allowed_BV: jax.Array) -> jax.Array:
        plane_BW = (words_BW >> stride.astype(jnp.uint32)) & 1 != 0
        return lax.dynamic_update_slice(allowed_BV, plane_BW, (0, stride * num_words))

    allowed_BV: jax.Array = lax.fori_loop(
        0, 32, unpack, jnp.zeros((rows, 32 * num_words), jnp.bool_)
    )
    return allowed_BV


def masked_argmax(logits_VB: jax.Array, words_BW: jax.Array) -> jax.Array:
    """Return the allowed id of the largest logit, the lowest of equals, int32 [B]."""
    num_words = words_BW.shape[1]
    words_WB = words_BW.T
    best_WB = jnp.full(words_WB.shape, -jnp.inf, logits_VB.dtype)
    stride_WB = jnp.zeros(words_WB.shape, jnp.int32)
    # The largest of each word's tokens, stride by stride: all of it is one loop over the logits.
    for stride in range(32):
        plane = logits_VB[stride * num_words : (stride + 1) * num_words]
        if len(plane) < num_words:
            padding = ((0, num_words - len(plane)), (0, 0))
            plane = jnp.pad(plane, padding, constant_values=-jnp.inf)
        is_better_WB = ((words_WB >> stride) & 1 != 0) & (plane > best_WB)
        best_WB = jnp.where(is_better_WB, plane, best_WB)
        stride_WB = jnp.where(is_better_WB, stride, stride_WB)
    ids_WB = stride_WB * num_words + jnp.arange(num_words)[:, None]
    is_best_WB = best_WB == best_WB.max(axis=0)
    return jnp.where(is_best_WB, ids_WB, 32 * num_words).min(axis=0)


def _cut(
    text_BW: jax.Array, in_time_BW: jax.Array, is_tight_B: jax.Array, may_end_B: jax.Array
) -> jax.Array:
    """Keep of tight rows what is in time, unless nothing would be left."""
    cut_BW = text_BW & in_time_BW
    is_cut_B = is_tight_B & (may_end_B | (cut_BW != 0).any(axis=1))
    return jnp.where(is_cut_B[:, None], cut_BW, text_BW)


def _words_in_time(
    arena_NR: jax.Array,
    header_B: jax.Array,
    state_B: jax.Array,
    num_left_B: jax.Array,
    vocab_size: int,
) -> jax.Array:
    """Return as a mask the tokens after which the shortest way to the end fits what is left."""
    class_C = jnp.arange(MAX_CLASSES)
    header_B1 = header_B[:, None]
    next_BC = _next(arena_NR, header_B1, state_B[:, None], class_C)
    first_B1 = _constant(arena_NR, header_B1, FIRST_STATE_WORD)
    distance_BC = _word(arena_NR, header_B1, first_B1 + 2 * jnp.maximum(next_BC, 0) + 1)
    distance_BC = (distance_BC & MAX_DISTANCE).astype(jnp.int32)
    is_known_BC = class_C < _constant(arena_NR, header_B1, NUM_CLASSES)
    fits_BC = is_known_BC & (next_BC >= 0) & (distance_BC <= num_left_B[:, None])

    num_words, half = mask_words(vocab_size), -(-vocab_size // 2)
    word_BX = _word(arena_NR, header_B1, jnp.arange(half))
    class_BV = jnp.concatenate([word_BX & _HALF, word_BX >> 16], axis=1).astype(jnp.int32)
    fits_BV = jnp.take_along_axis(fits_BC, class_BV[:, :vocab_size], axis=1)
    padded_BV = jnp.pad(fits_BV, ((0, 0), (0, num_words * 32 - vocab_size)))
    fits_B32W = padded_BV.reshape(-1, 32, num_words).astype(jnp.uint32)
    return (fits_B32W << jnp.arange(32, dtype=jnp.uint32)[:, None]).sum(axis=1, dtype=jnp.uint32)


def _next(
    arena_NR: jax.Array, header: jax.Array, state: jax.Array, token_class: jax.Array
) -> jax.Array:
    """Look up the next state, int32, -1 where there is none."""
    index = state * _constant(arena_NR, header, NUM_CLASSES) + token_class
    word = _word(arena_NR, header, _constant(arena_NR, header, FIRST_NEXT_WORD) + index // 2)
    half = jnp.where(index % 2 == 0, word & _HALF, word >> 16)
    return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.int16).astype(jnp.int32)


def _constant(arena_NR: jax.Array, header: jax.Array, place: int) -> jax.Array:
    return arena_NR[header, arena_NR.shape[1] + place].astype(jnp.int32)


def _word(arena_NR: jax.Array, header: jax.Array, index: jax.Array) -> jax.Array:
    """Look up a word of the image that a header tells of."""
    row_size = arena_NR.shape[1]
    row = arena_NR[header, index // row_size].astype(jnp.int32)
    return arena_NR[row, index % row_size]

"""What requests do to the model's logits before sampling: bans, biases and penalties.

All of it is data of a slot, so that it costs no program of its own and rows that use none of it
nothing. The host writes a slot's table when a sequence is admitted; from then on the decode program
keeps it up, for it alone knows each token at once. The order is vLLM's: bias, then the penalties;
what allowed ids, bad words or min_tokens ban stays banned whatever the others do.

B rows, S slots (slot S is the scratch slot), V vocab, W bad words of L tokens, K table entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.types import BANNED, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams

BANNED_WORD = BANNED / 4
"""As BANNED, for a bad word's end: where nothing else is allowed, it comes before what is not."""

# Bits of a mark.
_COUNT = (1 << 24) - 1  # times that the token was generated
_IN_PROMPT = 1 << 24
_IS_END = 1 << 25

_HEADER = 3  # of a staged piece: its slot, whether it is the first, the bias of ids not listed
_NUM_ENTRIES = 1024
_RECENT = MAX_BAD_WORD_TOKENS - 1
_BAD_WORDS_SIZE = MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
PIECE_SIZE = _HEADER + 3 * _NUM_ENTRIES + _RECENT + _BAD_WORDS_SIZE
"""int32 numbers of one piece of a slot's table."""

Int32Array = npt.NDArray[np.int32]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Every slot's table.

    Attributes:
        marks_SV: int32, by token: how often it was generated, whether the prompt has it, whether it
            is an end.
        bias_SV: float32, added to the logits.
        recent_SR: int32, the last MAX_BAD_WORD_TOKENS - 1 generated ids, -1 where there is none.
        bad_words_SWL: int32, sequences that must not be completed, right-aligned, -1 in front.
    """

    marks_SV: jax.Array
    bias_SV: jax.Array
    recent_SR: jax.Array
    bad_words_SWL: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustmentRows:
    """What each row asks for, [B] each.

    Attributes:
        slot: the row's slot.
        is_used: whether anything is; nothing else counts where not.
        min_position: no end id is sampled for a position before this one.
    """

    slot: jax.Array
    is_used: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    min_position: jax.Array


def make_adjustments(num_slots: int, vocab_size: int) -> Adjustments:
    """Return empty tables."""
    slots = num_slots + 1
    return Adjustments(
        marks_SV=jnp.zeros((slots, vocab_size), jnp.int32),
        bias_SV=jnp.zeros((slots, vocab_size), jnp.float32),
        recent_SR=jnp.full((slots, _RECENT), -1, jnp.int32),
        bad_words_SWL=jnp.full((slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
    )


# On the device


def count_tokens(tables: Adjustments, rows: AdjustmentRows, ids_B: jax.Array) -> Adjustments:
    """Note a generated id in each row that uses its table."""
    # Out of range, which drops the write: a condition would copy the tables.
    slot_B = jnp.where(rows.is_used, rows.slot, tables.marks_SV.shape[0])
    recent_BR = jnp.concatenate([tables.recent_SR[rows.slot, 1:], ids_B[:, None]], axis=1)
    return Adjustments(
        marks_SV=tables.marks_SV.at[slot_B, ids_B].add(1, mode="drop"),
        bias_SV=tables.bias_SV,
        recent_SR=tables.recent_SR.at[slot_B].set(recent_BR, mode="drop"),
        bad_words_SWL=tables.bad_words_SWL,
    )


def adjust(
    logits_BV: jax.Array, tables: Adjustments, rows: AdjustmentRows, position_B: jax.Array
) -> jax.Array:
    """Return the logits that ids are sampled from, for the given positions; float32 [B, V]."""
    mark_BV, bias_BV = tables.marks_SV[rows.slot], tables.bias_SV[rows.slot]
    may_not_end_B = position_B < rows.min_position
    is_banned_BV = (bias_BV <= BANNED / 2) | (may_not_end_B[:, None] & (mark_BV & _IS_END != 0))
    adjusted_BV = _penalize(logits_BV + bias_BV, mark_BV, rows)
    # A penalty near 0 or of many powers of ten could lift a ban or give infinity.
    adjusted_BV = jnp.where(is_banned_BV, BANNED, jnp.clip(adjusted_BV, BANNED, -BANNED))
    adjusted_BV = _ban_words(adjusted_BV, tables, rows)
    return jnp.where(rows.is_used[:, None], adjusted_BV, logits_BV)


def _ban_words(logits_BV: jax.Array, tables: Adjustments, rows: AdjustmentRows) -> jax.Array:
    """Ban the last token of each bad word whose other tokens were just generated."""
    words_BWL = tables.bad_words_SWL[rows.slot]
    before_BWR, last_BW = words_BWL[:, :, :-1], words_BWL[:, :, -1]
    recent_BR = tables.recent_SR[rows.slot]
    fits_BW = ((before_BWR < 0) | (before_BWR == recent_BR[:, None, :])).all(axis=-1)
    last_BW = jnp.where(fits_BW & (last_BW >= 0), last_BW, logits_BV.shape[1])
    row_BW = jnp.arange(logits_BV.shape[0])[:, None]
    return logits_BV.at[row_BW, last_BW].min(BANNED_WORD, mode="drop")


def _penalize(logits_BV: jax.Array, mark_BV: jax.Array, rows: AdjustmentRows) -> jax.Array:
    """Apply the CTRL paper's repetition penalty, then OpenAI's two."""
    count_BV = (mark_BV & _COUNT).astype(jnp.float32)
    factor_B1 = rows.repetition_penalty[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    logits_BV = jnp.where(mark_BV & (_COUNT | _IN_PROMPT) != 0, repeated_BV, logits_BV)
    logits_BV -= rows.frequency_penalty[:, None] * count_BV
    return logits_BV - jnp.where(count_BV > 0, rows.presence_penalty[:, None], 0.0)


def write_piece(tables: Adjustments, staged: jax.Array) -> Adjustments:
    """Write one staged piece of a slot's table; the first one clears what was there.

    Marks are added to what is there, biases take its place.
    """
    slot, is_first = staged[0], staged[1] != 0
    fill = lax.bitcast_convert_type(staged[2], jnp.float32)
    ends = _HEADER + np.cumsum([_NUM_ENTRIES, _NUM_ENTRIES, _NUM_ENTRIES, _RECENT])
    ids_K, marks_K, bias_K, recent_R, bad_words = jnp.split(staged[_HEADER:], ends - _HEADER)
    bias_K = lax.bitcast_convert_type(bias_K, jnp.float32)
    marks_V, bias_V = tables.marks_SV[slot], tables.bias_SV[slot]
    marks_V = jnp.where(is_first, 0, marks_V).at[ids_K].add(marks_K, mode="drop")
    bias_V = jnp.where(is_first, fill, bias_V).at[ids_K].set(bias_K, mode="drop")
    return Adjustments(
        marks_SV=tables.marks_SV.at[slot].set(marks_V),
        bias_SV=tables.bias_SV.at[slot].set(bias_V),
        recent_SR=tables.recent_SR.at[slot].set(recent_R),
        bad_words_SWL=tables.bad_words_SWL.at[slot].set(
            bad_words.reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        ),
    )


# On the host


def table_pieces(
    slot: int, sampling: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> list[Int32Array]:
    """Stage a slot's table, as of its known ids; none where the request adjusts nothing."""
    if not sampling.adjusts_logits:
        return []
    output, count = np.unique(np.asarray(output_ids, np.int32), return_counts=True)
    prompt = np.unique(np.asarray(prompt_ids, np.int32))
    ends = np.asarray(sorted(sampling.stop_token_ids), np.int32)
    allowed = np.asarray(sorted(sampling.allowed_token_ids or ()), np.int32)
    biased = np.asarray([token_id for token_id, _ in sampling.logit_bias], np.int32)
    ids = np.unique(np.concatenate([output, prompt, ends, allowed, biased]))
    marks = np.zeros(len(ids), np.int32)
    marks[np.searchsorted(ids, output)] += count.astype(np.int32)
    marks[np.searchsorted(ids, prompt)] |= _IN_PROMPT
    marks[np.searchsorted(ids, ends)] |= _IS_END
    fill = 0.0 if sampling.allowed_token_ids is None else BANNED
    bias = np.full(len(ids), fill, np.float32)
    bias[np.searchsorted(ids, allowed)] = 0.0
    bias[np.searchsorted(ids, biased)] += [value for _, value in sampling.logit_bias]

    tail = _tail(sampling, output_ids)
    return [
        _piece(slot, start == 0, fill, ids[start:end], marks[start:end], bias[start:end], tail)
        for start in range(0, max(len(ids), 1), _NUM_ENTRIES)
        for end in [start + _NUM_ENTRIES]
    ]


def counting_pieces(
    slot: int, sampling: SamplingParams, token_ids: Sequence[int], output_ids: Sequence[int]
) -> list[Int32Array]:
    """Stage generated ids that no decode counts; `output_ids` are all so far, these included.

    They are at most as many as a piece has entries. None where the request adjusts nothing.
    """
    if not sampling.adjusts_logits:
        return []
    ids, count = np.unique(np.asarray(token_ids, np.int32), return_counts=True)
    added, allowed = dict(sampling.logit_bias), sampling.allowed_token_ids
    bias = [
        (0.0 if allowed is None or token_id in allowed else BANNED) + added.get(token_id, 0.0)
        for token_id in ids.tolist()
    ]
    tail = _tail(sampling, output_ids)
    return [_piece(slot, False, 0.0, ids, count.astype(np.int32), np.array(bias, np.float32), tail)]


def _tail(sampling: SamplingParams, output_ids: Sequence[int]) -> Int32Array:
    """Lay out the last generated ids and the bad words."""
    tail = np.full(_RECENT + _BAD_WORDS_SIZE, -1, np.int32)
    recent = np.asarray(output_ids[-_RECENT:], np.int32)
    tail[_RECENT - len(recent) : _RECENT] = recent
    words_WL = tail[_RECENT:].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    for word_L, word in zip(words_WL, sampling.bad_words, strict=False):
        word_L[-len(word) :] = word
    return tail


def padding_piece(slot: int) -> Int32Array:
    """Return a piece that leaves the slot's table empty."""
    none = np.zeros(0, np.int32)
    tail = np.full(_RECENT + _BAD_WORDS_SIZE, -1, np.int32)
    return _piece(slot, True, 0.0, none, none, none.astype(np.float32), tail)


def _piece(
    slot: int,
    is_first: bool,
    fill: float,
    ids: Int32Array,
    marks: Int32Array,
    bias: npt.NDArray[np.float32],
    tail: Int32Array,
) -> Int32Array:
    piece = np.zeros(PIECE_SIZE, np.int32)
    piece[:2] = slot, is_first
    piece.view(np.float32)[2] = fill
    entries = piece[_HEADER : _HEADER + 3 * _NUM_ENTRIES].reshape(3, _NUM_ENTRIES)
    entries[0] = np.iinfo(np.int32).max  # no id: dropped
    entries[0, : len(ids)] = ids
    entries[1, : len(ids)] = marks
    entries[2].view(np.float32)[: len(ids)] = bias
    piece[_HEADER + 3 * _NUM_ENTRIES :] = tail
    return piece

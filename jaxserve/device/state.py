"""What a step program is told and what it keeps: the layout of staged rows, and the device's slots.

The host stages all of a step's data as one int32 array, since every transfer costs; floats travel
as their bits. B rows, M entries of each page table, S slots; slot S is the scratch slot of padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.device.adjustments import AdjustmentRows, Adjustments, make_adjustments
from jaxserve.device.grammar import GrammarRows, make_arena
from jaxserve.device.sampling import SamplingRows
from jaxserve.models.config import AttentionKind
from jaxserve.types import SamplingParams

Int32Array = npt.NDArray[np.int32]


class Column(IntEnum):
    """Columns of a staged row; the page tables follow, full attention's, then sliding layers'."""

    SLOT = 0
    POSITION = 1  # of the row's last known token
    TEMPERATURE = 2
    TOP_K = 3
    TOP_P = 4
    MIN_P = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    WANTS_LOGPROBS = 8
    ADJUSTS = 9  # whether the columns up to MIN_POSITION, and the slot's table, are used
    PRESENCE_PENALTY = 10
    FREQUENCY_PENALTY = 11
    REPETITION_PENALTY = 12
    MIN_POSITION = 13  # the first position that an end id may be sampled for
    GRAMMAR = 14  # as GrammarRows.header; 0: none, and the three below count for nothing
    GRAMMAR_ENDS = 15
    GRAMMAR_STATE = 16  # before the first token that is sampled, by an extend; then slots keep it
    END_POSITION = 17
    TOKEN_INDEX = 18  # extend: where the row's last known token lies in the flat tokens
    FULL_START = 19  # extend: the first position that full-attention layers write
    TABLE = 20


def row_size(table_size: int) -> int:
    """Return the columns of a row with two page tables of so many entries."""
    return Column.TABLE + 2 * table_size


def read_tables(rows_BF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take the page tables out of staged rows: full attention's, then sliding layers'."""
    table_BM, sliding_table_BM = jnp.split(rows_BF[:, Column.TABLE :], 2, axis=1)
    return table_BM, sliding_table_BM


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """What stays on the device between steps, int32 [S + 1] each but for tables and arena.

    Attributes:
        last_token_S: the id each slot sampled last: the input of its next decode.
        grammar_state_S: where each slot is in its grammar, before its next token.
        arena_NR: the grammars, uint32, as device/arena.py lays them out.
        adjustments: what the slots' requests do to the logits.
    """

    last_token_S: jax.Array
    grammar_state_S: jax.Array
    arena_NR: jax.Array
    adjustments: Adjustments


def make_state(num_slots: int, vocab_size: int, arena_rows: int = 0) -> DecodeState:
    """Return the state of empty slots, with so many rows for grammars."""
    return DecodeState(
        last_token_S=jnp.zeros(num_slots + 1, jnp.int32),
        grammar_state_S=jnp.zeros(num_slots + 1, jnp.int32),
        arena_NR=make_arena(1 + num_slots + arena_rows, vocab_size),
        adjustments=make_adjustments(num_slots, vocab_size),
    )


def state_num_bytes(num_slots: int, vocab_size: int, arena_rows: int = 0) -> int:
    """Return the bytes of the state."""
    shapes = jax.eval_shape(lambda: make_state(num_slots, vocab_size, arena_rows))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def read_adjustments(rows_BF: jax.Array) -> AdjustmentRows:
    """Take what adjusts the logits out of staged rows, on the device."""
    return AdjustmentRows(
        slot=rows_BF[:, Column.SLOT],
        is_used=rows_BF[:, Column.ADJUSTS] != 0,
        presence_penalty=_as_float(rows_BF[:, Column.PRESENCE_PENALTY]),
        frequency_penalty=_as_float(rows_BF[:, Column.FREQUENCY_PENALTY]),
        repetition_penalty=_as_float(rows_BF[:, Column.REPETITION_PENALTY]),
        min_position=rows_BF[:, Column.MIN_POSITION],
    )


def read_sampling(rows_BF: jax.Array) -> SamplingRows:
    """Take the sampling parameters out of staged rows, on the device."""
    seed = rows_BF[:, Column.SEED_LOW : Column.SEED_HIGH + 1]
    return SamplingRows(
        temperature=_as_float(rows_BF[:, Column.TEMPERATURE]),
        top_k=rows_BF[:, Column.TOP_K],
        top_p=_as_float(rows_BF[:, Column.TOP_P]),
        min_p=_as_float(rows_BF[:, Column.MIN_P]),
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        position=rows_BF[:, Column.POSITION] + 1,
    )


def read_grammars(rows_BF: jax.Array, state_B: jax.Array | None = None) -> GrammarRows:
    """Take the grammars out of staged rows, on the device; `state_B` instead of the staged one."""
    return GrammarRows(
        header=rows_BF[:, Column.GRAMMAR],
        ends=rows_BF[:, Column.GRAMMAR_ENDS],
        state=rows_BF[:, Column.GRAMMAR_STATE] if state_B is None else state_B,
        position=rows_BF[:, Column.POSITION] + 1,
        end_position=rows_BF[:, Column.END_POSITION],
    )


def _as_float(bits_B: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits_B, jnp.float32)


class HostRows:
    """The staged row of every slot, kept ready on the host; the scratch slot's is padding."""

    def __init__(self, num_slots: int, table_size: int) -> None:
        self.scratch_slot = num_slots
        self._table_size = table_size
        self._rows: Int32Array = np.zeros((num_slots + 1, row_size(table_size)), np.int32)
        self._rows[:, Column.SLOT] = np.arange(num_slots + 1)

    def open(self, slot: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Set a slot's sampling and empty its page tables."""
        row = self._rows[slot]
        floats = row.view(np.float32)
        row[Column.POSITION :] = 0
        row[Column.TOP_K] = sampling.top_k
        floats[Column.TEMPERATURE] = sampling.temperature
        floats[Column.TOP_P] = sampling.top_p
        floats[Column.MIN_P] = sampling.min_p
        row[Column.WANTS_LOGPROBS] = sampling.num_logprobs is not None
        row[Column.ADJUSTS] = sampling.adjusts_logits
        floats[Column.PRESENCE_PENALTY] = sampling.presence_penalty
        floats[Column.FREQUENCY_PENALTY] = sampling.frequency_penalty
        floats[Column.REPETITION_PENALTY] = sampling.repetition_penalty
        row[Column.MIN_POSITION] = num_prompt_tokens + sampling.min_tokens
        seed = np.array([sampling.seed], "<u8").view("<i4")
        row[Column.SEED_LOW : Column.SEED_HIGH + 1] = seed

    def set_grammar(
        self, slot: int, *, header: int, ends: int, state: int, end_position: int
    ) -> None:
        """Set an open slot's grammar; the arguments are as in GrammarRows."""
        row = self._rows[slot]
        row[Column.GRAMMAR], row[Column.GRAMMAR_ENDS] = header, ends
        row[Column.GRAMMAR_STATE], row[Column.END_POSITION] = state, end_position

    def set_grammar_state(self, slot: int, state: int) -> None:
        """Set the state that the slot's next extend samples in."""
        self._rows[slot, Column.GRAMMAR_STATE] = state

    def set_pages(self, slot: int, start: int, pages: Sequence[int], kind: AttentionKind) -> None:
        """Set entries [start, start + len(pages)) of one of a slot's page tables."""
        first = Column.TABLE + start + (self._table_size if kind == "sliding" else 0)
        self._rows[slot, first : first + len(pages)] = pages

    def stage(self, slots: Sequence[int], num_rows: int, table_size: int) -> Int32Array:
        """Return a copy of the slots' rows, padded with scratch rows, tables cut to a size."""
        padded = [*slots, *[self.scratch_slot] * (num_rows - len(slots))]
        if table_size == self._table_size:
            return self._rows[padded]
        sliding = Column.TABLE + self._table_size
        columns = np.r_[: Column.TABLE + table_size, sliding : sliding + table_size]
        return self._rows[np.ix_(padded, columns)]

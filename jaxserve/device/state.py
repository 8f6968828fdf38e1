"""What a step program is told and what it keeps: the layout of staged rows, and the device's slots.

The host stages all of a step's data as one int32 array, since every transfer costs; floats travel
as their bits. B rows, M page-table entries a row, S slots; slot S is the scratch slot of padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.device.sampling import SamplingRows
from jaxserve.types import SamplingParams

Int32Array = npt.NDArray[np.int32]


class Column(IntEnum):
    """Columns of a staged row; the page table follows."""

    SLOT = 0
    POSITION = 1  # of the row's last known token
    TEMPERATURE = 2
    TOP_K = 3
    TOP_P = 4
    MIN_P = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    TOKEN_INDEX = 8  # extend: where the row's last known token lies in the flat tokens
    TABLE = 9


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """What stays on the device between steps, int32 [S + 1] each.

    Attributes:
        last_token_S: the id each slot sampled last: the input of its next decode.
        grammar_state_S: automaton state of the slot's grammar; 0: free.
        grammar_offset_S: where the slot's grammar tables begin.
    """

    last_token_S: jax.Array
    grammar_state_S: jax.Array
    grammar_offset_S: jax.Array


def make_state(num_slots: int) -> DecodeState:
    """Return the state of empty slots."""
    return DecodeState(
        last_token_S=jnp.zeros(num_slots + 1, jnp.int32),
        grammar_state_S=jnp.zeros(num_slots + 1, jnp.int32),
        grammar_offset_S=jnp.zeros(num_slots + 1, jnp.int32),
    )


def read_sampling(rows_BF: jax.Array) -> SamplingRows:
    """Take the sampling parameters out of staged rows, on the device."""

    def as_float(column: Column) -> jax.Array:
        return lax.bitcast_convert_type(rows_BF[:, column], jnp.float32)

    seed = rows_BF[:, Column.SEED_LOW : Column.SEED_HIGH + 1]
    return SamplingRows(
        temperature=as_float(Column.TEMPERATURE),
        top_k=rows_BF[:, Column.TOP_K],
        top_p=as_float(Column.TOP_P),
        min_p=as_float(Column.MIN_P),
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        position=rows_BF[:, Column.POSITION] + 1,
    )


class HostRows:
    """The staged row of every slot, kept ready on the host; the scratch slot's is padding."""

    def __init__(self, num_slots: int, table_size: int) -> None:
        self.scratch_slot = num_slots
        self._rows: Int32Array = np.zeros((num_slots + 1, Column.TABLE + table_size), np.int32)
        self._rows[:, Column.SLOT] = np.arange(num_slots + 1)

    def open(self, slot: int, sampling: SamplingParams) -> None:
        """Set a slot's sampling and empty its page table."""
        row = self._rows[slot]
        floats = row.view(np.float32)
        row[Column.POSITION :] = 0
        row[Column.TOP_K] = sampling.top_k
        floats[Column.TEMPERATURE] = sampling.temperature
        floats[Column.TOP_P] = sampling.top_p
        floats[Column.MIN_P] = sampling.min_p
        seed = np.array([sampling.seed], "<u8").view("<i4")
        row[Column.SEED_LOW : Column.SEED_HIGH + 1] = seed

    def set_pages(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Set entries [start, start + len(pages)) of a slot's page table."""
        first = Column.TABLE + start
        self._rows[slot, first : first + len(pages)] = pages

    def stage(self, slots: Sequence[int], num_rows: int, table_size: int) -> Int32Array:
        """Return a copy of the slots' rows, padded with scratch rows, tables cut to a size."""
        padded = [*slots, *[self.scratch_slot] * (num_rows - len(slots))]
        return self._rows[padded, : Column.TABLE + table_size]

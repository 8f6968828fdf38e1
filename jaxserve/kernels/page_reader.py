"""How attention kernels fetch pages from HBM: by table, in chunks, while others are computed.

R rows, M entries of a row's table, P pages, Z page size, X values of a position, C pages of a
chunk, S ≥ C·Z keys of a chunk in whole LANES, J lanes of a page's scales.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.constants import LANES

CHUNK_KEYS = 512
"""Keys of a chunk, whole LANES: enough to hide a transfer's latency, few for short rows."""

NUM_BUFFERS = 3
"""One chunk is computed, one is on its way, and one is asked for, so that HBM is never idle."""

UNROLLS = True
"""Whether a chunk's transfers are written out: what starts them then shares bundles with others."""

MAX_TABLE_BYTES = 256 << 10
"""Of one call's page tables: they are scalars, for which a chip has 1 MiB."""

FIRST_PAGE, NUM_PAGES, START, NUM_VALID, NEXT_ROW = range(5)
"""What a kernel is told of a row, besides its table."""

ROW, CHUNK, SLOT, NUM_WRITTEN = range(4)
"""A kernel's counters: what is fetched next, the buffer that is computed next, rows written."""


def chunk_pages(table_size: int, page_size: int) -> int:
    """Return C: the whole table if it is no more than half as much again as CHUNK_KEYS."""
    usual = max(CHUNK_KEYS // page_size, 1)
    return table_size if 2 * table_size <= 3 * usual else usual


def row_parts(num_rows: int, table_size: int, multiple: int = 1) -> list[slice]:
    """Split rows among calls, in multiples, so that a call's tables fit."""
    count = max(MAX_TABLE_BYTES // (table_size * 4) // multiple * multiple, multiple)
    return [slice(i, min(i + count, num_rows)) for i in range(0, num_rows, count)]


def scalars(
    table_RM: jax.Array,
    first_page_R: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    page_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what a kernel takes before all else: tables, facts of rows, the first row to fetch."""
    num_rows, table_size = table_RM.shape
    end_R = (start_R + num_valid_R - 1) // page_size + 1
    num_pages_R = jnp.where(num_valid_R > 0, jnp.minimum(end_R - first_page_R, table_size), 0)
    # The next row that is not empty.
    index_R = jnp.where(num_pages_R > 0, jnp.arange(num_rows), num_rows)
    next_R = lax.cummin(jnp.append(index_R, num_rows), reverse=True).astype(jnp.int32)
    about_FR = jnp.stack([first_page_R, num_pages_R, start_R, num_valid_R, next_R[1:]])
    return table_RM, about_FR, next_R[:1]


def scratch(pages: tuple[jax.Array, jax.Array], table_size: int) -> list[Any]:
    """Return what a PageReader keeps: buffers of chunks, semaphores, counters."""
    page_size = pages[0].shape[1]
    num_keys = -(-chunk_pages(table_size, page_size) * page_size // LANES) * LANES
    return [
        [pltpu.VMEM((NUM_BUFFERS, num_keys // page_size, *x.shape[1:]), x.dtype) for x in pages],
        pltpu.SemaphoreType.DMA((NUM_BUFFERS, 2)),
        pltpu.SMEM((4,), jnp.int32),
    ]


def operands(pages: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return pages as a kernel takes them: scales as rows of their own, of whole tiles, in place.

    An array of scales may fit VMEM, and the compiler would copy it there. (Others it may not hold
    to a place, where a kernel's result is the same memory.)
    """
    first, second = pages
    if second.ndim == 2:
        second = pltpu.with_memory_space_constraint(second[:, None], pltpu.HBM)
    return first, second


def bytes_read(pages: tuple[jax.Array, jax.Array], num_rows: int, table_size: int) -> int:
    """Return the bytes of whole tables."""
    return num_rows * table_size * sum(x.nbytes // x.shape[0] for x in pages)


class PageReader:
    """Within a kernel whose grid is the rows: fetches chunks in order, two ahead."""

    def __init__(
        self,
        scalar_refs: tuple[Any, Any, Any],
        page_refs: tuple[Any, Any],
        scratch_refs: tuple[Any, Any, Any],
    ) -> None:
        self.table, self.about, self._first_row = scalar_refs
        self._pages = page_refs
        self.buffers, self._semaphores, self.counters = scratch_refs
        self.page_size = page_refs[0].shape[1]
        self.chunk_pages = chunk_pages(self.table.shape[1], self.page_size)
        self.row, self.num_rows = pl.program_id(0), pl.num_programs(0)
        self.num_pages = self.about[NUM_PAGES, self.row]
        self.num_chunks = lax.div(self.num_pages + self.chunk_pages - 1, self.chunk_pages)

    def begin(self) -> None:
        """Ask for the first chunks, in the first step of the grid."""
        # What was never fetched may hold anything, and 0 times NaN is NaN.
        self.buffers[1][...] = jnp.zeros_like(self.buffers[1])
        self.counters[SLOT] = 0
        self.counters[ROW], self.counters[CHUNK] = self._first_row[0], 0
        for slot in range(NUM_BUFFERS - 1):
            self._fetch(slot)

    def each_chunk(self, compute: Callable[[Any, Any], None]) -> None:
        """Call `compute` with each chunk of this row and the buffer that holds it."""

        def one(chunk: Any, slot: Any) -> Any:
            self._wait(chunk, slot)
            self._fetch(jnp.where(slot == 0, NUM_BUFFERS - 1, slot - 1))
            compute(chunk, slot)
            return jnp.where(slot == NUM_BUFFERS - 1, 0, slot + 1)

        self.counters[SLOT] = lax.fori_loop(0, self.num_chunks, one, self.counters[SLOT])

    def _fetch(self, slot: Any) -> None:
        """Start to fetch what is next, if anything is, and count it."""
        row, chunk = self.counters[ROW], self.counters[CHUNK]
        exists = row < self.num_rows
        row = jnp.minimum(row, self.num_rows - 1)
        first = chunk * self.chunk_pages
        left = jnp.where(exists, self.about[NUM_PAGES, row] - first, 0)

        def start(j: Any, _carry: None) -> None:
            @pl.when(j < left)
            def _() -> None:
                page = self.table[row, first + j]
                for i in range(2):
                    self._copy(i, page, slot, j).start()

        lax.fori_loop(0, self.chunk_pages, start, None, unroll=UNROLLS)
        is_last = left <= self.chunk_pages
        next_row = jnp.where(exists, self.about[NEXT_ROW, row], self.num_rows)
        self.counters[ROW] = jnp.where(is_last, next_row, row)
        self.counters[CHUNK] = jnp.where(is_last, 0, chunk + 1)

    def _wait(self, chunk: Any, slot: Any) -> None:
        left = self.num_pages - chunk * self.chunk_pages

        @pl.when(left >= self.chunk_pages)
        def _() -> None:
            for i in range(2):  # for as many bytes as the whole chunk has
                whole = self.buffers[i].at[slot, pl.ds(0, self.chunk_pages)]
                pltpu.make_async_copy(whole, whole, self._semaphores.at[slot, i]).wait()

        @pl.when(left < self.chunk_pages)
        def wait_pages() -> None:
            def wait_page(_page: Any, _carry: None) -> None:
                for i in range(2):
                    self._copy(i, 0, slot, 0).wait()

            lax.fori_loop(0, left, wait_page, None)

    def _copy(self, i: int, page: Any, slot: Any, j: Any) -> Any:
        """Return the transfer of a page to place j of a buffer."""
        return pltpu.make_async_copy(
            self._pages[i].at[page], self.buffers[i].at[slot, j], self._semaphores.at[slot, i]
        )

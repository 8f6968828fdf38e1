"""TPU kernel: attention over paged keys and values, read from HBM by page table.

One kernel for decode steps and prefill blocks, full and sliding layers, float and int8 pages. It
walks a row's pages in chunks with a running softmax; each chunk is fetched page by page while the
one before it is computed, the next row's first chunk too. A row costs what its own pages cost, an
empty row nothing. models/attention.py has the same in plain JAX, its oracle and the path of other
devices.

A row is a run of T consecutive positions of one sequence. R rows, K kv heads, G query heads to each
of them, Q = T·G queries a row and kv head, E head dim, X = K·E, P pages, Z page size, M entries of
a row's table, C pages of a chunk, S ≥ C·Z keys of a chunk in whole LANES, J lanes of a page's
scales.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128

CHUNK_KEYS = 512
"""Keys of a chunk, whole LANES: enough to hide a transfer's latency, few for short rows."""

NUM_BUFFERS = 3
"""One chunk is computed, one is on its way, and one is asked for, so that HBM is never idle."""

MASKED = -1e30
"""A score that no key can have; finite, so that what a row's maximum begins with is no NaN."""

MAX_TABLE_BYTES = 256 << 10
"""Of one call's page tables: they are scalars, for which a chip has 1 MiB."""

VMEM_BYTES = 96 << 20

BFLOAT16_128 = 0x43004300
"""Two bfloat16 of 128, without a bit of mantissa."""

UNROLLS = True
"""Whether a chunk's transfers are written out: what starts them then shares bundles with others."""

FIRST_PAGE, NUM_PAGES, START, NUM_VALID, NEXT_ROW = range(5)
"""What the kernel is told of a row, besides its table."""


ROW, CHUNK, SLOT = range(3)
"""What is fetched next, and the buffer that is computed next."""


def paged_attention(
    q_RKQE: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    first_page_R: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    *,
    group: int,
    window: int | None,
) -> jax.Array:
    """Attend to all stored keys up to each query's own position, as `q` [R, K, Q, E].

    Args:
        q_RKQE: scaled queries, those of one position side by side; their dtype is that of all
            operands of products.
        pages: keys and values, floats [P, Z, X]; or int16 words [P, Z, X] with a level of each and
            their float32 scales [P, 1, J], as models/kv_cache.py lays them out.
        table_RM: pages of positions [(first_page + m)·Z, (first_page + m + 1)·Z).
        first_page_R: int32.
        start_R: position of each row's first query.
        num_valid_R: int32 in [0, T]; queries beyond give something finite, and zeros if all are.
        group: G.
        window: keys that a query sees, its own included; None: all.
    """
    num_rows, table_size = table_RM.shape
    call_rows = max(MAX_TABLE_BYTES // (table_size * 4), 1)
    rows = [slice(i, i + call_rows) for i in range(0, num_rows, call_rows)]
    page_size = pages[0].shape[1]
    end_R = (start_R + num_valid_R - 1) // page_size + 1
    num_pages_R = jnp.where(num_valid_R > 0, jnp.minimum(end_R - first_page_R, table_size), 0)
    call = partial(_call, group=group, window=window)
    parts = [
        call(
            q_RKQE[part],
            pages,
            table_RM[part],
            [x[part] for x in (first_page_R, num_pages_R, start_R, num_valid_R)],
        )
        for part in rows
    ]
    return jnp.concatenate(parts)


def chunk_pages(table_size: int, page_size: int) -> int:
    """Return C: the whole table if it is no more than half as much again as CHUNK_KEYS."""
    usual = max(CHUNK_KEYS // page_size, 1)
    return table_size if 2 * table_size <= 3 * usual else usual


@partial(jax.jit, static_argnames=("group", "window"))
def _call(
    q_RKQE: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    fields: list[jax.Array],
    *,
    group: int,
    window: int | None,
) -> jax.Array:
    num_rows, num_kv_heads, num_queries, head_dim = q_RKQE.shape
    page_size, width = pages[0].shape[1:]
    num_pages = chunk_pages(table_RM.shape[1], page_size)
    num_keys = -(-num_pages * page_size // LANES) * LANES
    # The next row that is not empty.
    index_R = jnp.where(fields[NUM_PAGES] > 0, jnp.arange(num_rows), num_rows)
    next_R = lax.cummin(jnp.append(index_R, num_rows), reverse=True).astype(jnp.int32)
    about_FR = jnp.stack([*fields, next_R[1:]])
    block = pl.BlockSpec((1, *q_RKQE.shape[1:]), lambda r, *_: (r, 0, 0, 0))
    softmax_shape = (num_kv_heads, num_queries, LANES)
    buffers = [pltpu.VMEM((NUM_BUFFERS, num_keys // page_size, *x.shape[1:]), x.dtype) for x in pages]
    page_bytes = sum(x.nbytes // x.shape[0] for x in pages)
    out_RKQE: jax.Array = pl.pallas_call(
        partial(_attend, page_size=page_size, num_pages=num_pages, group=group, window=window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows,),
            in_specs=[block, *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in pages)],
            out_specs=block,
            scratch_shapes=[
                buffers,
                pltpu.VMEM(softmax_shape, jnp.float32),
                pltpu.VMEM(softmax_shape, jnp.float32),
                pltpu.VMEM(q_RKQE.shape[1:], jnp.float32),
                pltpu.SemaphoreType.DMA((NUM_BUFFERS, 2)),
                pltpu.SMEM((3,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_RKQE.shape, q_RKQE.dtype),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=num_rows * table_RM.shape[1] * page_bytes + 2 * q_RKQE.nbytes,
            transcendentals=0,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,
        ),
        name=f"paged_attention_{group}_{window or 0}",
    )(table_RM, about_FR, next_R[:1], q_RKQE, *pages)
    return out_RKQE


def _attend(
    table_ref: Any,
    about_ref: Any,
    first_row_ref: Any,
    q_ref: Any,
    *refs: Any,
    page_size: int,
    num_pages: int,
    group: int,
    window: int | None,
) -> None:
    """Compute one row; the first one's first chunk is fetched by the first step of the grid."""
    *page_refs, out_ref, buffers, max_ref, sum_ref, acc_ref, semaphores, cursor_ref = refs
    row, num_rows = pl.program_id(0), pl.num_programs(0)

    def copy(i: int, page: Any, slot: Any, j: Any) -> Any:
        """Return the transfer of page j of a chunk."""
        return pltpu.make_async_copy(
            page_refs[i].at[page], buffers[i].at[slot, j], semaphores.at[slot, i]
        )

    def fetch(slot: Any) -> None:
        """Start to fetch the chunk at the cursor, if there is one, and move the cursor on."""
        row, chunk = cursor_ref[ROW], cursor_ref[CHUNK]
        exists = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        first = chunk * num_pages
        left = jnp.where(exists, about_ref[NUM_PAGES, row] - first, 0)

        def start(j: Any, _: None) -> None:
            @pl.when(j < left)
            def _() -> None:
                page = table_ref[row, first + j]
                copy(0, page, slot, j).start()
                copy(1, page, slot, j).start()

        lax.fori_loop(0, num_pages, start, None, unroll=UNROLLS)
        is_last = left <= num_pages
        next_row = jnp.where(exists, about_ref[NEXT_ROW, row], num_rows)
        cursor_ref[ROW] = jnp.where(is_last, next_row, row)
        cursor_ref[CHUNK] = jnp.where(is_last, 0, chunk + 1)

    def wait(chunk: Any, slot: Any) -> None:
        """Wait for a chunk of this row."""
        left = about_ref[NUM_PAGES, row] - chunk * num_pages

        @pl.when(left >= num_pages)
        def _() -> None:
            for i in range(2):  # for as many bytes as the whole chunk has
                whole = buffers[i].at[slot, pl.ds(0, num_pages)]
                pltpu.make_async_copy(whole, whole, semaphores.at[slot, i]).wait()

        @pl.when(left < num_pages)
        def _() -> None:
            def wait_page(_: Any, __: None) -> None:
                copy(0, 0, slot, 0).wait()
                copy(1, 0, slot, 0).wait()

            lax.fori_loop(0, left, wait_page, None)

    @pl.when(row == 0)
    def _() -> None:
        # What was never fetched may hold anything, and 0 times NaN is NaN.
        buffers[1][...] = jnp.zeros_like(buffers[1])
        cursor_ref[SLOT] = 0
        cursor_ref[ROW], cursor_ref[CHUNK] = first_row_ref[0], 0
        for slot in range(NUM_BUFFERS - 1):
            fetch(slot)

    num_row_pages = about_ref[NUM_PAGES, row]
    num_chunks = lax.div(num_row_pages + num_pages - 1, num_pages)

    @pl.when(num_row_pages == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(num_row_pages > 0)
    def _() -> None:
        max_ref[...] = jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def add_chunk(chunk: Any, slot: Any) -> Any:
            wait(chunk, slot)
            fetch(jnp.where(slot == 0, NUM_BUFFERS - 1, slot - 1))
            first_key = (about_ref[FIRST_PAGE, row] + chunk * num_pages) * page_size
            last_query = about_ref[NUM_VALID, row] - 1
            accumulate(first_key, about_ref[START, row], last_query, slot)
            return jnp.where(slot == NUM_BUFFERS - 1, 0, slot + 1)

        def accumulate(first_key: Any, start: Any, last_query: Any, slot: Any) -> None:
            _, num_kv_heads, num_queries, head_dim = q_ref.shape
            num_keys = buffers[0].shape[1] * page_size
            shape, is_int8 = (num_queries, num_keys), buffers[0].dtype == jnp.int16
            query = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), group)
            query = jnp.minimum(query, last_query)
            distance = start - first_key + query - lax.broadcasted_iota(jnp.int32, shape, 1)
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            for head in range(num_kv_heads):
                columns = slice(head * head_dim, (head + 1) * head_dim)
                q_QE = q_ref[0, head]
                first_SE = buffers[0][slot, :, :, columns].reshape(num_keys, head_dim)
                if is_int8:
                    k_SE, v_SE = (x.astype(q_QE.dtype) for x in _unpack(first_SE))
                    scale_CJ = buffers[1][slot, :, 0]
                else:
                    k_SE, v_SE = first_SE, buffers[1][slot, :, :, columns].reshape(num_keys, head_dim)
                s_QS = lax.dot_general(
                    q_QE, k_SE, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )
                if is_int8:
                    s_QS *= _row_of_scales(scale_CJ, head, page_size)
                s_QS = jnp.where(visible, s_QS, MASKED)
                old_Q1 = max_ref[head, :, :1]
                max_Q1 = jnp.maximum(old_Q1, s_QS.max(axis=-1, keepdims=True))
                p_QS = jnp.exp(s_QS - max_Q1)
                shrink_Q1 = jnp.exp(old_Q1 - max_Q1)
                sum_Q1 = sum_ref[head, :, :1] * shrink_Q1 + p_QS.sum(axis=-1, keepdims=True)
                if is_int8:
                    p_QS *= _row_of_scales(scale_CJ, num_kv_heads + head, page_size)
                new_QE = jnp.dot(
                    p_QS.astype(q_QE.dtype), v_SE, preferred_element_type=jnp.float32
                )
                acc_ref[head] = acc_ref[head] * shrink_Q1 + new_QE
                max_ref[head] = jnp.broadcast_to(max_Q1, max_ref.shape[1:])
                sum_ref[head] = jnp.broadcast_to(sum_Q1, sum_ref.shape[1:])

        cursor_ref[SLOT] = lax.fori_loop(0, num_chunks, add_chunk, cursor_ref[SLOT])
        for head in range(q_ref.shape[1]):
            out_ref[0, head] = (acc_ref[head] / sum_ref[head, :, :1]).astype(out_ref.dtype)


def _unpack(words_SE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the levels of keys and of values, exactly, as bfloat16.

    Level l is the low seven bits less 128 if the eighth is set: of two bfloat16 with exponents of
    128 and up, one with seven bits of mantissa, the other 128 or, by the eighth bit, 256.
    """
    pairs = pltpu.bitcast(words_SE, jnp.int32)

    def levels(bits: jax.Array) -> jax.Array:
        low = pltpu.bitcast((bits & 0x007F007F) | BFLOAT16_128, jnp.bfloat16)
        return low - pltpu.bitcast((bits & 0x00800080) | BFLOAT16_128, jnp.bfloat16)

    return levels(pairs), levels(pairs >> 8)


def _row_of_scales(scale_CJ: jax.Array, part: int, page_size: int) -> jax.Array:
    """Lay the scales of a part, a head's keys or values, out as one row of all keys [1, S].

    A row of LANES takes n pages: page n·m + i gives lanes [i·Z, (i + 1)·Z) of piece m.
    """
    first = part * page_size
    tile, offset = first // LANES * LANES, first % LANES
    x_CL = scale_CJ[:, tile : tile + LANES]
    num_pages, per_row = x_CL.shape[0], LANES // page_size
    lane = lax.div(lax.broadcasted_iota(jnp.int32, x_CL.shape, 1), page_size)
    page = lax.rem(lax.broadcasted_iota(jnp.int32, x_CL.shape, 0), per_row)
    row_CL = jnp.zeros_like(x_CL)
    for i in range(per_row):
        turned_CL = pltpu.roll(x_CL, (i * page_size - offset) % LANES, 1)
        row_CL = jnp.where((lane == i) & (page == i), turned_CL, row_CL)
    pieces = [
        row_CL[i : i + per_row].sum(axis=0, keepdims=True) for i in range(0, num_pages, per_row)
    ]
    return jnp.concatenate(pieces, axis=1)

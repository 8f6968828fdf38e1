"""TPU kernel: attention over paged keys and values, read from HBM by page table.

Full and sliding layers, float and int8 pages, rows of any number of positions. It walks a row's
pages in chunks with a running softmax; a row costs what its own pages cost, an empty row nothing.
models/attention.py has the same in plain JAX, its oracle and the path of other devices.

A row is a run of T consecutive positions of one sequence. R rows, K kv heads, G query heads to each
of them, Q = T·G queries a row and kv head, E head dim, X = K·E, P pages, Z page size, M entries of
a row's table, J lanes of a page's scales.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.page_reader import PageReader, bytes_read, row_parts, scalars, scratch
from jaxserve.kernels.running_softmax import RunningSoftmax

VMEM_BYTES = 96 << 20

COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("arbitrary",),
    vmem_limit_bytes=VMEM_BYTES,
    disable_bounds_checks=True,  # page numbers are the scheduler's; a check is half a transfer's work
)


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
    parts = [
        _call(
            q_RKQE[part],
            pages,
            *(x[part] for x in (table_RM, first_page_R, start_R, num_valid_R)),
            group=group,
            window=window,
        )
        for part in row_parts(*table_RM.shape)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@partial(jax.jit, static_argnames=("group", "window"))
def _call(
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
    num_rows, *shape = q_RKQE.shape
    block = pl.BlockSpec((1, *shape), lambda r, *_: (r, 0, 0, 0))
    num_bytes = bytes_read(pages, *table_RM.shape) + 2 * q_RKQE.nbytes
    out_RKQE: jax.Array = pl.pallas_call(
        partial(_attend, group=group, window=window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows,),
            in_specs=[block, *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2],
            out_specs=block,
            scratch_shapes=[scratch(pages, table_RM.shape[1]), RunningSoftmax.scratch(*shape)],
        ),
        out_shape=jax.ShapeDtypeStruct(q_RKQE.shape, q_RKQE.dtype),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=num_bytes, transcendentals=0),
        compiler_params=COMPILER_PARAMS,
        name=f"paged_attention_{group}_{window or 0}",
    )(*scalars(table_RM, first_page_R, start_R, num_valid_R, pages[0].shape[1]), q_RKQE, *pages)
    return out_RKQE


def _attend(
    table_ref: Any,
    about_ref: Any,
    first_row_ref: Any,
    q_ref: Any,
    *refs: Any,
    group: int,
    window: int | None,
) -> None:
    """Compute one row."""
    *page_refs, out_ref, reader_refs, softmax_refs = refs
    reader = PageReader((table_ref, about_ref, first_row_ref), (*page_refs,), reader_refs)
    softmax = RunningSoftmax(reader, softmax_refs, group=group, window=window)
    heads = range(q_ref.shape[1])
    pl.when(reader.row == 0)(reader.begin)

    @pl.when(reader.num_pages == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(reader.num_pages > 0)
    def _() -> None:
        softmax.begin()
        reader.each_chunk(
            lambda chunk, slot: softmax.add([q_ref[0, head] for head in heads], chunk, slot)
        )
        for head in heads:
            out_ref[0, head] = softmax.result(head).astype(out_ref.dtype)

"""Attention by the TPU's kernels (jaxserve/kernels), as models/attention.py has it in plain JAX.

R rows, N tokens, H query heads, K kv heads, E head dim, X = K·E, P pages, Z page size, M entries of
a page table, O columns of what was projected: queries, keys and values.
"""

import jax
import jax.numpy as jnp

from jaxserve.kernels.attention_layer import AttentionLayer
from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.extend_attention import extend_attention
from jaxserve.kernels.extend_writer import write_blocks
from jaxserve.models.attention import PagedRows
from jaxserve.models.kv_cache import FloatPages, Int8Pages, Pages


def decode_by_kernel(
    qkv_NO: jax.Array,
    head_norms_2E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: Pages,
    rows: PagedRows,
    layer: AttentionLayer,
    *,
    writes: bool,
) -> tuple[jax.Array, Pages]:
    """Do all that is between two products for rows of one position; returns [N, H·E] and pages."""
    out_NQ, arrays = decode_attention(
        qkv_NO,
        head_norms_2E,
        rope,
        _kernel_arrays(pages),
        *_kernel_rows(rows, layer.window, pages.positions),
        layer=layer,
        writes=writes,
    )
    return out_NQ, _of_arrays(pages, arrays)


def write_by_kernel(
    qkv_NO: jax.Array,
    k_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: Pages,
    rows: PagedRows,
    layer: AttentionLayer,
) -> Pages:
    """Norm, turn and write the keys and values of blocks."""
    arrays = write_blocks(
        qkv_NO,
        k_norm_E,
        rope,
        _kernel_arrays(pages),
        rows.table_RM if layer.window is None else rows.sliding_table_RM,
        rows.start_R,
        rows.num_valid_R,
        rows.full_start_R if layer.window is None else rows.start_R,
        layer=layer,
        block=rows.block,
    )
    return _of_arrays(pages, arrays)


def extend_by_kernel(
    q_NQ: jax.Array,
    q_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: Pages,
    rows: PagedRows,
    layer: AttentionLayer,
) -> jax.Array:
    """Norm, turn and attend for blocks whose keys and values are written; returns [N, H·E]."""
    return extend_attention(
        q_NQ,
        q_norm_E,
        rope,
        _kernel_arrays(pages),
        *_kernel_rows(rows, layer.window, pages.positions),
        layer=layer,
        block=rows.block,
    )


def _kernel_arrays(pages: Pages) -> tuple[jax.Array, jax.Array]:
    """Return pages as kernels take them."""
    if isinstance(pages, FloatPages):
        return pages.k_PZX, pages.v_PZX
    return pages.kv_PZX, pages.scale_PJ


def _of_arrays(pages: Pages, arrays: tuple[jax.Array, jax.Array]) -> Pages:
    """Return what kernels made of pages."""
    if isinstance(pages, FloatPages):
        return FloatPages(k_PZX=arrays[0], v_PZX=arrays[1])
    return Int8Pages(kv_PZX=arrays[0], scale_PJ=arrays[1])


def _kernel_rows(
    rows: PagedRows, window: int | None, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return what kernels are told of rows: the pages in reach, the first one's index, and runs."""
    if window is None:
        return rows.table_RM, jnp.zeros_like(rows.start_R), rows.start_R, rows.num_valid_R
    first_R = jnp.maximum(rows.start_R - window + 1, 0) // page_size
    most_pages = min(rows.sliding_table_RM.shape[1], (window + rows.block - 2) // page_size + 2)
    index_RM = first_R[:, None] + jnp.arange(most_pages)
    table_RM = jnp.take_along_axis(rows.sliding_table_RM, index_RM, axis=1, mode="clip")
    return table_RM, first_R, rows.start_R, rows.num_valid_R

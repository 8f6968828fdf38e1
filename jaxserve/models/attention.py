"""Attention over paged keys and values, one function for decode steps and prefill blocks alike.

A row is a run of T consecutive positions of one sequence (T = 1 in decode) with that sequence's
page tables, one for each kind of attention. R rows, T queries a row, H query heads, K kv heads,
G = H/K, Q = T·G, E head dim, X = K·E, P pages, Z page size, M entries of a page table, C pages read
at a time, S = C·Z. Products run over B = R·K, rows and kv heads as one leading axis: XLA's CPU
backend copies otherwise.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.kernels.constants import MASKED, SCRATCH_PAGE
from jaxserve.models.config import AttentionKind
from jaxserve.models.kv_cache import (
    FloatPages,
    Int8Pages,
    Pages,
    from_stored,
    from_words,
    to_levels,
    to_stored,
    to_words,
)
from jaxserve.models.layers import sum_rows

SLIDING_BLOCK = 256
"""Tokens to which sliding layers join blocks of one run, where their keys are read in chunks of 256
(docs/experiments.md): longer rows compute more scores beyond their queries' windows."""

Scales = tuple[jax.Array, jax.Array]
"""Of int8 keys and of int8 values, [B, S]."""

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""One under way: maximum [B, Q], sum of weights [B, Q], weighted values [B, Q, E]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Which positions a step computes, and where their sequences keep keys and values.

    Attributes:
        start_R: int32, position of each row's first token.
        num_valid_R: int32 in [0, T]; tokens beyond are padding: they are written to the scratch
            page and their results mean nothing.
        table_RM: int32, full-attention layers' page of positions [m·Z, (m + 1)·Z); SCRATCH_PAGE
            past the sequence.
        sliding_table_RM: the same of sliding layers; before the row's window any page.
        full_start_R: int32, first position whose keys and values full-attention layers write: what
            they have of those before it is there, and shared with others.
        is_one_run: bool scalar; the rows are blocks of one sequence, each where the one before it
            ends, but for empty ones at the end. None: not known; rows are taken as they are.
        block: T.
    """

    start_R: jax.Array
    num_valid_R: jax.Array
    table_RM: jax.Array
    sliding_table_RM: jax.Array
    full_start_R: jax.Array
    is_one_run: jax.Array | None = None
    block: int = field(metadata={"static": True})

    @property
    def positions_RT(self) -> jax.Array:
        """Return every token's position, int32."""
        return self.start_R[:, None] + jnp.arange(self.block)

    def joined(self, num_blocks: int) -> "PagedRows":
        """Return rows of so many blocks each, of which R is a multiple; only where `is_one_run`."""
        return PagedRows(
            start_R=self.start_R[::num_blocks],
            num_valid_R=self.num_valid_R.reshape(-1, num_blocks).sum(axis=1),
            table_RM=self.table_RM[::num_blocks],
            sliding_table_RM=self.sliding_table_RM[::num_blocks],
            full_start_R=self.full_start_R[::num_blocks],
            block=num_blocks * self.block,
        )

    def table_of(self, kind: AttentionKind) -> jax.Array:
        """Return a kind's page table [R, M]."""
        return self.table_RM if kind == "full" else self.sliding_table_RM


def write_pages(
    pages: Pages, k_NKE: jax.Array, v_NKE: jax.Array, rows: PagedRows, kind: AttentionKind
) -> Pages:
    """Return the pages with the rows' new keys and values, of N ≥ R·T tokens, in their places."""
    page_size = pages.positions
    position_RT = rows.positions_RT
    table_RM = rows.table_of(kind)
    page_RT = jnp.take_along_axis(table_RM, position_RT // page_size, axis=1, mode="clip")
    is_written_RT = jnp.arange(rows.block) < rows.num_valid_R[:, None]
    if kind == "full":
        is_written_RT &= position_RT >= rows.full_start_R[:, None]
    page_N = jnp.where(is_written_RT, page_RT, SCRATCH_PAGE).reshape(-1)
    offset_N = (position_RT % page_size).reshape(-1)
    k_NKE, v_NKE = k_NKE[: page_N.size], v_NKE[: page_N.size]

    def write(pages_PZX: jax.Array, new_NKE: jax.Array) -> jax.Array:
        new_NX = new_NKE.reshape(page_N.size, -1)
        return pages_PZX.at[page_N, offset_N].set(new_NX, mode="promise_in_bounds")

    if isinstance(pages, FloatPages):
        dtype = pages.k_PZX.dtype
        return FloatPages(
            k_PZX=write(pages.k_PZX, to_stored(k_NKE, dtype)),
            v_PZX=write(pages.v_PZX, to_stored(v_NKE, dtype)),
        )
    k_NKE, k_scale_NK = to_levels(k_NKE)
    v_NKE, v_scale_NK = to_levels(v_NKE)
    scale_NJ = jnp.concatenate([k_scale_NK, v_scale_NK], axis=1)
    lane_NJ = offset_N[:, None] + page_size * jnp.arange(scale_NJ.shape[1])
    to = pages.scale_PJ.at[page_N[:, None], lane_NJ]
    return Int8Pages(
        kv_PZX=write(pages.kv_PZX, to_words(k_NKE, v_NKE)),
        scale_PJ=to.set(scale_NJ, mode="promise_in_bounds"),
    )


def attend(
    q_RTHE: jax.Array,
    pages: Pages,
    rows: PagedRows,
    *,
    window: int | None,
    chunk_pages: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Attend to all stored keys up to each query's own position, float32 [R, T, H, E].

    Queries are scaled already; products have operands of `dtype`. A sliding layer (`window` keys,
    the query's own included) reads only the pages that hold its rows' windows. Reads go in chunks
    of `chunk_pages` with a running softmax, as many as the longest row needs; where one chunk holds
    whatever a row can need, there is no loop. Scales of int8 pages multiply scores and weights.
    Where the rows are one run, blocks are joined to longer rows, so that a key is read for more
    queries: all of them in full-attention layers, up to SLIDING_BLOCK tokens in sliding ones. On a
    CPU the bits are the same.
    """
    attend_to = partial(_attend, pages=pages, window=window, chunk_pages=chunk_pages, dtype=dtype)
    num_blocks = rows.start_R.size
    if window is not None:
        num_blocks = math.gcd(num_blocks, max(SLIDING_BLOCK // rows.block, 1))
        if chunk_pages >= _most_pages(pages.positions, rows, window):
            # Read from its row's first page: joined, its keys would be grouped in another way.
            num_blocks = 1

    def attend_joined() -> jax.Array:
        joined = rows.joined(num_blocks)
        joined_RTHE = q_RTHE.reshape(-1, joined.block, *q_RTHE.shape[2:])
        return attend_to(joined_RTHE, joined).reshape(q_RTHE.shape)

    if rows.is_one_run is None or num_blocks == 1:
        return attend_to(q_RTHE, rows)
    out_RTHE: jax.Array = lax.cond(rows.is_one_run, attend_joined, lambda: attend_to(q_RTHE, rows))
    return out_RTHE


def _most_pages(page_size: int, rows: PagedRows, window: int | None) -> int:
    """Return the most pages that a row can need."""
    table_size = rows.table_RM.shape[1]
    if window is None:
        return table_size
    return min(table_size, (window + rows.block - 2) // page_size + 2)


def _attend(
    q_RTHE: jax.Array,
    rows: PagedRows,
    *,
    pages: Pages,
    window: int | None,
    chunk_pages: int,
    dtype: DTypeLike,
) -> jax.Array:
    num_rows, block, num_heads, head_dim = q_RTHE.shape
    page_size, num_kv_heads = pages.positions, pages.width // head_dim
    group = num_heads // num_kv_heads
    table_RM = rows.table_of("full" if window is None else "sliding")
    table_size = table_RM.shape[1]

    # Entries [first, end) of its table are what a row reads.
    last_R = rows.start_R + jnp.maximum(rows.num_valid_R, 1) - 1
    end_R = jnp.minimum(last_R // page_size + 1, table_size)
    most_pages = _most_pages(page_size, rows, window)
    first_R = jnp.zeros_like(end_R)
    if window is not None:
        first_R = jnp.maximum(rows.start_R - window + 1, 0) // page_size
        if chunk_pages < most_pages:
            # Chunks lie at the same places for every row: elsewhere its sums would round otherwise.
            first_R = first_R // chunk_pages * chunk_pages
    chunk_pages = min(chunk_pages, most_pages)

    q_RKTGE = q_RTHE.reshape(num_rows, block, num_kv_heads, group, head_dim).swapaxes(1, 2)
    q_BQE = q_RKTGE.reshape(num_rows * num_kv_heads, block * group, head_dim).astype(dtype)
    position_RQ = jnp.repeat(rows.positions_RT, group, axis=1)

    def add_chunk(chunk: jax.Array | int, softmax: Softmax) -> Softmax:
        index_RC = first_R[:, None] + chunk * chunk_pages + jnp.arange(chunk_pages)
        page_RC = jnp.take_along_axis(table_RM, index_RC, axis=1, mode="clip")
        k_BSE, v_BSE, scales = _read(pages, page_RC, head_dim)
        key_RS = (index_RC[:, :, None] * page_size + jnp.arange(page_size)).reshape(num_rows, -1)
        distance_RQS = position_RQ[:, :, None] - key_RS[:, None, :]
        visible_RQS = distance_RQS >= 0
        if window is not None:
            visible_RQS &= distance_RQS < window
        visible_BQS = jnp.repeat(visible_RQS, num_kv_heads, axis=0)
        k_BSE, v_BSE = k_BSE.astype(dtype), v_BSE.astype(dtype)
        return _accumulate(q_BQE, k_BSE, v_BSE, scales, visible_BQS, softmax)

    shape = q_BQE.shape[:2]
    softmax = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(q_BQE.shape))
    if chunk_pages == most_pages:
        softmax = add_chunk(0, softmax)
    else:
        num_chunks = (jnp.max(end_R - first_R) + chunk_pages - 1) // chunk_pages
        softmax = lax.fori_loop(0, num_chunks, add_chunk, softmax)
    _, sum_BQ, out_BQE = softmax
    out_RKTGE = (out_BQE / sum_BQ[..., None]).reshape(q_RKTGE.shape)
    return out_RKTGE.swapaxes(1, 2).reshape(q_RTHE.shape)


def _read(
    pages: Pages, page_RC: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array, Scales | None]:
    """Gather pages' keys and values, [B, S, E]; of int8 the levels, and their scales."""
    if isinstance(pages, FloatPages):
        k_BSE = from_stored(_gather(pages.k_PZX, page_RC, head_dim))
        return k_BSE, from_stored(_gather(pages.v_PZX, page_RC, head_dim)), None
    k_BSE, v_BSE = from_words(_gather(pages.kv_PZX, page_RC, head_dim))
    num_kv_heads = pages.width // head_dim
    row_RCJ = pages.scale_PJ.at[page_RC].get(mode="promise_in_bounds")
    row_RCJ = row_RCJ[:, :, : 2 * num_kv_heads * pages.positions]
    scale_RC2KZ = row_RCJ.reshape(*page_RC.shape, 2, num_kv_heads, pages.positions)
    k_scale_BS, v_scale_BS = scale_RC2KZ.transpose(2, 0, 3, 1, 4).reshape(2, *k_BSE.shape[:2])
    return k_BSE, v_BSE, (k_scale_BS, v_scale_BS)


def _gather(pages_PZX: jax.Array, page_RC: jax.Array, head_dim: int) -> jax.Array:
    values_RCZX = pages_PZX.at[page_RC].get(mode="promise_in_bounds")
    num_rows, num_kv_heads = page_RC.shape[0], pages_PZX.shape[2] // head_dim
    values_RSKE = values_RCZX.reshape(num_rows, -1, num_kv_heads, head_dim)
    return values_RSKE.swapaxes(1, 2).reshape(num_rows * num_kv_heads, -1, head_dim)


def _accumulate(
    q_BQE: jax.Array,
    k_BSE: jax.Array,
    v_BSE: jax.Array,
    scales: Scales | None,
    visible_BQS: jax.Array,
    softmax: Softmax,
) -> Softmax:
    """Add a chunk of keys and values to a softmax under way.

    A key that a query cannot see weighs 0, which hides whatever finite value a stale or scratch
    page holds; a model whose values are not finite is lost anyway.
    """
    old_max_BQ, sum_BQ, out_BQE = softmax
    s_BQS = jnp.einsum("BQE,BSE->BQS", q_BQE, k_BSE, preferred_element_type=jnp.float32)
    if scales is not None:
        s_BQS *= scales[0][:, None, :]
    s_BQS = jnp.where(visible_BQS, s_BQS, MASKED)
    max_BQ = jnp.maximum(old_max_BQ, s_BQS.max(axis=-1))
    p_BQS = jnp.exp(s_BQS - max_BQ[..., None])
    weight_BQS = p_BQS if scales is None else p_BQS * scales[1][:, None, :]
    new_BQE = jnp.einsum(
        "BQS,BSE->BQE", weight_BQS.astype(v_BSE.dtype), v_BSE, preferred_element_type=jnp.float32
    )
    # A query that has seen no key yet has the maximum MASKED and weights of 1; the first chunk that
    # it does see shrinks them by exp(MASKED - maximum) = 0.
    shrink_BQ = jnp.exp(old_max_BQ - max_BQ)
    sum_BQ = sum_BQ * shrink_BQ + sum_rows(p_BQS)
    return max_BQ, sum_BQ, out_BQE * shrink_BQ[..., None] + new_BQE

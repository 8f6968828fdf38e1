"""Attention in plain JAX: a row's bits depend on neither its neighbours nor its blocks."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from jaxserve.models.attention import PagedRows, attend
from jaxserve.models.kv_cache import FloatPages, Int8Pages, Pages

NUM_PAGES, PAGE, HEAD_DIM, WINDOW, CHUNK_PAGES = 24, 32, 64, 100, 4
TABLE = 20


def pages(rng: np.random.Generator, num_kv_heads: int = 1) -> FloatPages:
    shape = (NUM_PAGES, PAGE, num_kv_heads * HEAD_DIM)
    k_PZX, v_PZX = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    return FloatPages(k_PZX=k_PZX, v_PZX=v_PZX)


def int8_pages(rng: np.random.Generator) -> Int8Pages:
    words_PZX = rng.integers(-(1 << 15), 1 << 15, (NUM_PAGES, PAGE, HEAD_DIM))
    scale_PJ = rng.uniform(0.01, 0.02, (NUM_PAGES, 128))
    return Int8Pages(
        kv_PZX=jnp.asarray(words_PZX, jnp.int16), scale_PJ=jnp.asarray(scale_PJ, jnp.float32)
    )


def rows_of(start_R: np.ndarray, block: int, table_RM: np.ndarray) -> PagedRows:
    table = jnp.asarray(table_RM, jnp.int32)
    return PagedRows(
        start_R=jnp.asarray(start_R, jnp.int32),
        num_valid_R=jnp.full(len(start_R), block, jnp.int32),
        table_RM=table,
        sliding_table_RM=table,
        full_start_R=jnp.zeros(len(start_R), jnp.int32),
        block=block,
    )


def run(
    q_RTHE: np.ndarray,
    cache: Pages,
    rows: PagedRows,
    window: int | None,
    dtype: DTypeLike = jnp.bfloat16,
) -> np.ndarray:
    attention = partial(attend, window=window, chunk_pages=CHUNK_PAGES, dtype=dtype)
    return np.asarray(jax.jit(attention)(jnp.asarray(q_RTHE, jnp.float32), cache, rows))


@pytest.mark.parametrize(
    ("num_heads", "block", "num_rows", "window"),
    [(4, 1, 1, None), (4, 1, 2, WINDOW), (2, 1, 8, None), (2, 1, 1, WINDOW), (8, 32, 4, None)],
)
def test_a_row_has_the_same_bits_alone_and_in_company(
    num_heads: int, block: int, num_rows: int, window: int | None
) -> None:
    rng = np.random.default_rng(0)
    cache = pages(rng)
    q_RTHE = rng.standard_normal((16, block, num_heads, HEAD_DIM))
    start_R = rng.integers(0, TABLE * PAGE - block, 16)
    table_RM = rng.integers(1, NUM_PAGES, (16, TABLE))

    together = run(q_RTHE, cache, rows_of(start_R, block, table_RM), window)

    some = rows_of(start_R[:num_rows], block, table_RM[:num_rows])
    np.testing.assert_array_equal(run(q_RTHE[:num_rows], cache, some, window), together[:num_rows])


@pytest.mark.parametrize(
    ("kind", "dtype", "block", "num_empty", "start", "window"),
    [
        ("float", jnp.bfloat16, 16, 2, 300, None),
        ("float", jnp.bfloat16, 32, 2, 0, None),
        ("float", jnp.float32, 32, 2, 300, None),
        ("two heads", jnp.bfloat16, 32, 2, 300, None),
        ("int8", jnp.bfloat16, 16, 2, 300, None),
        ("float", jnp.bfloat16, 32, 2, 300, WINDOW),
        # Two rows after joining; the second one empty.
        ("float", jnp.bfloat16, 64, 2, 100, 200),
        ("float", jnp.float32, 64, 5, 100, 200),
        ("int8", jnp.bfloat16, 16, 2, 300, 200),
        # One chunk holds the window of a block, but not that of all blocks.
        ("float", jnp.float32, 16, 2, 299, 64),
    ],
)
def test_blocks_of_one_run_have_the_bits_that_they_have_apart(
    kind: str, dtype: DTypeLike, block: int, num_empty: int, start: int, window: int | None
) -> None:
    rng = np.random.default_rng(1)
    num_rows = 8
    num_tokens = (num_rows - num_empty) * block - 5
    q_RTHE = rng.standard_normal((num_rows, block, 4, HEAD_DIM))
    offset_R = np.arange(num_rows) * block
    # The runner leaves empty blocks where a sequence begins.
    start_R = np.where(offset_R < num_tokens, start + offset_R, 0)
    cache = int8_pages(rng) if kind == "int8" else pages(rng, 2 if kind == "two heads" else 1)
    rows = rows_of(start_R, block, np.tile(rng.integers(1, NUM_PAGES, TABLE), (num_rows, 1)))
    num_valid_R = np.clip(num_tokens - offset_R, 0, block)
    rows = replace(rows, num_valid_R=jnp.asarray(num_valid_R, jnp.int32))

    apart = run(q_RTHE, cache, replace(rows, is_one_run=jnp.array(False)), window, dtype)
    joined = run(q_RTHE, cache, replace(rows, is_one_run=jnp.array(True)), window, dtype)

    kept = slice(0, num_tokens)
    flat_shape = (num_rows * block, 4, HEAD_DIM)
    np.testing.assert_array_equal(joined.reshape(flat_shape)[kept], apart.reshape(flat_shape)[kept])


@pytest.mark.parametrize("start", [0, 128, 200, 217])
def test_a_window_has_the_same_bits_wherever_blocks_begin(start: int) -> None:
    window, num_tokens = 300, 128
    rng = np.random.default_rng(3)
    cache, table_M = pages(rng), rng.integers(1, NUM_PAGES, TABLE)
    q_NHE = rng.standard_normal((num_tokens, 4, HEAD_DIM))

    def by_blocks(block: int) -> np.ndarray:
        num_rows = num_tokens // block
        rows = rows_of(start + np.arange(num_rows) * block, block, np.tile(table_M, (num_rows, 1)))
        q_RTHE = q_NHE.reshape(num_rows, block, 4, HEAD_DIM)
        return run(q_RTHE, cache, rows, window).reshape(q_NHE.shape)

    of_each = by_blocks(1)
    for block in (16, 32, 128):
        np.testing.assert_array_equal(by_blocks(block), of_each)


def test_blocks_of_two_sequences_each_read_their_own_pages() -> None:
    rng = np.random.default_rng(2)
    cache = pages(rng)
    q_RTHE = rng.standard_normal((2, 16, 4, HEAD_DIM))
    table_RM = rng.permutation(np.arange(1, NUM_PAGES))[: 2 * 4].reshape(2, 4)
    rows = rows_of(np.array([40, 56]), 16, table_RM)

    together = run(q_RTHE, cache, replace(rows, is_one_run=jnp.array(False)), None)

    for i in range(2):
        alone = rows_of(np.array([rows.start_R[i]]), 16, table_RM[i : i + 1])
        np.testing.assert_array_equal(run(q_RTHE[i : i + 1], cache, alone, None)[0], together[i])

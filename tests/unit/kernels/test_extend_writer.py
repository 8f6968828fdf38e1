"""The kernel that writes prefill blocks, on a simulated TPU, against the plain scatter.

The simulated memory begins as NaN, so that what was never fetched shows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.attention_layer import AttentionLayer
from jaxserve.models.attention import PagedRows, write_pages
from jaxserve.models.attention_kernels import write_by_kernel
from jaxserve.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.kv_cache import FloatPages, Int8Pages, Pages
from jaxserve.models.layers import rope_tables
from jaxserve.models.transformer import keys_and_values
from tests.compiling import OPTIONS

PAGE, TABLE, HEADS, HEAD_DIM = 32, 6, 4, 16
NUM_PAGES = 2 * TABLE + 1

# Each block's sequence, first position, tokens, and first position that is written. One sequence
# whose blocks share pages, the last one short; an empty block; one of which nothing is written, one
# of which the half is, and its page's next one; and one that fills a page.
BLOCKS_OF_8 = (
    *((0, 21, 8, 0), (0, 29, 8, 0), (0, 37, 8, 0), (0, 45, 3, 0)),
    *((0, 0, 0, 0), (1, 24, 8, 32), (1, 84, 8, 88), (1, 92, 4, 88)),
)
BLOCKS_OF_32 = ((0, 32, 32, 0), (0, 64, 31, 0), (1, 1, 32, 0), (1, 33, 32, 0), (1, 65, 32, 96))


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def pages_of(rng: np.random.Generator, dtype: str, num_kv_heads: int) -> Pages:
    shape = (NUM_PAGES, PAGE, num_kv_heads * HEAD_DIM)
    if dtype == "int8":
        words = rng.integers(-127, 128, (2, *shape))
        is_used_J = np.arange(128) < 2 * num_kv_heads * PAGE
        return Int8Pages(
            kv_PZX=jnp.asarray((words[0] & 0xFF) | (words[1] << 8), jnp.int16),
            scale_PJ=jnp.abs(normal(rng, NUM_PAGES + -NUM_PAGES % 8, 128)) * is_used_J,
        )
    return FloatPages(
        k_PZX=normal(rng, *shape).astype(dtype), v_PZX=normal(rng, *shape).astype(dtype)
    )


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "has_v", "block", "blocks"),
    [
        ("int8", 2, True, 8, BLOCKS_OF_8),
        ("int8", 1, True, 32, BLOCKS_OF_32),
        ("bfloat16", 2, True, 32, BLOCKS_OF_32),
        ("bfloat16", 1, False, 8, BLOCKS_OF_8),
    ],
)
def test_the_kernel_writes_what_the_scatter_does(
    dtype: str, num_kv_heads: int, has_v: bool, block: int, blocks: tuple[tuple[int, ...], ...]
) -> None:
    rng = np.random.default_rng(5)
    layer = LayerConfig(
        kind="full",
        num_heads=HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        mlp_dim=32,
        kv_source=0,
        has_v_proj=has_v,
        rope=RopeConfig(theta=100.0, num_pairs=6),
    )
    config = ModelConfig(
        model_type="test",
        vocab_size=16,
        model_dim=64,
        layers=(layer,),
        window=70,
        norm_eps=1e-6,
        attention_scale=0.5,
        has_v_norm=has_v,
        has_layer_scalar=False,
        logit_softcap=None,
        ple_dim=0,
        ple_vocab_size=0,
        max_position=1024,
    )
    sequence_R, start_R, num_valid_R, first_written_R = np.asarray(blocks, np.int32).T
    table = np.asarray(rng.permutation(np.arange(1, NUM_PAGES)), np.int32).reshape(2, TABLE)
    rows = PagedRows(
        start_R=jnp.asarray(start_R),
        num_valid_R=jnp.asarray(num_valid_R),
        table_RM=jnp.asarray(table[sequence_R]),
        sliding_table_RM=jnp.asarray(table[sequence_R]),
        full_start_R=jnp.asarray(first_written_R),
        block=block,
    )
    rope = rope_tables(layer.rope, HEAD_DIM, rows.positions_RT.reshape(-1))
    qkv_NO = normal(rng, len(blocks) * block, (HEADS + num_kv_heads * (1 + has_v)) * HEAD_DIM)
    k_norm_E = jnp.abs(normal(rng, HEAD_DIM))
    pages = pages_of(rng, dtype, num_kv_heads)
    kernel_layer = AttentionLayer(
        num_heads=HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        eps=config.norm_eps,
        scale=1.0,
        window=None,
        has_v=has_v,
        norms_v=has_v,
        dtype=jnp.bfloat16,
    )

    def plain(qkv_NO: jax.Array, pages: Pages) -> Pages:
        kv_NO = qkv_NO[:, HEADS * HEAD_DIM :]
        k_NKE, v_NKE = keys_and_values(kv_NO, layer, config, k_norm_E, rope)
        return write_pages(pages, k_NKE, v_NKE, rows, "full")

    def by_kernel(qkv_NO: jax.Array, pages: Pages) -> Pages:
        return write_by_kernel(qkv_NO, k_norm_E, rope, pages, rows, kernel_layer)

    def run(write: Any) -> Pages:
        compiler_options: Any = OPTIONS  # jax takes integers, but does not say so
        compiled = jax.jit(write).lower(qkv_NO, pages).compile(compiler_options)
        written: Pages = compiled(qkv_NO, pages)
        return written

    expected = run(plain)
    with pltpu.force_tpu_interpret_mode():
        actual = run(by_kernel)

    for actual_P, expected_P in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        # The scratch page, where the scatter puts what is not written, is nobody's.
        as_float = partial(np.asarray, dtype=np.float32)
        np.testing.assert_allclose(as_float(actual_P)[1:], as_float(expected_P)[1:], rtol=1e-5)
    changed = np.asarray(jax.tree.leaves(actual)[0]) != np.asarray(jax.tree.leaves(pages)[0])
    num_written = sum(
        max(start + count - max(start, first), 0) for _, start, count, first in blocks
    )
    assert changed.any(axis=2).sum() == num_written

"""A layer with the attention kernels, on a simulated TPU, against the same in plain JAX.

The simulated memory begins as NaN, so that what was never fetched shows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels import page_reader
from jaxserve.models.attention import PagedRows
from jaxserve.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.kv_cache import FloatPages, Int8Pages, Pages
from jaxserve.models.layers import rope_tables
from jaxserve.models.params import LayerParams
from jaxserve.models.transformer import decoder_layer
from tests.compiling import OPTIONS

PAGE, TABLE, WINDOW, DIM, HEADS, HEAD_DIM = 32, 6, 70, 64, 4, 16

# First position and number of tokens of each row: one that begins, an empty one, around borders of
# pages, chunks and windows, and at the table's end.
DECODE_ROWS = ((0, 1), (0, 0), (31, 1), (32, 1), (95, 1), (100, 1), (191, 1))
BLOCK = 8
EXTEND_ROWS = ((0, 8), (0, 0), (27, 8), (96, 5), (184, 8))


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the simulation's programs small, and chunks smaller than a row."""
    monkeypatch.setattr(page_reader, "UNROLLS", False)
    monkeypatch.setattr(page_reader, "CHUNK_KEYS", 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    dtype: str = "float32"
    kv_dtype: str = "float32"
    kind: str = "full"
    num_kv_heads: int = 1
    has_v_proj: bool = True
    writes: bool = True
    block: int = 1

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        return DECODE_ROWS if self.block == 1 else EXTEND_ROWS

    @property
    def layer(self) -> LayerConfig:
        return LayerConfig(
            kind="sliding" if self.kind == "sliding" else "full",
            num_heads=HEADS,
            num_kv_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            mlp_dim=32,
            kv_source=0,
            has_v_proj=self.has_v_proj,
            rope=RopeConfig(theta=100.0, num_pairs=6),
        )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            model_type="test",
            vocab_size=16,
            model_dim=DIM,
            layers=(self.layer,),
            window=WINDOW,
            norm_eps=1e-6,
            attention_scale=0.5,
            has_v_norm=self.has_v_proj,
            has_layer_scalar=False,
            logit_softcap=None,
            ple_dim=0,
            ple_vocab_size=0,
            max_position=1024,
        )


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def run(case: Case, chunk_pages: int | None) -> tuple[jax.Array, Pages]:
    """Run one layer; returns the real tokens' stream and the pages."""
    rng = np.random.default_rng(5)
    layer, num_rows, block = case.layer, len(case.rows), case.block
    num_pages = num_rows * TABLE + 1
    width = case.num_kv_heads * HEAD_DIM
    heads = HEADS + (case.num_kv_heads * (1 + case.has_v_proj) if case.writes else 0)
    weights = LayerParams(
        qkv_OD=normal(rng, heads * HEAD_DIM, DIM, dtype=case.dtype),
        o_DQ=normal(rng, DIM, HEADS * HEAD_DIM, dtype=case.dtype),
        gate_up_OD=normal(rng, 64, DIM, dtype=case.dtype),
        down_DF=normal(rng, DIM, 32, dtype=case.dtype),
        ple_gate_PD=None,
        ple_proj_DP=None,
    )
    table = jnp.asarray(rng.permutation(np.arange(1, num_pages)), jnp.int32).reshape(-1, TABLE)
    start_R, num_valid_R = jnp.asarray(case.rows, jnp.int32).T
    rows = PagedRows(
        start_R=start_R,
        num_valid_R=num_valid_R,
        table_RM=table,
        sliding_table_RM=table,
        full_start_R=jnp.zeros(num_rows, jnp.int32),
        block=block,
    )
    pages: Pages
    if case.kv_dtype == "int8":
        words = rng.integers(-127, 128, (2, num_pages, PAGE, width))
        pages = Int8Pages(
            kv_PZX=jnp.asarray((words[0] & 0xFF) | (words[1] << 8), jnp.int16),
            scale_PJ=jnp.abs(normal(rng, num_pages + -num_pages % 8, 128)) / 64,
        )
    else:
        shape = (num_pages, PAGE, width)
        pages = FloatPages(
            k_PZX=normal(rng, *shape, dtype=case.kv_dtype),
            v_PZX=normal(rng, *shape, dtype=case.kv_dtype),
        )
    num_tokens = num_rows * block
    x_ND = normal(rng, num_tokens + -num_tokens % 8, DIM)  # the stream is padded
    position_N = jnp.pad(rows.positions_RT.reshape(-1), (0, len(x_ND) - num_tokens))
    arguments = (
        x_ND,
        weights,
        jnp.abs(normal(rng, 5, DIM)),
        jnp.abs(normal(rng, 2, 2 * HEAD_DIM)),
        jnp.float32(1),
        None,
        rope_tables(layer.rope, HEAD_DIM, position_N),
        pages,
        rows,
    )
    lowered = decoder_layer.lower(
        *arguments, layer=layer, config=case.config, chunk_pages=chunk_pages, writes=case.writes
    )
    compiler_options: Any = OPTIONS  # jax takes integers, but does not say so
    x_ND, pages = lowered.compile(compiler_options)(*arguments)
    assert np.isfinite(x_ND).all()
    is_real_RT = np.arange(block) < np.array(case.rows)[:, 1:]
    return x_ND[:num_tokens][is_real_RT.reshape(-1)], pages


@pytest.mark.parametrize(
    "case",
    [
        Case(num_kv_heads=2),
        Case(kind="sliding", dtype="bfloat16", kv_dtype="bfloat16"),
        Case(kind="sliding", kv_dtype="int8", num_kv_heads=2, has_v_proj=False),
        Case(kind="sliding", kv_dtype="int8", writes=False),
        Case(block=BLOCK, dtype="bfloat16", kv_dtype="bfloat16"),
        Case(block=BLOCK, kind="sliding", kv_dtype="int8", num_kv_heads=2),
    ],
    ids=str,
)
def test_a_layer_with_the_kernel_is_the_plain_layer(case: Case) -> None:
    expected_ND, expected_pages = run(case, chunk_pages=2)
    with pltpu.force_tpu_interpret_mode():
        x_ND, pages = run(case, chunk_pages=None)

    tolerance = 0.05 if case.dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(x_ND, expected_ND, atol=tolerance, rtol=tolerance)
    for actual, expected in zip(
        jax.tree.leaves(pages), jax.tree.leaves(expected_pages), strict=True
    ):
        # The scratch page, where the plain layer puts the empty row's, is nobody's.
        actual_P, expected_P = (np.asarray(x, np.float32)[1:] for x in (actual, expected))
        np.testing.assert_allclose(actual_P, expected_P, rtol=1e-5)

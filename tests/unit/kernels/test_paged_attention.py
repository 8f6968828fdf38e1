"""The attention kernel on a simulated TPU, whose memory begins as NaN, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels import paged_attention
from jaxserve.models.attention import PagedRows, attend
from jaxserve.models.kv_cache import to_levels

Floats = npt.NDArray[np.float32]

PAGE = 32
WINDOW = 70


class Case:
    """Random pages and tables for rows of (start, number of queries); 0 queries: an empty row."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        block: int = 1,
        num_kv_heads: int = 1,
        group: int = 4,
        head_dim: int = 16,
        table_size: int = 10,
        dtype: str = "float32",
    ) -> None:
        rng = np.random.default_rng([block, num_kv_heads, group, len(rows)])
        num_pages = len(rows) * table_size + 1
        shape = (num_pages, PAGE, num_kv_heads, head_dim)
        self.group, self.rows = group, rows
        self.k = rng.standard_normal(shape, np.float32)
        self.v = rng.standard_normal(shape, np.float32)
        num_heads = num_kv_heads * group
        self.q = rng.standard_normal((len(rows), block, num_heads, head_dim), np.float32)
        self.table = rng.permutation(np.arange(1, num_pages)).reshape(len(rows), table_size)
        self.dtype = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
        self.pages = self._store(dtype)
        self.paged_rows = PagedRows(
            start_R=jnp.array([start for start, _ in rows]),
            num_valid_R=jnp.array([n for _, n in rows]),
            table_RM=jnp.asarray(self.table, jnp.int32),
            sliding_table_RM=jnp.asarray(self.table, jnp.int32),
            full_start_R=jnp.zeros(len(rows), jnp.int32),
            block=block,
        )

    def _store(self, dtype: str) -> LayerKV:
        """Lay pages out as the cache does, and keep what rounding leaves of them."""
        num_pages = self.k.shape[0]
        scale_P1J = None
        parts, scales = [], []
        for x in (self.k, self.v):
            flat = jnp.asarray(x).reshape(num_pages * PAGE, *x.shape[2:])
            if dtype == "int8":
                levels, scale = to_levels(flat)
                x[...] = np.asarray(levels * scale[..., None]).reshape(x.shape)
                parts.append(levels.reshape(num_pages, PAGE, -1))
                scales.append(np.asarray(scale).reshape(num_pages, PAGE, -1).swapaxes(1, 2))
            else:
                rounded = flat.astype(dtype)
                x[...] = np.asarray(rounded.astype(jnp.float32)).reshape(x.shape)
                parts.append(rounded.reshape(num_pages, PAGE, -1))
        if scales:
            lanes = np.stack(scales, axis=1).reshape(num_pages, -1)
            padded = np.full((num_pages, 1, 128 * -(-lanes.shape[1] // 128)), np.nan, np.float32)
            padded[:, 0, : lanes.shape[1]] = lanes
            scale_P1J = jnp.asarray(padded)
        return LayerKV(k_PZX=parts[0], v_PZX=parts[1], scale_P1J=scale_P1J)

    def run(self, window: int | None) -> Floats:
        """Run the kernel, [R, T, H, E]."""
        with pltpu.force_tpu_interpret_mode():
            out = attend(
                jnp.asarray(self.q),
                self.pages,
                self.paged_rows,
                window=window,
                chunk_pages=None,
                dtype=self.dtype,
            )
        return np.asarray(out, np.float32)

    def expected(self, window: int | None) -> Floats:
        """Compute each query alone; rows that mean nothing are 0."""
        out = np.zeros_like(self.q)
        q = np.asarray(jnp.asarray(self.q).astype(self.dtype).astype(jnp.float32))
        for r, (start, length) in enumerate(self.rows):
            for t in range(length):
                position = start + t
                first = 0 if window is None else max(position - window + 1, 0)
                keys = np.arange(first, position + 1)
                page, offset = self.table[r, keys // PAGE], keys % PAGE
                for h in range(q.shape[2]):
                    k, v = (x[page, offset, h // self.group] for x in (self.k, self.v))
                    s = k @ q[r, t, h]
                    p = np.exp(s - s.max())
                    out[r, t, h] = p @ v / p.sum()
        return out

    def check(self, window: int | None) -> None:
        actual, expected = self.run(window), self.expected(window)
        assert np.isfinite(actual).all()
        tolerance = 0.03 if self.dtype == jnp.bfloat16 else 2e-5
        for r, (_, length) in enumerate(self.rows):
            np.testing.assert_allclose(
                actual[r, :length], expected[r, :length], atol=tolerance, rtol=tolerance
            )
            if length == 0:
                assert not actual[r].any()


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the simulation's programs small, and chunks smaller than a row."""
    monkeypatch.setattr(paged_attention, "UNROLLS", False)
    monkeypatch.setattr(paged_attention, "CHUNK_KEYS", 128)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_decode_rows(window: int | None, dtype: str) -> None:
    Case([(0, 1), (31, 1), (0, 0), (32, 1), (319, 1), (0, 0)], dtype=dtype).check(window)

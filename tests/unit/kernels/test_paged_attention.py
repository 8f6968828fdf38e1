"""The attention kernel on a simulated TPU, whose memory begins as NaN, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels import page_reader
from jaxserve.models.attention import PagedRows, attend
from jaxserve.models.kv_cache import FloatPages, Int8Pages, Pages, to_levels, to_words

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

    def _store(self, dtype: str) -> Pages:
        """Lay pages out as the cache does, and keep what rounding leaves of them."""
        num_pages, page_size, num_kv_heads, head_dim = self.k.shape
        shape = (num_pages, page_size, num_kv_heads * head_dim)
        if dtype != "int8":
            stored = []
            for x in (self.k, self.v):
                stored.append(jnp.asarray(x.reshape(shape)).astype(dtype))
                x[...] = np.asarray(stored[-1].astype(jnp.float32)).reshape(x.shape)
            return FloatPages(k_PZX=stored[0], v_PZX=stored[1])
        levels, scales = [], []
        for x in (self.k, self.v):
            levels_NKE, scale_NK = to_levels(jnp.asarray(x).reshape(-1, num_kv_heads, head_dim))
            x[...] = np.asarray(levels_NKE * scale_NK[..., None]).reshape(x.shape)
            levels.append(levels_NKE.reshape(shape))
            scales.append(np.asarray(scale_NK).reshape(num_pages, page_size, -1).swapaxes(1, 2))
        lanes = np.stack(scales, axis=1).reshape(num_pages, -1)
        # What is beyond the last scale means nothing.
        scale_PJ = np.full((num_pages + -num_pages % 8, 128), np.nan, np.float32)
        scale_PJ[:num_pages, : lanes.shape[1]] = lanes
        return Int8Pages(kv_PZX=to_words(*levels), scale_PJ=jnp.asarray(scale_PJ))

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
    monkeypatch.setattr(page_reader, "UNROLLS", False)
    monkeypatch.setattr(page_reader, "CHUNK_KEYS", 128)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_decode_rows(window: int | None, dtype: str) -> None:
    Case([(0, 1), (31, 1), (0, 0), (32, 1), (319, 1), (0, 0)], dtype=dtype).check(window)

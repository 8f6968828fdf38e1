"""The arithmetic of attention kernels: a softmax that takes in keys and values by chunks.

T positions of a row, G query heads to each kv head, Q = G·T queries of a row and kv head, head
after head, E head dim, C pages of a chunk, Z page size, S keys of a chunk, J lanes of a page's
scales.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.constants import BFLOAT16_128, LANES, MASKED
from jaxserve.kernels.page_reader import FIRST_PAGE, NUM_VALID, START, PageReader

QUERY_TILE = 256
"""Queries of a product, at most, about: with more of them their scores leave the registers."""


class RunningSoftmax:
    """Of one row's queries, for all kv heads.

    Args:
        reader: the kernel's.
        refs: float32 scratch: maximum and sum [K, Q, LANES], equal in all lanes, and weighted
            values [K, Q, E].
        block: T.
        window: keys that a query sees, its own included; None: all.
    """

    def __init__(
        self, reader: PageReader, refs: tuple[Any, Any, Any], *, block: int, window: int | None
    ) -> None:
        self._reader = reader
        self._max, self._sum, self.acc = refs
        self._block, self._window = block, window

    @staticmethod
    def scratch(num_kv_heads: int, num_queries: int, head_dim: int) -> list[Any]:
        """Return `refs`."""
        widths = (LANES, LANES, head_dim)
        return [pltpu.VMEM((num_kv_heads, num_queries, n), jnp.float32) for n in widths]

    def begin(self) -> None:
        """Forget the row before."""
        self._max[...] = jnp.full_like(self._max, MASKED)
        self._sum[...] = jnp.zeros_like(self._sum)
        self.acc[...] = jnp.zeros_like(self.acc)

    def finish(self, head: int) -> None:
        """Leave a kv head's attention in `acc`."""
        self.acc[head] = self.acc[head] / self._sum[head, :, :1]

    def add(self, queries: list[jax.Array], chunk: Any, slot: Any) -> None:
        """Take in a chunk, for the queries [Q, E] of each kv head."""
        reader = self._reader
        page_size = reader.page_size
        num_keys = reader.buffers[0].shape[1] * page_size
        hidden_TS = self._hidden(chunk, num_keys)
        is_int8 = reader.buffers[0].dtype == jnp.int16
        for head, q_QE in enumerate(queries):
            head_dim = q_QE.shape[1]
            columns = slice(head * head_dim, (head + 1) * head_dim)
            k_SE, v_SE, *_ = (
                buffer[slot, :, :, columns].reshape(num_keys, head_dim)
                for buffer in (reader.buffers[:1] * 2 if is_int8 else reader.buffers)
            )
            scales = None
            if is_int8:
                k_SE, v_SE = (x.astype(q_QE.dtype) for x in unpack_levels(k_SE))
                scale_CJ = reader.buffers[1][slot, :, 0]
                parts = (head, len(queries) + head)
                scales = [_row_of_scales(scale_CJ, part, page_size) for part in parts]
            num_queries = q_QE.shape[0]
            tile = max(QUERY_TILE // self._block, 1) * self._block
            for start in range(0, num_queries, tile):
                place = slice(start, min(start + tile, num_queries))
                self._add((head, place), q_QE[place], k_SE, v_SE, scales, hidden_TS)

    def _add(
        self,
        at: tuple[int, slice],
        q_QE: jax.Array,
        k_SE: jax.Array,
        v_SE: jax.Array,
        scales: list[jax.Array] | None,
        hidden_TS: jax.Array,
    ) -> None:
        """Take in a chunk's keys and values for some queries of a kv head."""
        s_QS = lax.dot_general(
            q_QE, k_SE, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if scales is not None:
            s_QS *= scales[0]
        shape = s_QS.shape
        if self._block > 1:
            s_QS = s_QS.reshape(-1, *hidden_TS.shape)
        s_QS = jnp.where(hidden_TS, MASKED, s_QS).reshape(shape)
        old_Q1 = self._max[at][:, :1]
        max_Q1 = jnp.maximum(old_Q1, s_QS.max(axis=-1, keepdims=True))
        p_QS = jnp.exp(s_QS - max_Q1)
        shrink_Q1 = jnp.exp(old_Q1 - max_Q1)
        sum_Q1 = self._sum[at][:, :1] * shrink_Q1 + p_QS.sum(axis=-1, keepdims=True)
        if scales is not None:
            p_QS *= scales[1]
        new_QE = jnp.dot(p_QS.astype(v_SE.dtype), v_SE, preferred_element_type=jnp.float32)
        self.acc[at] = self.acc[at] * shrink_Q1 + new_QE
        self._max[at] = jnp.broadcast_to(max_Q1, (len(max_Q1), LANES))
        self._sum[at] = jnp.broadcast_to(sum_Q1, (len(sum_Q1), LANES))

    def _hidden(self, chunk: Any, num_keys: int) -> jax.Array:
        """Say which keys a position cannot see, [T, S]; padding sees what the last one does."""
        reader, shape = self._reader, (self._block, num_keys)
        first_page = reader.about[FIRST_PAGE, reader.row] + chunk * reader.chunk_pages
        from_first_key = reader.about[START, reader.row] - first_page * reader.page_size
        position_TS = lax.broadcasted_iota(jnp.int32, shape, 0)
        position_TS = jnp.minimum(position_TS, reader.about[NUM_VALID, reader.row] - 1)
        distance_TS = from_first_key + position_TS - lax.broadcasted_iota(jnp.int32, shape, 1)
        hidden_TS: jax.Array = distance_TS < 0
        if self._window is not None:
            hidden_TS |= distance_TS >= self._window
        return hidden_TS


def unpack_levels(words_SE: jax.Array) -> tuple[jax.Array, jax.Array]:
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

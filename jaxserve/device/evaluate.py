"""Logits through the paged layers, outside serving: for parity tests and quality measurements.

It compiles as it goes, for a few padded sizes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.device.plan import CPU_EXTEND_CHUNK_TOKENS
from jaxserve.models.attention import PagedRows
from jaxserve.models.config import ModelConfig
from jaxserve.models.key_balance import balance_keys
from jaxserve.models.kv_cache import KVCache, KVDtype, make_cache, stored_dtype
from jaxserve.models.params import Params
from jaxserve.models.transformer import logits, run_reading_layers, run_writing_layers

Float32Array = npt.NDArray[np.float32]


@partial(jax.jit, static_argnames=("config", "block", "chunk_pages"), donate_argnames=("cache",))
def _run_block(
    params: Params,
    cache: KVCache,
    ids_T: jax.Array,
    start: jax.Array,
    num_valid: jax.Array,
    *,
    config: ModelConfig,
    block: int,
    chunk_pages: int,
) -> tuple[KVCache, jax.Array]:
    """Run positions [start, start + num_valid) of one sequence; returns logits [T, V] of all."""
    num_pages = jax.tree.leaves(cache)[0].shape[0]
    table_RM = jnp.arange(1, num_pages, dtype=jnp.int32)[None]
    rows = PagedRows(
        start_R=start[None],
        num_valid_R=num_valid[None],
        table_RM=table_RM,
        sliding_table_RM=table_RM,
        full_start_R=jnp.zeros(1, jnp.int32),
        block=block,
    )
    stream, cache = run_writing_layers(params, config, ids_T, cache, rows, chunk_pages=chunk_pages)
    x_TD = run_reading_layers(params, config, stream, cache, rows, chunk_pages=chunk_pages)
    return cache, logits(params, config, x_TD).T


class PagedSequence:
    """One sequence in a cache of its own."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        num_tokens: int,
        page_size: int,
        kv_dtype: KVDtype | None,
    ) -> None:
        pages = 8  # doubled until it fits: few shapes, few compilations
        while pages * page_size < num_tokens:
            pages *= 2
        is_accelerator = jax.default_backend() != "cpu"
        dtype = stored_dtype(kv_dtype or str(params.embed_VD.dtype), is_accelerator=is_accelerator)
        self._params = balance_keys(params, config) if kv_dtype == "int8" else params
        self._config = config
        self._cache = make_cache(
            config,
            num_pages=pages + 1,
            num_sliding_pages=pages + 1,
            page_size=page_size,
            dtype=dtype,
        )
        self._chunk_pages = max(CPU_EXTEND_CHUNK_TOKENS // page_size, 1)
        self._num_tokens = 0

    def append(self, ids: list[int], block: int) -> Float32Array:
        """Run up to `block` more tokens; returns their logits [len(ids), V]."""
        self._cache, logits_TV = _run_block(
            self._params,
            self._cache,
            jnp.asarray(ids + [0] * (block - len(ids)), jnp.int32),
            jnp.asarray(self._num_tokens, jnp.int32),
            jnp.asarray(len(ids), jnp.int32),
            config=self._config,
            block=block,
            chunk_pages=self._chunk_pages,
        )
        self._num_tokens += len(ids)
        return np.asarray(logits_TV)[: len(ids)]


def prompt_logits(
    params: Params,
    config: ModelConfig,
    ids: list[int],
    *,
    page_size: int = 32,
    chunk: int = 64,
    kv_dtype: KVDtype | None = None,
) -> Float32Array:
    """Return logits [T, V] of every position, the prompt taken in by chunks.

    Keys and values are kept in the weights' dtype unless `kv_dtype` says otherwise.
    """
    sequence = PagedSequence(params, config, len(ids), page_size, kv_dtype)
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    return np.concatenate([sequence.append(part, chunk) for part in chunks])


def greedy(
    params: Params, config: ModelConfig, ids: list[int], n: int, *, page_size: int = 32
) -> tuple[list[int], Float32Array]:
    """Continue a prompt by its n most likely tokens; returns them and their logits [n, V]."""
    sequence = PagedSequence(params, config, len(ids) + n, page_size, None)
    for i in range(0, len(ids), 64):
        logits_TV = sequence.append(ids[i : i + 64], 64)
    tokens, step_logits = [], []
    for _ in range(n):
        step_logits.append(logits_TV[-1])
        tokens.append(int(logits_TV[-1].argmax()))
        logits_TV = sequence.append(tokens[-1:], 1)
    return tokens, np.stack(step_logits)

"""The device's stored keys and values: one K and one V array for each layer that owns a cache.

Never stacked over layers and never interleaved, so that a donated step updates each in place
(docs/decisions/0007). Full-attention layers have pages of one kind, sliding layers of another, with
numbers of their own.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.models.config import AttentionKind, ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Pages of all owning layers, in the order of `ModelConfig.kv_owners`.

    Each array is [P pages, Z page size, K·E], of the stored dtype; P depends on the layer's kind.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


COPY_FIELDS = 4
"""Numbers of a copy: source and destination of a full page, then of a sliding one."""


def stored_dtype(dtype: str, *, is_accelerator: bool) -> DTypeLike:
    """Return what holds values of `dtype`: on a CPU, bfloat16 is kept as its bits, uint16.

    XLA's CPU backend widens a whole bfloat16 pool to float32 to read or write one page; integers it
    leaves alone. The TPU's compiler would convert the bits of what is read in a pass of its own.
    """
    return jnp.uint16 if dtype == "bfloat16" and not is_accelerator else dtype


def make_cache(
    config: ModelConfig,
    *,
    num_pages: int,
    num_sliding_pages: int,
    page_size: int,
    dtype: DTypeLike,
) -> KVCache:
    """Return an empty cache; `dtype` is the stored one."""
    count: dict[AttentionKind, int] = {"full": num_pages, "sliding": num_sliding_pages}

    def pages() -> tuple[jax.Array, ...]:
        owners = (config.layers[i] for i in config.kv_owners)
        return tuple(
            jnp.zeros((count[layer.kind], page_size, layer.num_kv_heads * layer.head_dim), dtype)
            for layer in owners
        )

    return KVCache(k=pages(), v=pages())


def copy_pages(cache: KVCache, config: ModelConfig, copies_N4: jax.Array) -> KVCache:
    """Return the cache with pages of both kinds copied: all are read before any is written."""
    pairs: dict[AttentionKind, jax.Array] = {"full": copies_N4[:, :2], "sliding": copies_N4[:, 2:]}

    def copy(owner: int, pages_PZX: jax.Array) -> jax.Array:
        source_N, target_N = pairs[config.layers[owner].kind].T
        copied_NZX = pages_PZX.at[source_N].get(mode="promise_in_bounds")
        return pages_PZX.at[target_N].set(copied_NZX, mode="promise_in_bounds")

    return KVCache(
        k=tuple(map(copy, config.kv_owners, cache.k)), v=tuple(map(copy, config.kv_owners, cache.v))
    )


def to_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to what the pages hold."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_stored(x: jax.Array) -> jax.Array:
    """Return stored values as the floats they are."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

"""The device's stored keys and values: one K and one V array for each layer that owns a cache.

Never stacked over layers and never interleaved, so that a donated step updates each in place
(docs/decisions/0007). Two-byte floats are stored as their bits, uint16: XLA's CPU backend widens a
whole bfloat16 pool to float32 before it reads or writes a page of it, integers it leaves alone.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Pages of all owning layers, in the order of `ModelConfig.kv_owners`.

    Each array is [P pages, Z page size, K·E], of the stored dtype.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def make_cache(config: ModelConfig, *, num_pages: int, page_size: int, dtype: str) -> KVCache:
    """Return an empty cache for values of `dtype`, "bfloat16" or "float32"."""
    stored = jnp.uint16 if dtype == "bfloat16" else jnp.float32

    def pages() -> tuple[jax.Array, ...]:
        owners = (config.layers[i] for i in config.kv_owners)
        return tuple(
            jnp.zeros((num_pages, page_size, layer.num_kv_heads * layer.head_dim), stored)
            for layer in owners
        )

    return KVCache(k=pages(), v=pages())


def to_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to what the pages hold."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_stored(x: jax.Array) -> jax.Array:
    """Return stored values as the floats they are."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

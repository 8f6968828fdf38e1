"""The device's stored keys and values: arrays of its own for each layer that owns a cache.

Never stacked over layers, so that a donated step updates each in place (docs/decisions/0007).
Full-attention layers have pages of one kind, sliding layers of another, with numbers of their own.
P pages of a kind, Z positions a page, K kv heads, E head dim, X = K·E.

int8 (docs/decisions/0019): a key's level in the low byte of an int16 word, the value's of the same
channel in the high byte, as two's complement; for each token and head a float32 scale of the key,
and one of the value. A page's scales are one row of J lanes, the keys' before the values': lane
(i·K + h)·Z + z is head h's at position z, of keys with i = 0, of values with i = 1. J is 2·K·Z made
up to whole LANES; the rows are made up to whole SUBLANES.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.kernels.constants import LANES, MAX_LEVEL, SUBLANES
from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig

KVDtype = Literal["float32", "bfloat16", "int8"]
"""What keys and values are kept as, whatever the device stores them in."""

COPY_FIELDS = 4
"""Numbers of a copy: source and destination of a full page, then of a sliding one."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class FloatPages:
    """One owning layer's keys and values, [P, Z, X] of the stored dtype."""

    k_PZX: jax.Array
    v_PZX: jax.Array

    @property
    def positions(self) -> int:
        """Z."""
        return self.k_PZX.shape[1]

    @property
    def width(self) -> int:
        """X."""
        return self.k_PZX.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Pages:
    """One owning layer's int8 keys and values, int16 [P, Z, X]; scales, float32 [≥ P, J]."""

    kv_PZX: jax.Array
    scale_PJ: jax.Array

    @property
    def positions(self) -> int:
        """Z."""
        return self.kv_PZX.shape[1]

    @property
    def width(self) -> int:
        """X."""
        return self.kv_PZX.shape[2]


Pages = FloatPages | Int8Pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Pages of all owning layers, in the order of `ModelConfig.kv_owners`; P is its kind's."""

    layers: tuple[Pages, ...]


def stored_dtype(dtype: str, *, is_accelerator: bool) -> DTypeLike:
    """Return what `make_cache` takes for a KVDtype: on a CPU, bfloat16 is kept as bits, uint16.

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
    owners = (config.layers[i] for i in config.kv_owners)
    return KVCache(
        layers=tuple(_empty_layer(layer, count[layer.kind], page_size, dtype) for layer in owners)
    )


def _empty_layer(layer: LayerConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> Pages:
    shape = (num_pages, page_size, layer.num_kv_heads * layer.head_dim)
    if jnp.dtype(dtype) != jnp.int8:
        return FloatPages(k_PZX=jnp.zeros(shape, dtype), v_PZX=jnp.zeros(shape, dtype))
    num_lanes = _round_up(2 * layer.num_kv_heads * page_size, LANES)
    return Int8Pages(
        kv_PZX=jnp.zeros(shape, jnp.int16),
        scale_PJ=jnp.zeros((_round_up(num_pages, SUBLANES), num_lanes), jnp.float32),
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bytes_per_page(config: ModelConfig, kind: AttentionKind, page_size: int, dtype: str) -> int:
    """Return the bytes of one page over all owning layers of a kind, scales included."""
    owners = (config.layers[i] for i in config.kv_owners)
    pages = [
        jax.eval_shape(lambda layer=layer: _empty_layer(layer, SUBLANES, page_size, dtype))
        for layer in owners
        if layer.kind == kind
    ]
    num_bytes: int = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    return num_bytes // SUBLANES


def copy_pages(cache: KVCache, config: ModelConfig, copies_N4: jax.Array) -> KVCache:
    """Return the cache with pages of both kinds copied: all are read before any is written."""
    pairs: dict[AttentionKind, jax.Array] = {"full": copies_N4[:, :2], "sliding": copies_N4[:, 2:]}

    def copy(owner: int, layer: Pages) -> Pages:
        source_N, target_N = pairs[config.layers[owner].kind].T

        def copy_array(pages: jax.Array) -> jax.Array:
            copied = pages.at[source_N].get(mode="promise_in_bounds")
            return pages.at[target_N].set(copied, mode="promise_in_bounds")

        copied_layer: Pages = jax.tree.map(copy_array, layer)
        return copied_layer

    return KVCache(layers=tuple(map(copy, config.kv_owners, cache.layers)))


def to_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to what FloatPages hold."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_stored(x: jax.Array) -> jax.Array:
    """Return values of FloatPages as the floats they are."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def to_levels(x_NKE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round float32 to levels in [-127, 127], int16, and return them with their scales [N, K]."""
    largest_NK = jnp.abs(x_NKE).max(axis=-1)
    per_unit_NK = jnp.where(largest_NK > 0, MAX_LEVEL / largest_NK, 0.0)
    levels_NKE = jnp.round(x_NKE * per_unit_NK[..., None]).astype(jnp.int16)
    return levels_NKE, largest_NK / MAX_LEVEL


def to_words(k: jax.Array, v: jax.Array) -> jax.Array:
    """Put levels of keys and values, int16, into words."""
    return (k & 0xFF) | (v << 8)


def from_words(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take words apart into levels of keys and of values, int16."""
    return (words << 8) >> 8, words >> 8

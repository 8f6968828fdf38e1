"""The device's stored keys and values: arrays of its own for each layer that owns a cache.

Never stacked over layers and never interleaved, so that a donated step updates each in place
(docs/decisions/0007). Full-attention layers have pages of one kind, sliding layers of another, with
numbers of their own. P pages of a kind, Z positions a page, K kv heads, E head dim, X = K·E.

int8 values (docs/decisions/0019) have one float32 scale for each token and kv head, which stands
for 1 of 127 levels. A page's scales are one row of J lanes, those of its keys before those of its
values: lane (i·K + h)·Z + z has that of head h at position z, i = 0 for keys and 1 for values.
J is 2·K·Z made up to whole LANES; what is beyond means nothing.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig

KVDtype = Literal["float32", "bfloat16", "int8"]
"""What keys and values are kept as, whatever the device stores them in."""

COPY_FIELDS = 4
"""Numbers of a copy: source and destination of a full page, then of a sliding one."""

LANES = 128
"""A TPU stores rows of whole lanes, one behind another, without padding."""

MAX_LEVEL = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """The pages of one owning layer.

    Attributes:
        k_PZX: keys, of the stored dtype.
        v_PZX: values.
        scale_P1J: float32, of both, where they are int8; else None.
    """

    k_PZX: jax.Array
    v_PZX: jax.Array
    scale_P1J: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Pages of all owning layers, in the order of `ModelConfig.kv_owners`; P is its kind's."""

    layers: tuple[LayerKV, ...]


def stored_dtype(dtype: str, *, is_accelerator: bool) -> DTypeLike:
    """Return what holds values of a KVDtype: on a CPU, bfloat16 is kept as its bits, uint16.

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


def _empty_layer(layer: LayerConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> LayerKV:
    shape = (num_pages, page_size, layer.num_kv_heads * layer.head_dim)
    scale = None
    if dtype == jnp.int8:
        num_lanes = -(-2 * layer.num_kv_heads * page_size // LANES) * LANES
        scale = jnp.zeros((num_pages, 1, num_lanes), jnp.float32)
    return LayerKV(k_PZX=jnp.zeros(shape, dtype), v_PZX=jnp.zeros(shape, dtype), scale_P1J=scale)


def bytes_per_page(config: ModelConfig, kind: AttentionKind, page_size: int, dtype: str) -> int:
    """Return the bytes of one page over all owning layers of a kind, scales included."""
    owners = (config.layers[i] for i in config.kv_owners)
    pages = [
        jax.eval_shape(lambda layer=layer: _empty_layer(layer, 1, page_size, dtype))
        for layer in owners
        if layer.kind == kind
    ]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))


def copy_pages(cache: KVCache, config: ModelConfig, copies_N4: jax.Array) -> KVCache:
    """Return the cache with pages of both kinds copied: all are read before any is written."""
    pairs: dict[AttentionKind, jax.Array] = {"full": copies_N4[:, :2], "sliding": copies_N4[:, 2:]}

    def copy(owner: int, layer: LayerKV) -> LayerKV:
        source_N, target_N = pairs[config.layers[owner].kind].T

        def copy_array(pages: jax.Array) -> jax.Array:
            copied = pages.at[source_N].get(mode="promise_in_bounds")
            return pages.at[target_N].set(copied, mode="promise_in_bounds")

        copied_layer: LayerKV = jax.tree.map(copy_array, layer)
        return copied_layer

    return KVCache(layers=tuple(map(copy, config.kv_owners, cache.layers)))


def to_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to what the pages hold, if not int8."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return stored values as `dtype`; of int8, the levels."""
    floats = lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
    return floats.astype(dtype)


def to_levels(x_NKE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round float32 to levels, int8 [N, K, E], and return them with their scales [N, K]."""
    largest_NK = jnp.abs(x_NKE).max(axis=-1)
    per_unit_NK = jnp.where(largest_NK > 0, MAX_LEVEL / largest_NK, 0.0)
    levels_NKE = jnp.round(x_NKE * per_unit_NK[..., None])
    return levels_NKE.astype(jnp.int8), largest_NK / MAX_LEVEL

"""The decoder: one forward pass for every Gemma family, driven by ModelConfig.

Formulas follow the families' reference implementations in transformers (modeling_gemma3.py,
modeling_gemma4.py). The residual stream is float32; matrices and the cache have their own dtypes.
N = R·T flat tokens, L layers, D model, W the per-layer inputs' width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.kernels.attention_layer import AttentionLayer
from jaxserve.models.attention import PagedRows, attend, write_pages
from jaxserve.models.attention_kernels import decode_by_kernel, extend_by_kernel, write_by_kernel
from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig
from jaxserve.models.kv_cache import KVCache, Pages
from jaxserve.models.layers import (
    add_linear,
    apply_rope,
    gated_linear,
    gelu,
    linear,
    linear_transposed,
    norm,
    normed_linear,
    operand_dtype,
    pad_rows,
    rms,
    rope_tables,
    take_rows,
)
from jaxserve.models.params import LayerParams, Params

RopeTables = dict[AttentionKind, tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What flows between layers: float32 [N, D], and every layer's own input [N, L, W] or None."""

    x_ND: jax.Array
    ple_NLW: jax.Array | None

    def select(self, index_S: jax.Array) -> "Stream":
        """Keep the tokens at the given flat indices, int32 [S]."""
        ple = None if self.ple_NLW is None else self.ple_NLW[index_S]
        return Stream(x_ND=self.x_ND[index_S], ple_NLW=ple)


def embed(params: Params, config: ModelConfig, ids_N: jax.Array) -> jax.Array:
    """Return scaled embeddings, float32 [N, D]; the scale is √D as the weights' dtype rounds it."""
    scale = jnp.sqrt(jnp.float32(config.model_dim)).astype(params.embed_VD.dtype)
    row_ND = take_rows(params.embed_VD, ids_N)
    # Fused with the first layer, one row would round in another way than eight.
    scaled_ND: jax.Array = _compute_apart(
        lambda ids_N, row_ND: row_ND * scale.astype(jnp.float32), ids_N, row_ND
    )
    return scaled_ND


def per_layer_inputs(
    params: Params, config: ModelConfig, ids_N: jax.Array, x_ND: jax.Array
) -> jax.Array | None:
    """Return what multiplies each layer's gate, float32 [N, L, W]; None: the model has none."""
    if params.ple_embed is None or params.ple_model_proj is None or params.ple_norm_P is None:
        return None
    shape = (ids_N.shape[0], config.num_layers, config.ple_dim)
    row_N = jnp.where(ids_N < config.ple_vocab_size, ids_N, 0)
    token = take_rows(params.ple_embed, row_N).reshape(shape) * config.ple_dim**0.5
    context = linear(params.ple_model_proj, x_ND) * config.model_dim**-0.5
    context = norm(context.reshape(shape), params.ple_norm_P, config.norm_eps)
    inputs_NLW: jax.Array = (context + token) * 2**-0.5
    return inputs_NLW


def keys_and_values(
    kv_NO: jax.Array,
    layer: LayerConfig,
    config: ModelConfig,
    k_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Bring projected keys and values to the form that is stored, [N, K, E] each."""
    shape = (kv_NO.shape[0], layer.num_kv_heads, layer.head_dim)
    width = layer.num_kv_heads * layer.head_dim
    raw_k = kv_NO[:, :width].reshape(shape)
    v = kv_NO[:, width:].reshape(shape) if layer.has_v_proj else raw_k
    k = apply_rope(norm(raw_k, k_norm_E, config.norm_eps), rope)
    if config.has_v_norm:
        v = rms(v, config.norm_eps)
    return k, v


@partial(jax.jit, static_argnames=("layer", "config", "chunk_pages", "writes"))
def decoder_layer(
    x_ND: jax.Array,
    weights: LayerParams,
    norms_5D: jax.Array,
    head_norms_2E: jax.Array,
    layer_scalar: jax.Array,
    ple_NW: jax.Array | None,
    rope: tuple[jax.Array, jax.Array],
    pages: Pages,
    rows: PagedRows,
    *,
    layer: LayerConfig,
    config: ModelConfig,
    chunk_pages: int | None,
    writes: bool,
) -> tuple[jax.Array, Pages]:
    """Run one layer; returns the stream and the pages, changed only if the layer `writes` them.

    Jitted so that equal layers are traced once; the step program inlines it.
    """
    eps = config.norm_eps
    input_norm, attention_norm, mlp_norm, mlp_out_norm, ple_out_norm = norms_5D

    with jax.named_scope("attention"):
        qkv_NO = normed_linear(weights.qkv_OD, x_ND, input_norm, eps)
        out_NQ, pages = _attention(
            qkv_NO,
            head_norms_2E,
            rope,
            pages,
            rows,
            layer=layer,
            config=config,
            chunk_pages=chunk_pages,
            writes=writes,
            dtype=operand_dtype(weights.o_DQ),
        )
        x_ND = add_linear(x_ND, weights.o_DQ, out_NQ, attention_norm, eps)

    with jax.named_scope("mlp"):
        hidden_NF = gated_linear(weights.gate_up_OD, x_ND, mlp_norm, eps)
        x_ND = add_linear(x_ND, weights.down_DF, hidden_NF, mlp_out_norm, eps)

    if not (ple_NW is None or weights.ple_gate_PD is None or weights.ple_proj_DP is None):
        with jax.named_scope("per_layer_input"):
            gated_NW = gelu(linear(weights.ple_gate_PD, x_ND)) * ple_NW
            x_ND = add_linear(x_ND, weights.ple_proj_DP, gated_NW, ple_out_norm, eps)
    if config.has_layer_scalar:
        x_ND *= layer_scalar
    return x_ND, pages


def _attention(
    qkv_NO: jax.Array,
    head_norms_2E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: Pages,
    rows: PagedRows,
    *,
    layer: LayerConfig,
    config: ModelConfig,
    chunk_pages: int | None,
    writes: bool,
    dtype: DTypeLike,
) -> tuple[jax.Array, Pages]:
    """Return attention of what was projected, [N, H·E], and the pages; by kernels, or plain."""
    window = config.window if layer.kind == "sliding" else None
    kernel_layer = AttentionLayer(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        eps=config.norm_eps,
        scale=config.attention_scale,
        window=window,
        has_v=layer.has_v_proj,
        norms_v=config.has_v_norm,
        dtype=dtype,
    )
    if chunk_pages is None and rows.block == 1:
        return decode_by_kernel(
            qkv_NO, head_norms_2E, rope, pages, rows, kernel_layer, writes=writes
        )
    q_norm_E, k_norm_E = head_norms_2E[:, : layer.head_dim]
    if chunk_pages is None:
        if writes:
            pages = write_by_kernel(qkv_NO, k_norm_E, rope, pages, rows, kernel_layer)
        return extend_by_kernel(qkv_NO, q_norm_E, rope, pages, rows, kernel_layer), pages
    q_width = layer.num_heads * layer.head_dim
    if writes:
        k_NKE, v_NKE = keys_and_values(qkv_NO[:, q_width:], layer, config, k_norm_E, rope)
        pages = write_pages(pages, k_NKE, v_NKE, rows, layer.kind)
    num_tokens, num_real = qkv_NO.shape[0], rows.table_RM.shape[0] * rows.block
    q_NHE = qkv_NO[:, :q_width].reshape(num_tokens, layer.num_heads, layer.head_dim)
    q_NHE = apply_rope(norm(q_NHE, q_norm_E, config.norm_eps), rope) * config.attention_scale
    out_RTHE = attend(
        q_NHE[:num_real].reshape(-1, rows.block, layer.num_heads, layer.head_dim),
        pages,
        rows,
        window=window,
        chunk_pages=chunk_pages,
        dtype=dtype,
    )
    return pad_rows(out_RTHE.reshape(num_real, q_width)), pages


def _rope_tables(config: ModelConfig, positions_N: jax.Array) -> RopeTables:
    """Return each kind's cosines and sines, computed once for all layers and heads."""

    def compute(positions_N: jax.Array) -> RopeTables:
        return {
            kind: rope_tables(layer.rope, layer.head_dim, positions_N)
            for kind, layer in {layer.kind: layer for layer in config.layers}.items()
        }

    # XLA's CPU backend would compute them anew in each layer's fusions, for every head.
    tables: RopeTables = _compute_apart(compute, positions_N)
    return tables


def _compute_apart(compute: Callable[..., Any], index_N: jax.Array, *arguments: jax.Array) -> Any:
    """Return compute(index_N, *arguments), on a CPU fused with nothing that uses it.

    A barrier is gone before XLA's CPU backend fuses; what a conditional yields it cannot fuse.
    Indices are never negative, which the compiler does not know.
    """

    def apart(index_N: jax.Array, *arguments: jax.Array) -> Any:
        def never(*operands: jax.Array) -> Any:
            return jax.tree.map(jnp.zeros_like, compute(*operands))

        return lax.cond(index_N[0] >= 0, compute, never, index_N, *arguments)

    return lax.platform_dependent(index_N, *arguments, cpu=apart, default=compute)


def run_layers(
    params: Params,
    config: ModelConfig,
    layers: Sequence[int],
    stream: Stream,
    cache: KVCache,
    rows: PagedRows,
    *,
    chunk_pages: int | None,
) -> tuple[Stream, KVCache]:
    """Run the given layers, in order, over the rows' tokens."""
    num_tokens = stream.x_ND.shape[0]
    stream = jax.tree.map(pad_rows, stream)
    rope = _rope_tables(config, pad_rows(rows.positions_RT.reshape(-1)))
    x_ND, ple_NLW = stream.x_ND, stream.ple_NLW
    pages = list(cache.layers)
    for i in layers:
        layer = config.layers[i]
        owner = config.kv_owners.index(layer.kv_source)
        with jax.named_scope(f"layer_{i}"):
            x_ND, pages[owner] = decoder_layer(
                x_ND,
                params.layers[i],
                params.norms_LND[i],
                params.head_norms_L2E[i],
                params.layer_scalar_L[i],
                None if ple_NLW is None else ple_NLW[:, i],
                rope[layer.kind],
                pages[owner],
                rows,
                # With their sources' indices, equal layers would be traced one by one.
                layer=replace(layer, kv_source=0),
                config=config,
                chunk_pages=chunk_pages,
                writes=layer.kv_source == i,
            )
    stream = jax.tree.map(lambda x: x[:num_tokens], Stream(x_ND=x_ND, ple_NLW=ple_NLW))
    return stream, KVCache(layers=tuple(pages))


def run_writing_layers(
    params: Params,
    config: ModelConfig,
    ids_N: jax.Array,
    cache: KVCache,
    rows: PagedRows,
    *,
    chunk_pages: int | None,
) -> tuple[Stream, KVCache]:
    """Embed tokens and run them through the last layer that owns a cache: all that others see."""
    x_ND = embed(params, config, ids_N)
    stream = Stream(x_ND=x_ND, ple_NLW=per_layer_inputs(params, config, ids_N, x_ND))
    layers = range(config.num_writing_layers)
    return run_layers(params, config, layers, stream, cache, rows, chunk_pages=chunk_pages)


def run_reading_layers(
    params: Params,
    config: ModelConfig,
    stream: Stream,
    cache: KVCache,
    rows: PagedRows,
    *,
    chunk_pages: int | None,
) -> jax.Array:
    """Take tokens whose logits are wanted through the remaining layers; returns [N, D]."""
    layers = range(config.num_writing_layers, config.num_layers)
    stream, _ = run_layers(params, config, layers, stream, cache, rows, chunk_pages=chunk_pages)
    return stream.x_ND


def logits(params: Params, config: ModelConfig, x_ND: jax.Array) -> jax.Array:
    """Return float32 logits [V, N] of a stream that has passed all layers."""
    with jax.named_scope("head"):
        x_ND, num_tokens = pad_rows(x_ND), x_ND.shape[0]
        x_ND = norm(x_ND, params.final_norm_D, config.norm_eps)
        z_VN = linear_transposed(params.embed_VD, x_ND)[:, :num_tokens]
        if config.logit_softcap is not None:
            z_VN = config.logit_softcap * jnp.tanh(z_VN / config.logit_softcap)
        return z_VN

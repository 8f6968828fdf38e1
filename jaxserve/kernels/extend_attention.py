"""TPU kernel: attention of prefill blocks, from projected queries to what is projected next.

It norms and turns queries, and attends to cached keys and values up to each query's own position,
the block's own included, read from HBM by page table. A block costs what its own pages cost, an
empty one nothing. models/transformer.py has the same in plain JAX, its oracle and the path of other
devices.

A block is a run of T consecutive positions of one sequence. R blocks, N = R·T tokens, H query
heads, K kv heads, E head dim, Q = T·H/K queries of a kv head, head after head, P pages, Z page
size, M entries of a block's table.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.attention_layer import COMPILER_PARAMS, AttentionLayer, prepare
from jaxserve.kernels.page_reader import (
    PageReader,
    bytes_read,
    operands,
    row_parts,
    scalars,
    scratch,
)
from jaxserve.kernels.running_softmax import RunningSoftmax


def extend_attention(
    q_NQ: jax.Array,
    q_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    first_page_R: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    *,
    layer: AttentionLayer,
    block: int,
) -> jax.Array:
    """Return attention [N, H·E], of `layer.dtype`.

    Args:
        q_NQ: projected queries in the first H·E columns, float32 [≥ N, ≥ H·E].
        q_norm_E: their factors.
        rope: cosines and sines of each token's position, float32 [≥ N, E/2].
        pages: keys and values, floats [P, Z, X]; or int16 words [P, Z, X] with a level of each and
            their float32 scales [P, J], as models/kv_cache.py lays them out.
        table_RM: pages of positions [(first_page + m)·Z, (first_page + m + 1)·Z).
        first_page_R: int32.
        start_R: position of each block's first token.
        num_valid_R: int32 in [0, T]; tokens beyond give something finite, and zeros if all are.
        layer: the rest.
        block: T, a multiple of 8.
    """
    parts = []
    num_rows, table_size = table_RM.shape
    for part in row_parts(num_rows, table_size):
        tokens = slice(part.start * block, part.stop * block)
        parts.append(
            _call(
                q_NQ[tokens],
                q_norm_E,
                (rope[0][tokens], rope[1][tokens]),
                pages,
                *(x[part] for x in (table_RM, first_page_R, start_R, num_valid_R)),
                layer=layer,
                block=block,
            )
        )
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@partial(jax.jit, static_argnames=("layer", "block"))
def _call(
    q_NQ: jax.Array,
    q_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    first_page_R: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    *,
    layer: AttentionLayer,
    block: int,
) -> jax.Array:
    pages = operands(pages)
    num_rows, table_size = table_RM.shape
    head_dim, num_queries = layer.head_dim, block * layer.group
    out = jax.ShapeDtypeStruct((num_rows * block, layer.num_heads * head_dim), layer.dtype)

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda r, *_: (r, 0))

    out_NQ: jax.Array = pl.pallas_call(
        partial(_extend, layer=layer, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows,),
            in_specs=[
                tokens(out.shape[1]),
                pl.BlockSpec((1, head_dim), lambda r, *_: (0, 0)),
                *[tokens(head_dim // 2)] * 2,
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            ],
            out_specs=tokens(out.shape[1]),
            scratch_shapes=[
                scratch(pages, table_size),
                RunningSoftmax.scratch(layer.num_kv_heads, num_queries, head_dim),
                pltpu.VMEM((layer.num_kv_heads, num_queries, head_dim), out.dtype),
            ],
        ),
        out_shape=out,
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=bytes_read(pages, num_rows, table_size)
            + out.size * (4 + jnp.dtype(out.dtype).itemsize)
            + sum(x.nbytes for x in rope),
            transcendentals=0,
        ),
        compiler_params=COMPILER_PARAMS,
        name=f"extend_attention_{block}_{layer.name}",
    )(
        *scalars(table_RM, first_page_R, start_R, num_valid_R, pages[0].shape[1]),
        q_NQ,
        q_norm_E[None],
        *rope,
        *pages,
    )
    return out_NQ


def _extend(
    table_ref: Any,
    about_ref: Any,
    first_row_ref: Any,
    q_in_ref: Any,
    norm_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    *refs: Any,
    layer: AttentionLayer,
    block: int,
) -> None:
    """Compute one block."""
    *page_refs, out_ref, reader_refs, softmax_refs, q_ref = refs
    reader = PageReader((table_ref, about_ref, first_row_ref), (*page_refs,), reader_refs)
    softmax = RunningSoftmax(reader, softmax_refs, block=block, window=layer.window)
    head_dim = layer.head_dim
    pl.when(reader.row == 0)(reader.begin)

    @pl.when(reader.num_pages == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(reader.num_pages > 0)
    def _() -> None:
        softmax.begin()
        places = [
            (head // layer.group, slice(first := head % layer.group * block, first + block))
            for head in range(layer.num_heads)
        ]
        for head, place in enumerate(places):
            x_TE = q_in_ref[:, head * head_dim : (head + 1) * head_dim]
            x_TE = prepare(x_TE, norm_ref[...], cos_ref[...], sin_ref[...], layer.eps)
            q_ref[place] = (x_TE * layer.scale).astype(q_ref.dtype)
        reader.each_chunk(
            lambda chunk, slot: softmax.add(
                [q_ref[head] for head in range(layer.num_kv_heads)], chunk, slot
            )
        )
        for kv_head in range(layer.num_kv_heads):
            softmax.finish(kv_head)
        for head, place in enumerate(places):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            out_ref[:, columns] = softmax.acc[place].astype(out_ref.dtype)

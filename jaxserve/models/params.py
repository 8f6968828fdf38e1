"""The weights of a decoder as one pytree.

Axis letters: D model, H query heads, K kv heads, E head dim, F ffn, V vocab, L layers, P per-layer
width, O a linear's output. Weights keep the checkpoint's [out, in] order, as left operands of their
product (docs/decisions/0009). What shares an input is one matrix; small vectors of all layers are
one float32 array each: a step's dispatch pays for every leaf.
"""

from dataclasses import dataclass

import jax

from jaxserve.kernels.int4_matrix import Int4Matrix
from jaxserve.models.int4_table import Int4Table
from jaxserve.models.int8_table import Int8Table

Matrix = jax.Array | Int4Matrix
"""A linear's weight [O, I], in the compute dtype or int4."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """The matrices of one layer.

    Attributes:
        qkv_OD: [(H + k·K + v·K)·E, D]: query rows, then key rows where the layer owns a cache, then
            value rows where it has a v_proj.
        o_DQ: [D, H·E].
        gate_up_OD: [2·F, D]: gate rows, then up rows.
        down_DF: [D, F].
        ple_gate_PD: [P, D], or None where the model has no per-layer inputs.
        ple_proj_DP: [D, P], or None.
    """

    qkv_OD: Matrix
    o_DQ: Matrix
    gate_up_OD: Matrix
    down_DF: Matrix
    ple_gate_PD: Matrix | None
    ple_proj_DP: Matrix | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """All weights.

    Attributes:
        embed_VD: embedding and head (tied), compute dtype or int8.
        norms_LND: float32 [L, 5, D]: input, post-attention, pre-feedforward, post-feedforward,
            post-per-layer-input (ones where the model has none), as plain factors (a family's 1 + w
            is already added).
        head_norms_L2E: float32 [L, 2, max E]: query norm and key norm, zeros behind E and where the
            layer has no keys.
        layer_scalar_L: float32 [L]; ones where the model has none.
        final_norm_D: float32 [D].
        ple_embed: [ple vocab, L·P] compute dtype or int4, layer-major columns, or None.
        ple_model_proj: [L·P, D], or None.
        ple_norm_P: float32 [P], or None.
    """

    embed_VD: jax.Array | Int8Table
    norms_LND: jax.Array
    head_norms_L2E: jax.Array
    layer_scalar_L: jax.Array
    final_norm_D: jax.Array
    ple_embed: jax.Array | Int4Table | None
    ple_model_proj: Matrix | None
    ple_norm_P: jax.Array | None
    layers: tuple[LayerParams, ...]

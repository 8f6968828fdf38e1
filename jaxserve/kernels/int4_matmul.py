"""Products with int4 weights that stay packed in device memory: by kernels on a TPU, else in JAX.

On a TPU an operation of its own takes a microsecond however little it does, a fifth of a product's
time in decode. So what surrounds a product in a layer is done by its kernel: the norm of its input,
the gate of an MLP, or the norm of its output and the sum with the residual stream. Operands are
bfloat16, sums float32. The references are the kernels' oracles and the path of other devices. N
rows, O outputs, I inputs, F outputs of a gate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.int4_kernels import (
    added_kernel,
    gate,
    gated_kernel,
    matmul_kernel,
    normed_kernel,
    rms_norm,
)
from jaxserve.kernels.int4_matrix import Int4Matrix, unpack


def int4_matmul(weight: Int4Matrix, x_NI: jax.Array) -> jax.Array:
    """Return x·Wᵀ as float32 [N, O]."""
    return _on_tpu(matmul_kernel, _matmul, weight, x_NI)


def int4_normed_matmul(
    weight: Int4Matrix, x_NI: jax.Array, norm_I: jax.Array, eps: float
) -> jax.Array:
    """Return norm(x)·Wᵀ as float32 [N, O]."""
    kernel, reference = partial(normed_kernel, eps=eps), partial(_normed, eps=eps)
    return _on_tpu(kernel, reference, weight, x_NI, norm_I)


def int4_gated_matmul(
    weight: Int4Matrix, x_NI: jax.Array, norm_I: jax.Array, eps: float
) -> jax.Array:
    """Return gelu(gate)·up as bfloat16 [N, F], for the weight's rows: F of gate, F of up."""
    kernel, reference = partial(gated_kernel, eps=eps), partial(_gated, eps=eps)
    return _on_tpu(kernel, reference, weight, x_NI, norm_I)


def int4_added_matmul(
    weight: Int4Matrix, x_NI: jax.Array, stream_NO: jax.Array, norm_O: jax.Array, eps: float
) -> jax.Array:
    """Return stream + norm(x·Wᵀ), float32 [N, O]."""
    kernel, reference = partial(added_kernel, eps=eps), partial(_added, eps=eps)
    return _on_tpu(kernel, reference, weight, x_NI, stream_NO, norm_O)


def _on_tpu(
    kernel: Callable[..., jax.Array], reference: Callable[..., jax.Array], *operands: Any
) -> jax.Array:
    """Run the kernel on a TPU, elsewhere the reference."""
    result: jax.Array = lax.platform_dependent(*operands, tpu=kernel, default=reference)
    return result


def _matmul(weight: Int4Matrix, x_NI: jax.Array) -> jax.Array:
    x_NI = x_NI.astype(jnp.bfloat16)
    return jnp.dot(x_NI, unpack(weight), preferred_element_type=jnp.float32)


def _normed(weight: Int4Matrix, x_NI: jax.Array, norm_I: jax.Array, *, eps: float) -> jax.Array:
    return _matmul(weight, rms_norm(x_NI, norm_I, x_NI.shape[1], eps))


def _gated(weight: Int4Matrix, x_NI: jax.Array, norm_I: jax.Array, *, eps: float) -> jax.Array:
    gate_NF, up_NF = jnp.split(_normed(weight, x_NI, norm_I, eps=eps), 2, axis=1)
    return gate(gate_NF, up_NF)


def _added(
    weight: Int4Matrix, x_NI: jax.Array, stream_NO: jax.Array, norm_O: jax.Array, *, eps: float
) -> jax.Array:
    y_NO = _matmul(weight, x_NI)
    return stream_NO + rms_norm(y_NO, norm_O, y_NO.shape[1], eps)

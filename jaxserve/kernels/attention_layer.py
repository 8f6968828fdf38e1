"""What attention kernels share besides how they read pages: a layer's parameters, norm and turn.

N rows, E head dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.kernels.constants import MAX_LEVEL
from jaxserve.kernels.int4_kernels import rms_norm

COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("arbitrary",),
    vmem_limit_bytes=96 << 20,
    # Page numbers are the scheduler's own, and a check is half the work of starting a transfer.
    disable_bounds_checks=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What a layer's attention is, besides its arrays.

    Attributes:
        scale: multiplies queries.
        window: keys that a query sees, its own included; None: all.
        has_v: whether values are projected; else they are the keys as projected.
        norms_v: whether values are RMS-normed.
        dtype: of the operands of products.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    window: int | None
    has_v: bool
    norms_v: bool
    dtype: DTypeLike

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def name(self) -> str:
        """What a kernel's name tells of it, for scripts/tpu_kernels.py."""
        flags = "".join("ft"[flag] for flag in (self.has_v, self.norms_v))
        return f"{self.num_heads}_{self.num_kv_heads}_{self.window or 0}_{flags}"


def prepare(
    x_NE: jax.Array, norm_1E: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> jax.Array:
    """Norm a head's rows and turn them, channel c with c + E/2."""
    head_dim = x_NE.shape[1]
    x_NE = rms_norm(x_NE, norm_1E, head_dim, eps)
    first, second = x_NE[:, : head_dim // 2], x_NE[:, head_dim // 2 :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def to_levels(x_NE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round a head's rows to levels, int32, and return their scales [N, 1]; as models/kv_cache."""
    largest_N1 = jnp.abs(x_NE).max(axis=-1, keepdims=True)
    per_unit_N1 = jnp.where(largest_N1 > 0, MAX_LEVEL / largest_N1, 0.0)
    return jnp.round(x_NE * per_unit_N1).astype(jnp.int32), largest_N1 / MAX_LEVEL

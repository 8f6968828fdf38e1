"""The largest of many values on the device, without sorting them all.

N rows, V values, C wanted, G groups of J values.
"""

import jax
import jax.numpy as jnp
from jax import lax

MAX_SORTED = 2048
"""Values that are sorted: a TPU's compiler takes minutes for sorts of eight times as many."""

GROUP, SMALL_GROUP = 64, 8
MAX_OF_SMALL_GROUPS = 1 << 15


def groups(x_NV: jax.Array, size: int, fill: float) -> jax.Array:
    """Lay values out as [N, ⌈V/size⌉, size]."""
    padded = jnp.pad(x_NV, ((0, 0), (0, -x_NV.shape[1] % size)), constant_values=fill)
    return padded.reshape(x_NV.shape[0], -1, size)


def largest(x_NV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the C largest of each row, descending, and where they are, int32; C of V at most.

    They lie in the C groups with the largest maxima, which are looked for in the same way.
    """
    num_values = x_NV.shape[1]
    size = SMALL_GROUP if num_values <= MAX_OF_SMALL_GROUPS else GROUP
    if num_values <= max(MAX_SORTED, size * count):
        return lax.top_k(x_NV, count)
    x_NGJ = groups(x_NV, size, -jnp.inf)
    _, group_NC = largest(x_NGJ.max(axis=-1), count)
    members_NCJ = jnp.take_along_axis(x_NGJ, group_NC[:, :, None], axis=1)
    top_NC, member_NC = largest(members_NCJ.reshape(x_NV.shape[0], -1), count)
    first_NC = jnp.take_along_axis(group_NC, member_NC // size, axis=1) * size
    return top_NC, (first_NC + member_NC % size).astype(jnp.int32)

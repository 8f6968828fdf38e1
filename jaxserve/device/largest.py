"""The largest of many values on the device, without sorting them all.

N rows, V values, C wanted, J values of a group.
"""

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 64
"""The C largest lie in the C groups of this size with the largest maxima."""


def groups(x_NV: jax.Array, size: int, fill: float) -> jax.Array:
    """Lay values out as [N, ⌈V/size⌉, size]."""
    padded = jnp.pad(x_NV, ((0, 0), (0, -x_NV.shape[1] % size)), constant_values=fill)
    return padded.reshape(x_NV.shape[0], -1, size)


def largest(x_NV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the C largest of each row, descending, and where they are, int32; C of V at most."""
    x_NGJ = groups(x_NV, GROUP, -jnp.inf)
    if x_NGJ.shape[1] <= count:
        return lax.top_k(x_NV, count)
    _, group_NC = lax.top_k(x_NGJ.max(axis=-1), count)
    members_NCJ = jnp.take_along_axis(x_NGJ, group_NC[:, :, None], axis=1)
    top_NC, member_NC = lax.top_k(members_NCJ.reshape(x_NV.shape[0], -1), count)
    first_NC = jnp.take_along_axis(group_NC, member_NC // GROUP, axis=1) * GROUP
    return top_NC, (first_NC + member_NC % GROUP).astype(jnp.int32)

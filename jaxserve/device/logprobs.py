"""Log-probabilities of tokens, by the model's own logits: before bias, penalties and temperature.

A step's results are one int32 array, floats as their bits, so that the host fetches one: for each
row the sampled id, its log-probability and rank, and the T most likely ids with theirs. N rows,
V vocab.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.types import MAX_LOGPROBS, TokenLogprobs

ID, LOGPROB, RANK, TOP = 0, 1, 2, 3
"""Columns of a result; the top ids begin at TOP, their log-probabilities behind them."""
RESULT_SIZE = TOP + 2 * MAX_LOGPROBS

FLOOR = -9999.0
"""The least log-probability that is told: JSON has no infinity."""

_GROUP = 64  # the T most likely tokens lie in the T groups of this size with the largest maxima


def results(logits_VN: jax.Array, ids_N: jax.Array, wants_N: jax.Array) -> jax.Array:
    """Return int32 results [N, RESULT_SIZE]; only the ids where nobody wants more."""

    def scored() -> jax.Array:
        return score(logits_VN, ids_N)

    def ids_alone() -> jax.Array:
        return jnp.pad(ids_N[:, None], ((0, 0), (0, RESULT_SIZE - 1)))

    result_NC: jax.Array = lax.cond(jnp.any(wants_N), scored, ids_alone)
    return result_NC


def score(logits_VN: jax.Array, ids_N: jax.Array) -> jax.Array:
    """Return int32 results [N, RESULT_SIZE] for given ids."""
    peak_N = logits_VN.max(axis=0)  # subtracted first: large logits would swallow the sum's log
    log_sum_N = jnp.log(jnp.exp(logits_VN - peak_N).sum(axis=0))
    chosen_N = jnp.take_along_axis(logits_VN, ids_N[None], axis=0)[0]
    rank_N = (logits_VN > chosen_N).sum(axis=0, dtype=jnp.int32) + 1
    top_NT, top_ids_NT = _largest(logits_VN.T, min(MAX_LOGPROBS, logits_VN.shape[0]))
    padding = ((0, 0), (0, MAX_LOGPROBS - top_NT.shape[1]))
    return jnp.concatenate(
        [
            ids_N[:, None],
            _bits(chosen_N - peak_N - log_sum_N)[:, None],
            rank_N[:, None],
            jnp.pad(top_ids_NT, padding, constant_values=-1),
            jnp.pad(_bits(top_NT - peak_N[:, None] - log_sum_N[:, None]), padding),
        ],
        axis=1,
    )


def read_result(result_C: npt.NDArray[np.int32]) -> TokenLogprobs:
    """Read one row on the host, with all of its most likely tokens."""
    floats_C = result_C.view(np.float32)
    top_ids = result_C[TOP : TOP + MAX_LOGPROBS]
    count = int((top_ids >= 0).sum())
    return TokenLogprobs(
        token_id=int(result_C[ID]),
        logprob=float(floats_C[LOGPROB]),
        rank=int(result_C[RANK]),
        top_ids=tuple(top_ids[:count].tolist()),
        top_logprobs=tuple(floats_C[TOP + MAX_LOGPROBS :][:count].tolist()),
    )


def _bits(logprob: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.maximum(logprob, FLOOR), jnp.int32)


def _largest(logits_NV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the largest of each row, descending, and their ids; sorts only groups with them."""
    padded = jnp.pad(
        logits_NV, ((0, 0), (0, -logits_NV.shape[1] % _GROUP)), constant_values=-jnp.inf
    )
    logits_NGJ = padded.reshape(logits_NV.shape[0], -1, _GROUP)
    if logits_NGJ.shape[1] <= count:
        return lax.top_k(logits_NV, count)
    _, group_NT = lax.top_k(logits_NGJ.max(axis=-1), count)
    members_NTJ = jnp.take_along_axis(logits_NGJ, group_NT[:, :, None], axis=1)
    top_NT, member_NT = lax.top_k(members_NTJ.reshape(logits_NV.shape[0], -1), count)
    ids_NT = (
        jnp.take_along_axis(group_NT, member_NT // _GROUP, axis=1) * _GROUP + member_NT % _GROUP
    )
    return top_NT, ids_NT.astype(jnp.int32)

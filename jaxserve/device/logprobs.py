"""Log-probabilities of tokens, by the model's own logits: before bias, penalties and temperature.

A step's results are one int32 array, floats as their bits, so that the host fetches one: for each
row the sampled id, its log-probability and rank, and the T most likely ids with theirs. N rows,
V vocab.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.device.largest import largest
from jaxserve.types import MAX_LOGPROBS, TokenLogprobs

ID, LOGPROB, RANK, TOP = 0, 1, 2, 3
"""Columns of a result; the top ids begin at TOP, their log-probabilities behind them."""
RESULT_SIZE = TOP + 2 * MAX_LOGPROBS

FLOOR = -9999.0
"""The least log-probability that is told: JSON has no infinity."""


def results(logits_VN: jax.Array, ids_N: jax.Array, wants_N: jax.Array) -> jax.Array:
    """Return int32 results [N, RESULT_SIZE]; only the ids where nobody wants more."""

    def choose(scored: Callable[[], jax.Array]) -> jax.Array:
        padding = ((0, 0), (0, RESULT_SIZE - 1))
        result_NC: jax.Array = lax.cond(
            jnp.any(wants_N), scored, lambda: jnp.pad(ids_N[:, None], padding)
        )
        return result_NC

    def choose_of_rows() -> jax.Array:
        logits_NV = logits_VN.T  # outside of the condition: device/sampling.py says why
        return choose(lambda: _score(logits_NV, ids_N, vocab_axis=1))

    result_NC: jax.Array = lax.platform_dependent(
        cpu=lambda: choose(lambda: _score(logits_VN, ids_N, vocab_axis=0)), default=choose_of_rows
    )
    return result_NC


def score(logits_VN: jax.Array, ids_N: jax.Array) -> jax.Array:
    """Return int32 results [N, RESULT_SIZE] for given ids."""
    result_NC: jax.Array = lax.platform_dependent(
        cpu=lambda: _score(logits_VN, ids_N, vocab_axis=0),
        default=lambda: _score(logits_VN.T, ids_N, vocab_axis=1),
    )
    return result_NC


def _score(logits: jax.Array, ids_N: jax.Array, *, vocab_axis: int) -> jax.Array:
    """Do so for logits of either order of axes."""

    def spread(x_N: jax.Array) -> jax.Array:
        return jnp.expand_dims(x_N, vocab_axis)

    peak_N = logits.max(
        axis=vocab_axis
    )  # subtracted first: large logits would swallow the sum's log
    log_sum_N = jnp.log(jnp.exp(logits - spread(peak_N)).sum(axis=vocab_axis))
    chosen_N = jnp.take_along_axis(logits, spread(ids_N), axis=vocab_axis).reshape(-1)
    rank_N = (logits > spread(chosen_N)).sum(axis=vocab_axis, dtype=jnp.int32) + 1
    logits_NV = logits if vocab_axis == 1 else logits.T
    top_NT, top_ids_NT = largest(logits_NV, min(MAX_LOGPROBS, logits_NV.shape[1]))
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

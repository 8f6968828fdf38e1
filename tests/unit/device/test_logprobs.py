"""Log-probabilities on the device against a plain float64 log-softmax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.device.logprobs import FLOOR, ID, RESULT_SIZE, read_result, results, score
from jaxserve.types import MAX_LOGPROBS, TokenLogprobs

Logits = npt.NDArray[np.float32]

NUM_ROWS = 4
# Fewer ids than are told, groups fewer and more than them, the last one full, short, and of one id.
VOCABS = [7, MAX_LOGPROBS, 1000, 20 * 64, 21 * 64, 21 * 64 + 1, 4099]

_score = jax.jit(score)
_results = jax.jit(results)


def told(logits_NV: Logits, ids: list[int]) -> list[TokenLogprobs]:
    result_NC = np.asarray(_score(jnp.asarray(logits_NV.T), jnp.asarray(ids, jnp.int32)))
    assert result_NC.shape == (len(ids), RESULT_SIZE)
    return [read_result(result_C) for result_C in result_NC]


def log_softmax(logits_V: Logits) -> npt.NDArray[np.float64]:
    z_V = logits_V.astype(np.float64)
    shifted_V: npt.NDArray[np.float64] = z_V - z_V.max()
    shifted_V -= np.log(np.exp(shifted_V).sum())
    return shifted_V


def check(logprobs: TokenLogprobs, logits_V: Logits, token_id: int) -> None:
    """Compare all that is told of one token; of equal logits any order will do."""
    expected_V = np.maximum(log_softmax(logits_V), FLOOR)
    count = min(MAX_LOGPROBS, len(logits_V))
    assert logprobs.token_id == token_id
    assert logprobs.logprob == pytest.approx(expected_V[token_id], rel=1e-5, abs=2e-5)
    assert logprobs.rank == 1 + (logits_V > logits_V[token_id]).sum()
    assert len(logprobs.top_ids) == len(set(logprobs.top_ids)) == count
    assert len(logprobs.top_logprobs) == count
    np.testing.assert_array_equal(logits_V[list(logprobs.top_ids)], np.sort(logits_V)[::-1][:count])
    np.testing.assert_allclose(
        logprobs.top_logprobs, expected_V[list(logprobs.top_ids)], rtol=1e-5, atol=2e-5
    )
    assert all(math.isfinite(value) for value in (logprobs.logprob, *logprobs.top_logprobs))


def random_logits(vocab_size: int, seed: int = 0, scale: float = 3.0) -> Logits:
    rng = np.random.default_rng([vocab_size, seed])
    return (scale * rng.standard_normal((NUM_ROWS, vocab_size))).astype(np.float32)


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("scale", [1e-3, 3.0, 30.0])
def test_value_rank_and_the_most_likely(vocab_size: int, scale: float) -> None:
    logits_NV = random_logits(vocab_size, scale=scale)
    ordered_NV = logits_NV.argsort(axis=1)
    # The first and last of the vocabulary, and the most and least likely ones.
    for ids in (
        [0, vocab_size - 1, vocab_size // 2, 1],
        ordered_NV[:, -1].tolist(),
        ordered_NV[:, 0].tolist(),
        ordered_NV[:, -7].tolist(),
    ):
        for logprobs, logits_V, token_id in zip(told(logits_NV, ids), logits_NV, ids, strict=True):
            check(logprobs, logits_V, token_id)
            np.testing.assert_array_equal(logprobs.top_ids, logits_V.argsort()[::-1][:MAX_LOGPROBS])


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("num_values", [1, 2, 9])
def test_equal_logits_share_a_rank_and_are_told_once_each(vocab_size: int, num_values: int) -> None:
    rng = np.random.default_rng([vocab_size, num_values])
    logits_NV = rng.integers(0, num_values, (NUM_ROWS, vocab_size)).astype(np.float32)
    ids = rng.integers(0, vocab_size, NUM_ROWS).tolist()

    for logprobs, logits_V, token_id in zip(told(logits_NV, ids), logits_NV, ids, strict=True):
        check(logprobs, logits_V, token_id)
        # The one that greedy sampling takes comes first.
        assert logprobs.top_ids[0] == logits_V.argmax()


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_all_of_the_most_likely_in_one_group_or_each_in_its_own(vocab_size: int) -> None:
    logits_NV = random_logits(vocab_size)
    logits_NV[0, -MAX_LOGPROBS:] += 100.0
    logits_NV[1, :MAX_LOGPROBS] += 100.0
    logits_NV[2, ::64] += 100.0
    logits_NV[3, 63::64] += 100.0

    for logprobs, logits_V in zip(told(logits_NV, [0] * NUM_ROWS), logits_NV, strict=True):
        check(logprobs, logits_V, 0)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_all_is_finite_however_far_apart(vocab_size: int) -> None:
    logits_NV = np.zeros((NUM_ROWS, vocab_size), np.float32)
    logits_NV[0, 1:] = -1e4
    logits_NV[1, 1:] = -1e30
    logits_NV[2] = 1e4
    logits_NV[3, 1] = 3e38

    for logprobs, logits_V in zip(told(logits_NV, [1] * NUM_ROWS), logits_NV, strict=True):
        check(logprobs, logits_V, 1)
    assert [one.logprob for one in told(logits_NV, [1] * NUM_ROWS)[:2]] == [FLOOR, FLOOR]
    assert told(logits_NV, [1] * NUM_ROWS)[3].logprob == 0.0


def test_a_large_vocabulary_sums_to_1() -> None:
    # As many as a Gemma has, and as flat as logits come: where a float32 sum would lose most.
    logits_NV = random_logits(262_144, scale=0.5)

    for logprobs, logits_V in zip(told(logits_NV, [5] * NUM_ROWS), logits_NV, strict=True):
        check(logprobs, logits_V, 5)


@pytest.mark.parametrize("wanting_row", [None, 0, NUM_ROWS - 1])
def test_only_ids_are_told_where_nobody_wants_more(wanting_row: int | None) -> None:
    logits_NV, ids = random_logits(1000), [3, 1, 4, 999]
    wants_N = np.zeros(NUM_ROWS, bool)
    if wanting_row is not None:
        wants_N[wanting_row] = True

    result_NC = np.asarray(
        _results(jnp.asarray(logits_NV.T), jnp.asarray(ids, jnp.int32), jnp.asarray(wants_N))
    )

    assert result_NC.shape == (NUM_ROWS, RESULT_SIZE)
    assert result_NC[:, ID].tolist() == ids
    if wanting_row is None:
        assert not result_NC[:, ID + 1 :].any()
    else:
        check(read_result(result_NC[wanting_row]), logits_NV[wanting_row], ids[wanting_row])


def test_cut_keeps_the_first_of_the_most_likely() -> None:
    [logprobs] = told(random_logits(1000)[:1], [6])

    assert logprobs.cut(MAX_LOGPROBS) == logprobs
    assert logprobs.cut(0) == logprobs._replace(top_ids=(), top_logprobs=())
    assert logprobs.cut(3).top_ids == logprobs.top_ids[:3]
    assert logprobs.cut(3).top_logprobs == logprobs.top_logprobs[:3]

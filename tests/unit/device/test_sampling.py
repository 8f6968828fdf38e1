"""Sampling on the device against plain float64: which tokens may come, and how often."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.device.arena import mask_words
from jaxserve.device.sampling import NUM_CANDIDATES, SamplingRows, sample

Logits = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]

# Every size is a program to compile, so there are three. The small one is less than the candidates;
# the large one has them looked for by group, and no group's size divides it.
SMALL_VOCAB, VOCAB, LARGE_VOCAB = 100, 1024, 16_411
NUM_ROWS = 1024


@jax.jit
def draw(logits_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    none_B = jnp.zeros(logits_BV.shape[0], bool)
    mask_BW = jnp.full((len(logits_BV), mask_words(logits_BV.shape[1])), 0xFFFFFFFF, jnp.uint32)
    return sample(logits_BV.T, rows, none_B, lambda logits_BV: logits_BV, none_B, mask_BW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def reference(logits_V: Logits, filters: Filters, *, top_p: float | None = None) -> Probabilities:
    """Each token's probability: temperature, then min-p, then top-k, then top-p of what is left."""
    z_V = logits_V.astype(np.float64)
    weight_V: Probabilities = np.exp((z_V - z_V.max()) / filters.temperature)
    weight_V[weight_V < filters.min_p] = 0
    if 0 < filters.top_k < len(weight_V):
        weight_V[weight_V < np.sort(weight_V)[-filters.top_k]] = 0
    wanted = (filters.top_p if top_p is None else top_p) * weight_V.sum()
    if filters.top_p < 1:
        descending = np.sort(weight_V)[::-1]
        last = min(int((descending.cumsum() < wanted).sum()), len(descending) - 1)
        weight_V[weight_V < descending[last]] = 0
    weight_V /= weight_V.sum()
    return weight_V


def rows_of(
    filters: list[Filters], seeds: npt.NDArray[np.uint64], position: int = 5
) -> SamplingRows:
    return SamplingRows(
        temperature=jnp.array([f.temperature for f in filters], jnp.float32),
        top_k=jnp.array([f.top_k for f in filters], jnp.int32),
        top_p=jnp.array([f.top_p for f in filters], jnp.float32),
        min_p=jnp.array([f.min_p for f in filters], jnp.float32),
        seed=jnp.array(seeds.astype("<u8").view("<u4").reshape(-1, 2)),
        position=jnp.full(len(filters), position, jnp.int32),
    )


def draw_many(logits_V: Logits, filters: Filters, count: int) -> npt.NDArray[np.int32]:
    """Draw once with each of `count` seeds."""
    seeds = np.random.default_rng(11).integers(0, 2**64, count, np.uint64)
    logits_BV = jnp.broadcast_to(jnp.array(logits_V), (NUM_ROWS, len(logits_V)))
    parts = seeds.reshape(-1, NUM_ROWS)
    ids = [np.asarray(draw(logits_BV, rows_of([filters] * NUM_ROWS, part))) for part in parts]
    return np.concatenate(ids)


def random_logits(vocab_size: int, scale: float, seed: int = 1) -> Logits:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(vocab_size)).astype(np.float32)


def flat_logits(vocab_size: int) -> Logits:
    """Nearly equal, no two the same, in no order."""
    rng = np.random.default_rng(2)
    return np.linspace(0, 0.5, vocab_size, dtype=np.float32)[rng.permutation(vocab_size)]


def peaked_logits(vocab_size: int) -> Logits:
    """One token of about 97 %, the last of the vocabulary, and the others' noise."""
    logits_V = random_logits(vocab_size, 1.0)
    logits_V[-1] = 4.0 + float(np.log(vocab_size * 1.65 / 2))
    return logits_V


# Each case's every kept token is likely enough to turn up among the draws.
CASES = [
    pytest.param(random_logits(VOCAB, 3.0), Filters(top_k=1), 1024, id="top-k-of-1"),
    pytest.param(random_logits(VOCAB, 3.0), Filters(temperature=9.0, top_k=40), 4096, id="top-k"),
    pytest.param(flat_logits(VOCAB), Filters(top_k=NUM_CANDIDATES), 8192, id="top-k-256"),
    pytest.param(flat_logits(VOCAB), Filters(top_k=300), 8192, id="top-k-beyond-candidates"),
    pytest.param(flat_logits(SMALL_VOCAB), Filters(top_k=99), 8192, id="top-k-of-small-vocab"),
    pytest.param(random_logits(VOCAB, 3.0), Filters(top_p=0.7), 4096, id="top-p"),
    pytest.param(peaked_logits(VOCAB), Filters(top_p=0.95), 1024, id="top-p-of-one-token"),
    pytest.param(flat_logits(VOCAB), Filters(top_p=0.4), 16384, id="top-p-beyond-candidates"),
    pytest.param(flat_logits(VOCAB), Filters(top_p=0.999), 32768, id="top-p-of-nearly-all"),
    pytest.param(random_logits(VOCAB, 2.0), Filters(min_p=0.1), 8192, id="min-p"),
    pytest.param(flat_logits(VOCAB), Filters(min_p=0.9), 8192, id="min-p-of-flat"),
    pytest.param(peaked_logits(VOCAB), Filters(min_p=1.0), 1024, id="min-p-of-1"),
    pytest.param(
        random_logits(VOCAB, 2.0),
        Filters(temperature=1.3, top_k=50, top_p=0.8, min_p=0.02),
        8192,
        id="all",
    ),
    pytest.param(
        flat_logits(VOCAB), Filters(top_k=500, top_p=0.9), 16384, id="both-beyond-candidates"
    ),
    pytest.param(
        random_logits(VOCAB, 3.0), Filters(temperature=4.0, top_k=30, top_p=0.5), 4096, id="k-and-p"
    ),
    pytest.param(
        flat_logits(VOCAB),
        Filters(temperature=0.25, top_p=0.6, min_p=0.5),
        16384,
        id="p-and-min-p",
    ),
    pytest.param(
        random_logits(LARGE_VOCAB, 4.0), Filters(temperature=6.0, top_k=50), 2048, id="large-top-k"
    ),
    pytest.param(random_logits(LARGE_VOCAB, 5.0), Filters(top_p=0.5), 2048, id="large-top-p"),
    pytest.param(
        random_logits(LARGE_VOCAB, 4.0),
        Filters(temperature=99.0, top_k=260),
        4096,
        id="large-top-k-beyond-candidates",
    ),
]


@pytest.mark.parametrize(("logits_V", "filters", "count"), CASES)
def test_exactly_the_filtered_tokens_come(logits_V: Logits, filters: Filters, count: int) -> None:
    # A nucleus' edge may move by a token where float32 sums round otherwise than float64.
    most_V, least_V = (
        reference(logits_V, filters, top_p=filters.top_p + shift) for shift in (1e-5, -1e-5)
    )
    drawn = set(draw_many(logits_V, filters, count).tolist())
    likely = set(np.flatnonzero((least_V > 0) & (most_V * count > 12)).tolist())

    assert likely == set(np.flatnonzero(least_V).tolist()), "too few draws to see every token"
    assert drawn <= set(np.flatnonzero(most_V).tolist())
    assert likely <= drawn


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits_V = np.zeros(SMALL_VOCAB, np.float32)
    logits_V[:4] = (3.0, 2.0, 2.0, 2.0)

    assert set(draw_many(logits_V, Filters(top_k=2), 1024).tolist()) == {0, 1, 2, 3}
    assert set(draw_many(logits_V, Filters(top_k=5), 2048).tolist()) == set(range(SMALL_VOCAB))


@pytest.mark.parametrize("filters", [Filters(top_k=50), Filters(top_k=50, top_p=0.5)], ids=str)
def test_ties_beyond_the_candidates_are_kept(filters: Filters) -> None:
    logits_V = np.full(VOCAB, -1e4, np.float32)
    logits_V[:10], logits_V[10:610] = 3.0, 2.0

    assert set(draw_many(logits_V, filters, 16384).tolist()) == set(range(610))


def test_min_p_is_relative_to_the_most_likely_token_at_the_temperature() -> None:
    logits_V = np.full(SMALL_VOCAB, -9.0, np.float32)
    logits_V[:3] = (0.0, -1.0, -3.0)

    # exp(-1/2) = 0.61 and exp(-3/2) = 0.22; without the temperature they were 0.37 and 0.05.
    assert set(draw_many(logits_V, Filters(temperature=2.0, min_p=0.5), 1024).tolist()) == {0, 1}


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    logits_V = np.full(SMALL_VOCAB, -1e4, np.float32)
    logits_V[:4] = np.log((0.4, 0.3, 0.2, 0.1))

    # Of the two kept, the first has 0.57: enough for 0.55, though of all four it has 0.4.
    assert set(draw_many(logits_V, Filters(top_k=2, top_p=0.55), 1024).tolist()) == {0}


def assert_frequencies(ids: npt.NDArray[np.int32], expected_V: Probabilities) -> None:
    """Pearson's test at five standard deviations; rare tokens share a bin."""
    counts_V = np.bincount(ids, minlength=len(expected_V)).astype(np.float64)
    is_rare_V = expected_V * len(ids) < 5
    counts = np.append(counts_V[~is_rare_V], counts_V[is_rare_V].sum())
    expected = np.append(expected_V[~is_rare_V], expected_V[is_rare_V].sum()) * len(ids)
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert degrees > 3
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    ("logits_V", "filters"),
    [
        pytest.param(random_logits(VOCAB, 2.0), Filters(), id="plain"),
        pytest.param(flat_logits(VOCAB), Filters(), id="flat"),
        pytest.param(random_logits(VOCAB, 2.0), Filters(temperature=0.6), id="cold"),
        pytest.param(random_logits(VOCAB, 2.0), Filters(temperature=1.7), id="hot"),
        pytest.param(random_logits(VOCAB, 2.0), Filters(top_k=50, top_p=0.9), id="filtered"),
        pytest.param(
            random_logits(VOCAB, 2.0), Filters(temperature=1.5, min_p=0.05), id="hot-min-p"
        ),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(logits_V: Logits, filters: Filters) -> None:
    assert_frequencies(draw_many(logits_V, filters, 32768), reference(logits_V, filters))


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits_V, count = random_logits(SMALL_VOCAB, 2.0), 16 * NUM_ROWS
    logits_BV = jnp.broadcast_to(jnp.array(logits_V), (NUM_ROWS, SMALL_VOCAB))
    rows = rows_of([Filters()] * NUM_ROWS, np.full(NUM_ROWS, 99, np.uint64))
    ids = np.concatenate(
        [
            np.asarray(draw(logits_BV, replace(rows, position=jnp.arange(i, i + NUM_ROWS))))
            for i in range(0, count, NUM_ROWS)
        ]
    )

    expected_V = reference(logits_V, Filters())
    assert_frequencies(ids, expected_V)
    # Neighbours in position are no more alike than chance: Σp² of them are equal.
    chance = (expected_V**2).sum()
    num_equal = (ids[1:] == ids[:-1]).sum()
    assert abs(num_equal - count * chance) < 5 * (count * chance) ** 0.5


def test_both_halves_of_the_seed_count() -> None:
    logits_V = flat_logits(VOCAB)
    seeds = np.array([7, 8, 7 + (1 << 32), 7 + (1 << 63)] * 2, np.uint64)
    rows = rows_of([Filters()] * 8, seeds)
    ids = np.asarray(draw(jnp.broadcast_to(jnp.array(logits_V), (8, VOCAB)), rows))

    assert len(set(ids.tolist())) == 4


# The draws of these seeds at position 7 are the least and the largest float32 of [0, 1).
SEED_OF_LEAST, SEED_OF_LARGEST = 2_324_681, 18_334_281


def test_extreme_draws_hit_no_token_of_weight_0() -> None:
    seeds = np.array([SEED_OF_LEAST, SEED_OF_LARGEST], np.uint64)
    rows = rows_of([Filters()] * 2, seeds, position=7)
    keys = [jax.random.wrap_key_data(seed, impl="threefry2x32") for seed in rows.seed]
    draws = [float(jax.random.uniform(jax.random.fold_in(key, 7))) for key in keys]
    assert draws == [0.0, 1 - 2.0**-23]

    for likely in ([5], [700, 900], [511, 512], [1023]):
        logits_V = np.full(VOCAB, -1e4, np.float32)
        logits_V[likely] = 0.0
        ids = np.asarray(draw(jnp.array([logits_V, logits_V]), rows))
        assert ids.tolist() == [likely[0], likely[-1]]


def test_tokens_of_weight_0_never_come() -> None:
    logits_V = np.full(1400, -1e4, np.float32)
    likely = [3, 511, 1024, 1027, 1399]
    logits_V[likely] = (0.0, -1.0, -9.0, 0.0, -0.5)

    ids = draw_many(logits_V, Filters(), 32768)

    assert set(ids.tolist()) <= set(likely)


def test_temperature_0_is_the_first_of_the_most_likely() -> None:
    logits_BV = np.stack([random_logits(VOCAB, 3.0, seed) for seed in range(8)])
    logits_BV[3, [50, 400, 1023]] = 100.0
    # Filters and seeds mean nothing to these rows, whether they stand alone or beside drawn ones.
    greedy = [Filters(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)] * 8
    mixed = [*greedy[:6], Filters(top_k=5), Filters(top_p=0.3)]
    seeds = np.arange(8, dtype=np.uint64)

    alone, beside = (np.asarray(draw(logits_BV, rows_of(rows, seeds))) for rows in (greedy, mixed))

    assert alone.tolist() == logits_BV.argmax(-1).tolist()
    assert beside[:6].tolist() == alone[:6].tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45])
def test_a_tiny_temperature_draws_the_most_likely(temperature: float) -> None:
    logits_V = random_logits(VOCAB, 3.0)

    for filters in (Filters(temperature=temperature), Filters(temperature=temperature, top_p=0.9)):
        assert set(draw_many(logits_V, filters, 1024).tolist()) == {int(logits_V.argmax())}


def test_a_huge_temperature_draws_all_alike() -> None:
    logits_V = random_logits(SMALL_VOCAB, 3.0)

    ids = draw_many(logits_V, Filters(temperature=1e30), 8192)

    assert_frequencies(ids, np.full(SMALL_VOCAB, 1 / SMALL_VOCAB))


ROWS = [
    Filters(),
    Filters(temperature=0.0),
    Filters(temperature=0.8, top_k=20),
    Filters(top_p=0.9),
    Filters(top_k=400),  # beyond the candidates
    Filters(temperature=3.0, top_p=0.99),  # beyond them too
    Filters(min_p=0.05),
    Filters(temperature=1.2, top_k=64, top_p=0.95, min_p=0.01),
]


def test_a_row_depends_on_neither_neighbours_nor_place_nor_batch_size() -> None:
    num_rows = len(ROWS)
    seeds = np.arange(100, 100 + num_rows, dtype=np.uint64)
    logits_BV = np.stack([random_logits(VOCAB, 2.0, seed) for seed in range(num_rows)])

    def ids_of(order: list[int]) -> dict[int, int]:
        rows: Any = rows_of([ROWS[i] for i in order], seeds[order])
        return dict(zip(order, np.asarray(draw(logits_BV[order], rows)).tolist(), strict=True))

    alone = {i: ids_of([i])[i] for i in range(num_rows)}
    rng = np.random.default_rng(3)
    for _ in range(4):
        order = rng.permutation(num_rows).tolist()
        assert ids_of(order) == alone
        pair = order[:2]
        assert ids_of(pair) == {i: alone[i] for i in pair}

"""The tables of slots against a plain float64 reading of what the options mean."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.device.adjustments import (
    PIECE_SIZE,
    Adjustments,
    adjust,
    count_tokens,
    counting_pieces,
    make_adjustments,
    padding_piece,
    table_pieces,
    write_piece,
)
from jaxserve.device.arena import mask_words
from jaxserve.device.sampling import sample
from jaxserve.device.state import Column, HostRows, read_adjustments, read_sampling
from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from tests.adjusted import adjusted

# One shape of each program. The vocabulary lets a table take three pieces of 1,024 ids.
VOCAB, NUM_SLOTS, NUM_ROWS = 3000, 6, 8
PLAIN = SamplingParams(max_tokens=99, seed=0, temperature=0.0)
NEVER = -1e29
"""No logit below this is ever chosen beside one above it."""

Logits = npt.NDArray[np.float32]

_write = jax.jit(write_piece)


@jax.jit
def _adjust(logits_BV: jax.Array, tables: Adjustments, staged_BF: jax.Array) -> jax.Array:
    position_B = read_sampling(staged_BF).position
    return adjust(logits_BV, tables, read_adjustments(staged_BF), position_B)


@jax.jit
def _count(tables: Adjustments, staged_BF: jax.Array, ids_B: jax.Array) -> Adjustments:
    return count_tokens(tables, read_adjustments(staged_BF), ids_B)


@jax.jit
def _sample(logits_BV: jax.Array, tables: Adjustments, staged_BF: jax.Array) -> jax.Array:
    rows, sampling = read_adjustments(staged_BF), read_sampling(staged_BF)
    return sample(
        logits_BV.T,
        sampling,
        rows.is_used,
        lambda logits_BV: adjust(logits_BV, tables, rows, sampling.position),
        jnp.zeros_like(rows.is_used),
        jnp.full((len(logits_BV), mask_words(logits_BV.shape[1])), 0xFFFFFFFF, jnp.uint32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequenced:
    """What one slot is asked for, and its ids so far."""

    sampling: SamplingParams
    prompt_ids: tuple[int, ...] = (1,)
    output_ids: tuple[int, ...] = ()

    def reference(self, logits_V: Logits) -> npt.NDArray[np.float64]:
        return adjusted(logits_V, self.sampling, self.prompt_ids, self.output_ids)

    def then(self, token_id: int) -> "Sequenced":
        return replace(self, output_ids=(*self.output_ids, token_id))


class Device:
    """Tables and staged rows as a runner keeps them."""

    def __init__(self) -> None:
        self.tables = make_adjustments(NUM_SLOTS, VOCAB)
        self._host_rows = HostRows(NUM_SLOTS, 1)

    def open(self, slot: int, one: Sequenced) -> None:
        self._host_rows.open(slot, one.sampling, len(one.prompt_ids))
        for piece in table_pieces(slot, one.sampling, one.prompt_ids, one.output_ids):
            assert piece.shape == (PIECE_SIZE,)
            self.tables = _write(self.tables, piece)

    def rows(self, by_slot: dict[int, Sequenced]) -> npt.NDArray[np.int32]:
        staged = self._host_rows.stage(list(by_slot), NUM_ROWS, 1)
        for row, one in zip(staged, by_slot.values(), strict=False):
            row[Column.POSITION] = len(one.prompt_ids) + len(one.output_ids) - 1
        return staged

    def adjusted(self, logits_BV: Logits, by_slot: dict[int, Sequenced]) -> Logits:
        return np.asarray(_adjust(logits_BV, self.tables, self.rows(by_slot)))

    def count(self, by_slot: dict[int, Sequenced], ids: Sequence[int]) -> None:
        padded = np.array([*ids, *[0] * (NUM_ROWS - len(ids))], np.int32)
        self.tables = _count(self.tables, self.rows(by_slot), padded)

    def table_of(self, slot: int) -> list[npt.NDArray[np.generic]]:
        return [np.asarray(array[slot]) for array in jax.tree.leaves(self.tables)]


def random_logits(rng: np.random.Generator) -> Logits:
    return (5 * rng.standard_normal((NUM_ROWS, VOCAB))).astype(np.float32)


def random_ids(rng: np.random.Generator, count: int, below: int = VOCAB) -> tuple[int, ...]:
    return tuple(rng.integers(0, below, count).tolist())


def random_sequence(rng: np.random.Generator) -> Sequenced:
    """Use each option half of the time; ids of few kinds, so that all of them meet."""
    below = int(rng.choice([4, 30, VOCAB]))

    def perhaps() -> bool:
        return bool(rng.random() < 0.5)

    biased = rng.choice(VOCAB, int(rng.integers(1, 300)), replace=False).tolist()
    output_ids = random_ids(rng, int(rng.choice([0, 1, 5, 60])), below)
    words = [random_ids(rng, int(rng.integers(1, 9)), below) for _ in range(rng.integers(1, 65))]
    # Some that the output is about to complete.
    words[::3] = [(*output_ids[-n:], n) for n in range(1, 1 + len(words[::3]))][: len(words[::3])]
    sampling = SamplingParams(
        max_tokens=99,
        seed=0,
        stop_token_ids=frozenset(random_ids(rng, 3)),
        min_tokens=len(output_ids) + int(rng.integers(-2, 3)) if perhaps() else 0,
        logit_bias=tuple((i, float(rng.uniform(-100, 100))) for i in biased) if perhaps() else (),
        allowed_token_ids=(
            frozenset(random_ids(rng, int(rng.choice([1, 40, 2000])))) if perhaps() else None
        ),
        bad_words=tuple(word[-MAX_BAD_WORD_TOKENS:] for word in words) if perhaps() else (),
        presence_penalty=float(rng.uniform(-2, 2)) if perhaps() else 0.0,
        frequency_penalty=float(rng.uniform(-2, 2)) if perhaps() else 0.0,
        repetition_penalty=float(rng.choice([0.5, 1.1, 2.0, 10.0])) if perhaps() else 1.0,
    )
    prompt_ids = random_ids(rng, int(rng.choice([1, 50, 4000])), max(below, 1000))
    return Sequenced(sampling=sampling, prompt_ids=prompt_ids, output_ids=output_ids)


def assert_equal(adjusted_V: Logits, expected_V: npt.NDArray[np.float64]) -> None:
    is_banned_V = np.isneginf(expected_V)
    assert np.isfinite(adjusted_V).all()
    np.testing.assert_array_equal(adjusted_V < NEVER, is_banned_V)
    np.testing.assert_allclose(
        adjusted_V[~is_banned_V], expected_V[~is_banned_V], rtol=1e-5, atol=1e-4
    )


def check(*sequences: Sequenced) -> None:
    """Open a slot for each, and compare what is made of random logits."""
    device, logits_BV = Device(), random_logits(np.random.default_rng(9))
    by_slot = dict(zip(range(NUM_SLOTS - 1, -1, -1), sequences, strict=False))
    for slot, one in by_slot.items():
        device.open(slot, one)
    for adjusted_V, logits_V, one in zip(
        device.adjusted(logits_BV, by_slot), logits_BV, by_slot.values(), strict=False
    ):
        assert_equal(adjusted_V, one.reference(logits_V))


@pytest.mark.parametrize("seed", range(40))
def test_logits_become_what_the_options_say(seed: int) -> None:
    rng, device = np.random.default_rng([4, seed]), Device()
    by_slot = {int(slot): random_sequence(rng) for slot in rng.permutation(NUM_SLOTS)[:5]}
    plain_slot = next(slot for slot in range(NUM_SLOTS) if slot not in by_slot)
    by_slot[plain_slot] = Sequenced(sampling=PLAIN, output_ids=random_ids(rng, 5))
    for slot, one in by_slot.items():
        device.open(slot, one)
    logits_BV = random_logits(rng)

    adjusted_BV = device.adjusted(logits_BV, by_slot)

    for adjusted_V, logits_V, one in zip(adjusted_BV, logits_BV, by_slot.values(), strict=False):
        assert_equal(adjusted_V, one.reference(logits_V))
    # Rows that ask for nothing, padding among them, keep every bit.
    np.testing.assert_array_equal(adjusted_BV[5:], logits_BV[5:])


@pytest.mark.parametrize(("num_ids", "num_pieces"), [(1024, 1), (1025, 2), (2048, 2), (2049, 3)])
def test_a_table_takes_as_many_pieces_as_its_ids_need(num_ids: int, num_pieces: int) -> None:
    prompt_ids = tuple(np.random.default_rng(1).permutation(VOCAB)[:num_ids].tolist())
    penalized = replace(PLAIN, repetition_penalty=1.5)
    biased = replace(PLAIN, logit_bias=tuple((i, i % 7 - 3.0) for i in prompt_ids))
    allowed = replace(PLAIN, allowed_token_ids=frozenset(prompt_ids))

    for sampling in (penalized, biased, allowed):
        only_prompt = prompt_ids if sampling is penalized else prompt_ids[:1]
        assert len(table_pieces(0, sampling, only_prompt, ())) == num_pieces
        check(Sequenced(sampling=sampling, prompt_ids=only_prompt))


def test_a_request_that_adjusts_nothing_has_no_table() -> None:
    nothing = replace(PLAIN, min_tokens=5, num_logprobs=3)  # no end id to hold back
    assert table_pieces(0, nothing, (1, 2), (3,)) == []
    ends_alone = replace(PLAIN, stop_token_ids=frozenset({4}))
    assert table_pieces(0, ends_alone, (1, 2), (3,)) == []


def test_penalties_tell_ids_of_the_prompt_from_generated_ones() -> None:
    # Id 5 in both, 6 and 7 in one each; 7 comes thrice. Frequency and presence ask the output only.
    one = Sequenced(
        sampling=replace(
            PLAIN, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
        ),
        prompt_ids=(5, 6, 6),
        output_ids=(7, 5, 7, 7),
    )
    device, logits_BV = Device(), np.zeros((NUM_ROWS, VOCAB), np.float32)
    logits_BV[0, 4:9] = (4.0, 4.0, 4.0, -4.0, -4.0)
    device.open(0, one)

    adjusted_V = device.adjusted(logits_BV, {0: one})[0]

    assert adjusted_V[4:9].tolist() == [4.0, 2.0 - 0.75, 2.0, -8.0 - 1.25, -4.0]
    assert not adjusted_V[9:].any()


@pytest.mark.parametrize("repetition_penalty", [2e-38, 1e-30, 0.01, 1e25])
def test_neither_bias_nor_penalty_lifts_a_ban(repetition_penalty: float) -> None:
    repeated = replace(PLAIN, repetition_penalty=repetition_penalty)
    banning = (
        replace(repeated, allowed_token_ids=frozenset({8, 9})),
        replace(repeated, bad_words=((7,), (2, 8))),
        replace(repeated, min_tokens=9, stop_token_ids=frozenset({7, 9})),
    )
    by_slot = {
        slot: Sequenced(sampling=sampling, prompt_ids=(7, 9, 10), output_ids=(7, 8, 2))
        for slot, sampling in enumerate(banning)
    }
    device, logits_BV = Device(), random_logits(np.random.default_rng(9))
    for slot, one in by_slot.items():
        device.open(slot, one)

    adjusted_BV = device.adjusted(logits_BV, by_slot)

    assert np.isfinite(adjusted_BV).all()
    for adjusted_V, logits_V, one in zip(adjusted_BV, logits_BV, by_slot.values(), strict=False):
        banned_V = np.isneginf(one.reference(logits_V))
        assert (adjusted_V[banned_V] < NEVER).all()
        assert (adjusted_V[~banned_V] > NEVER).any()


def test_no_bias_lifts_a_ban() -> None:
    lifted = replace(PLAIN, logit_bias=((7, 100.0), (8, 100.0), (9, -100.0)))
    check(
        Sequenced(sampling=replace(lifted, allowed_token_ids=frozenset({8, 9}))),
        Sequenced(sampling=replace(lifted, bad_words=((7,), (2, 8))), output_ids=(2,)),
        Sequenced(sampling=replace(lifted, min_tokens=1, stop_token_ids=frozenset({7, 9}))),
        Sequenced(
            sampling=replace(lifted, allowed_token_ids=frozenset({8, 9}), repetition_penalty=0.01),
            prompt_ids=(7, 9, 10),
            output_ids=(7, 8, 10),
        ),
    )


REPEATED = (3, 3, 3, 3, 3, 3, 3)


@pytest.mark.parametrize(
    ("words", "output_ids", "banned"),
    [
        pytest.param([(5,)], (), {5}, id="one token"),
        pytest.param([(5,), (5,), (6,)], (5,), {5, 6}, id="the same twice"),
        pytest.param([(5, 6)], (), set(), id="nothing generated"),
        pytest.param([(5, 6)], (5,), {6}, id="begun"),
        pytest.param([(5, 6)], (5, 6), set(), id="over"),
        pytest.param([(5, 6)], (6, 5), {6}, id="begun at the end"),
        pytest.param([(5, 6, 7)], (6,), set(), id="no beginning"),
        pytest.param([(5, 6, 7), (6, 8), (6, 7)], (5, 6), {7, 8}, id="overlapping"),
        pytest.param([(5, 5, 5)], (5, 5, 5, 5), {5}, id="of itself"),
        pytest.param([(*REPEATED, 3)], REPEATED, {3}, id="eight of one token"),
        pytest.param([(*REPEATED, 3)], REPEATED[1:], set(), id="eight, one short"),
        pytest.param([(1, *REPEATED[1:], 4)], (9, 1, *REPEATED[1:]), {4}, id="eight"),
        pytest.param(
            [(1, *REPEATED[1:], 4)], (1, 9, *REPEATED[1:]), set(), id="eight, interrupted"
        ),
        pytest.param([(0, 0)], (0,), {0}, id="the id 0"),
        pytest.param([(0, 5)], (), set(), id="the id 0 is not nothing"),
        pytest.param([(VOCAB - 1, VOCAB - 1)], (VOCAB - 1,), {VOCAB - 1}, id="the last id"),
        pytest.param(
            [(i, i + 1) for i in range(MAX_BAD_WORDS)], (63,), {64}, id="the last of many"
        ),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(
    words: list[tuple[int, ...]], output_ids: tuple[int, ...], banned: set[int]
) -> None:
    # The prompt ends as the word begins: it does not count.
    one = Sequenced(
        sampling=replace(PLAIN, bad_words=tuple(words)),
        prompt_ids=(6, 5, *words[0][:-1]),
        output_ids=output_ids,
    )
    device, logits_BV = Device(), random_logits(np.random.default_rng(2))
    counted = replace(one, output_ids=())
    device.open(3, one)
    device.open(4, counted)
    for token_id in output_ids:  # as it goes without a preemption
        device.count({4: counted}, [token_id])

    adjusted_BV = device.adjusted(logits_BV, {3: one, 4: one})

    for adjusted_V, logits_V in zip(adjusted_BV[:2], logits_BV, strict=False):
        assert set(np.flatnonzero(adjusted_V < NEVER).tolist()) == banned
        unchanged = [i for i in range(VOCAB) if i not in banned]
        np.testing.assert_array_equal(adjusted_V[unchanged], logits_V[unchanged])


@pytest.mark.parametrize(("num_output", "may_end"), [(0, False), (3, False), (4, True), (5, True)])
def test_an_end_is_held_back_until_min_tokens_are_there(num_output: int, may_end: bool) -> None:
    ends = frozenset({0, 17, VOCAB - 1})
    one = Sequenced(
        sampling=replace(PLAIN, stop_token_ids=ends, min_tokens=4),
        prompt_ids=(17, 3),
        output_ids=tuple(range(20, 20 + num_output)),
    )
    device, logits_BV = Device(), random_logits(np.random.default_rng(3))
    device.open(1, one)

    adjusted_V = device.adjusted(logits_BV, {1: one})[0]

    banned = set(np.flatnonzero(adjusted_V < NEVER).tolist())
    assert banned == (set() if may_end else ends)


@pytest.mark.parametrize("seed", range(6))
def test_counting_from_step_to_step_equals_tables_made_anew(seed: int) -> None:
    rng, device = np.random.default_rng([5, seed]), Device()
    by_slot = {slot: random_sequence(rng) for slot in (4, 0, 2)}
    by_slot[5] = Sequenced(sampling=PLAIN)
    for slot, one in by_slot.items():
        device.open(slot, one)

    for step in range(12):
        ids = random_ids(rng, len(by_slot), 5)
        # Rows come and go; padding is counted nowhere.
        present = dict(list(by_slot.items())[: 2 + step % 3])
        device.count(present, ids[: len(present)])
        by_slot |= {s: one.then(i) for (s, one), i in zip(present.items(), ids, strict=False)}

    anew = Device()
    for slot, one in by_slot.items():
        anew.open(slot, one)
    for slot in range(NUM_SLOTS + 1):
        for array, expected in zip(device.table_of(slot), anew.table_of(slot), strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("seed", range(4))
def test_ids_that_are_counted_together_equal_a_table_made_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = random_sequence(rng)
    sampling = replace(one.sampling, frequency_penalty=1.0, bad_words=((5, 6),))
    more = random_ids(rng, 12, below=40)
    tables, anew = make_adjustments(NUM_SLOTS, VOCAB), make_adjustments(NUM_SLOTS, VOCAB)
    output_ids = (*one.output_ids, *more)
    for piece in (
        *table_pieces(2, sampling, one.prompt_ids, one.output_ids),
        *counting_pieces(2, sampling, more, output_ids),
    ):
        tables = _write(tables, piece)
    for piece in table_pieces(2, sampling, one.prompt_ids, output_ids):
        anew = _write(anew, piece)
    jax.tree.map(np.testing.assert_array_equal, tables, anew)
    assert counting_pieces(2, PLAIN, more, output_ids) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_slots_next_request_finds_nothing_of_the_one_before(seed: int) -> None:
    rng, used, fresh = np.random.default_rng([6, seed]), Device(), Device()
    before, after = random_sequence(rng), random_sequence(rng)
    logits_BV = random_logits(rng)
    used.open(2, before)
    used.count({2: before}, [7])
    # One that adjusts nothing in between leaves the table as it is, and is not touched by it.
    plain = Sequenced(sampling=PLAIN)
    used.open(2, plain)
    np.testing.assert_array_equal(used.adjusted(logits_BV, {2: plain}), logits_BV)
    used.count({2: plain}, [7])

    for device in (used, fresh):
        device.open(2, after)

    for array, expected in zip(used.table_of(2), fresh.table_of(2), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_padding_piece_leaves_a_table_empty() -> None:
    device = Device()
    device.open(1, random_sequence(np.random.default_rng(7)))
    untouched = device.table_of(2)

    for slot in (1, NUM_SLOTS):
        device.tables = _write(device.tables, padding_piece(slot))

    empty = Device()
    for slot in (1, NUM_SLOTS):
        for array, expected in zip(device.table_of(slot), empty.table_of(slot), strict=True):
            np.testing.assert_array_equal(array, expected)
    for array, before in zip(device.table_of(2), untouched, strict=True):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_a_banned_id_is_never_drawn(temperature: float) -> None:
    allowed = frozenset({3, 511, 512, 2999})
    sampling = replace(
        PLAIN,
        temperature=temperature,
        allowed_token_ids=allowed,
        bad_words=((511,),),
        min_tokens=9,
        stop_token_ids=frozenset({3}),
    )
    device, rng, drawn = Device(), np.random.default_rng(8), set[int]()
    logits_BV = random_logits(rng)
    logits_BV[:, [3, 511, 512, 2999]] -= 30.0  # all but impossible by themselves
    logits_BV[:, 2999] = logits_BV[:, 512]
    for seed in range(20):
        by_slot = {
            slot: Sequenced(sampling=replace(sampling, seed=NUM_SLOTS * seed + slot))
            for slot in range(NUM_SLOTS)
        }
        for slot, one in by_slot.items():
            device.open(slot, one)
        ids_B = np.asarray(_sample(logits_BV, device.tables, device.rows(by_slot)))
        drawn |= set(ids_B[:NUM_SLOTS].tolist())

    assert drawn == ({512, 2999} if temperature else {512})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_give_way_where_they_leave_nothing_that_is_allowed(temperature: float) -> None:
    sampling = replace(
        PLAIN,
        temperature=temperature,
        allowed_token_ids=frozenset({5, 6, 7}),
        bad_words=((9, 5), (6,), (8,)),
        min_tokens=9,
        stop_token_ids=frozenset({7}),
    )
    device, drawn = Device(), set[int]()
    logits_BV = random_logits(np.random.default_rng(9))
    for seed in range(10):
        by_slot = {
            slot: Sequenced(
                sampling=replace(sampling, seed=NUM_SLOTS * seed + slot), output_ids=(9,)
            )
            for slot in range(NUM_SLOTS)
        }
        for slot, one in by_slot.items():
            device.open(slot, one)
        ids_B = np.asarray(_sample(logits_BV, device.tables, device.rows(by_slot)))
        drawn |= set(ids_B[:NUM_SLOTS].tolist())
    # Neither what is not allowed, be it a bad word too, nor the end that is held back.
    assert drawn == ({5, 6} if temperature else {5})


def test_rows_beside_adjusted_ones_draw_what_they_draw_alone() -> None:
    rng, device = np.random.default_rng(10), Device()
    logits_BV = random_logits(rng)
    plain = {
        slot: Sequenced(sampling=replace(PLAIN, seed=slot, temperature=temperature))
        for slot, temperature in enumerate([0.0, 0.7, 1.0])
    }
    company = {slot: random_sequence(rng) for slot in (3, 4, 5)}
    for slot, one in (plain | company).items():
        device.open(slot, one)

    alone = np.asarray(_sample(logits_BV, device.tables, device.rows(plain)))
    beside = np.asarray(_sample(logits_BV, device.tables, device.rows(plain | company)))

    assert beside[:3].tolist() == alone[:3].tolist()

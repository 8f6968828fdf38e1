"""What the device reads of a grammar is what the host's tables say, wherever it lies."""

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.device.arena import (
    MAX_DISTANCE,
    Arena,
    Write,
    distances,
    pack,
    pack_bits,
    row_words,
    strided,
)
from jaxserve.device.grammar import (
    ENDED,
    GrammarRows,
    allowed_words,
    make_arena,
    mask_logits,
    masked_argmax,
    next_states,
    write_rows,
)
from jaxserve.guided.masks import packed
from jaxserve.guided.tables import TokenTables
from jaxserve.guided.triggered import triggered
from tests.guided_tables import random_tables, tables_of, words_of

Bools = npt.NDArray[np.bool_]

# No multiple of 32; one whose words are no multiple of 32; one whose words are.
VOCABS = (1000, 1056, 1024)
ENDS = frozenset({1, 3})
NUM_SLOTS = 4
NUM_ROWS = 400

_allowed = jax.jit(allowed_words, static_argnames="vocab_size")
_next = jax.jit(next_states, static_argnames="vocab_size")
_mask_logits, _masked_argmax = jax.jit(mask_logits), jax.jit(masked_argmax)
_write = jax.jit(write_rows)


class Device:
    """An arena with grammars in it, as the runner fills it, and its programs."""

    def __init__(self, vocab_size: int, num_rows: int = NUM_ROWS) -> None:
        self.vocab_size = vocab_size
        self.num_rows = num_rows
        self.arena = Arena(num_rows=num_rows, num_slots=NUM_SLOTS, vocab_size=vocab_size)
        self.arena_NR = make_arena(1 + NUM_SLOTS + num_rows, vocab_size)
        self.num_written = 0

    def place(
        self,
        slot: int,
        tables: TokenTables,
        key: str,
        *,
        ends: frozenset[int] = ENDS,
        live: Collection[int] = (),
    ) -> tuple[int, int] | None:
        image = pack(tables, key, self.vocab_size, self.num_rows)
        assert image is not None
        place = self.arena.place(slot, image, ends, live)
        if place is None:
            return None
        self.num_written += len(place.writes)
        for write in place.writes:
            self.write(write)
        return place.header, place.ends

    def write(self, write: Write) -> None:
        words = np.zeros(row_words(self.vocab_size), np.uint32)
        words[: len(write.words)] = write.words
        staged = np.concatenate([np.array([write.row], np.uint32), words])
        self.arena_NR = _write(self.arena_NR, jnp.asarray(staged))

    def allowed(self, rows: GrammarRows) -> Bools:
        words_BW = _allowed(self.arena_NR, rows, vocab_size=self.vocab_size)
        zeros_BV = jnp.zeros((len(words_BW), self.vocab_size))
        allowed_BV: Bools = np.asarray(_mask_logits(zeros_BV, words_BW)) == 0
        self._check_argmax(words_BW, allowed_BV)
        return allowed_BV

    def _check_argmax(self, words_BW: jax.Array, allowed_BV: Bools) -> None:
        """The largest is found among what is allowed, of equals the lowest id."""
        rng = np.random.default_rng(int(words_BW.sum() % 1000))
        logits_BV = rng.integers(-9, 9, allowed_BV.shape).astype(np.float32)
        best_B = _masked_argmax(jnp.asarray(logits_BV.T), words_BW)
        expected_B = np.where(allowed_BV, logits_BV, -np.inf).argmax(axis=1)
        np.testing.assert_array_equal(best_B, expected_B)

    def next(self, rows: GrammarRows, ids: Sequence[int]) -> list[int]:
        padded = jnp.asarray([*ids, *[0] * (NUM_SLOTS - len(ids))])
        states_B = _next(self.arena_NR, rows, padded, vocab_size=self.vocab_size)
        states: list[int] = states_B.tolist()
        return states


def rows_of(
    places: Sequence[tuple[int, int]],
    states: Sequence[int],
    *,
    position: int = 0,
    end_position: int = 0,
) -> GrammarRows:
    num_padding = NUM_SLOTS - len(places)  # one shape, one program
    columns = np.array([*places, *[(0, 0)] * num_padding], np.int32)
    return GrammarRows(
        header=jnp.asarray(columns[:, 0]),
        ends=jnp.asarray(columns[:, 1]),
        state=jnp.asarray([*states, *[0] * num_padding], jnp.int32),
        position=jnp.full(NUM_SLOTS, position, jnp.int32),
        end_position=jnp.full(NUM_SLOTS, end_position, jnp.int32),
    )


def expected(tables: TokenTables, state: int, vocab_size: int) -> Bools:
    allowed_V = np.zeros(vocab_size, np.bool_)
    if state != ENDED:
        known_V = tables.allowed_V(state)[:vocab_size]
        allowed_V[: len(known_V)] = known_V
    allowed_V[list(ENDS)] = state == ENDED or bool(tables.accepting_S[state])
    return allowed_V


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_the_device_walks_as_the_tables_say(vocab_size: int) -> None:
    device, rng = Device(vocab_size), np.random.default_rng(vocab_size)
    # One knows fewer ids than the model, one more, and the odd sizes leave words half full.
    grammars = [
        random_tables(1, vocab_size=vocab_size - 7, num_states=33, num_classes=15),
        random_tables(2, vocab_size=vocab_size + 9, num_states=120, num_classes=41),
        random_tables(3, vocab_size=vocab_size),
    ]
    places = [device.place(slot, grammar, f"g{slot}") for slot, grammar in enumerate(grammars)]
    assert None not in places
    known = [place for place in places if place is not None]
    states = [0, 0, 0]
    num_ended = 0
    for _ in range(60):
        rows = rows_of([*known, (0, 0)], [*states, 0])
        allowed_BV = device.allowed(rows)
        ids = []
        for grammar, state, allowed_V in zip(grammars, states, allowed_BV, strict=False):
            np.testing.assert_array_equal(allowed_V, expected(grammar, state, vocab_size))
            may_end = allowed_V[3] and rng.random() < 0.5
            ids.append(3 if may_end else int(rng.choice(np.flatnonzero(allowed_V))))
        assert allowed_BV[-1].all()  # the row without a grammar
        *states, free = device.next(rows, [*ids, 5])
        assert free == 0
        for grammar, before, token_id, after in zip(
            grammars, rows.state.tolist(), ids, states, strict=False
        ):
            assert after == (ENDED if before == ENDED else grammar.advance(before, token_id))
            num_ended += before == ENDED
        states = [0 if ended and rng.random() < 0.5 else s for s in states for ended in [s < 0]]
    assert num_ended > 3


def test_a_mask_is_laid_out_by_strides() -> None:
    for vocab_size in VOCABS:
        is_set_V = np.random.default_rng(0).random(vocab_size) < 0.5
        words = strided(packed(is_set_V), vocab_size)

        np.testing.assert_array_equal(words, pack_bits(is_set_V))
        bits = [words[t % len(words)] >> (t // len(words)) & 1 for t in range(vocab_size)]
        np.testing.assert_array_equal(bits, is_set_V)


def test_an_end_id_that_is_text_too_is_no_text_unless_nothing_else_is() -> None:
    ends = frozenset({1, 20, 21})
    # Behind 10, 20 or 11 go on, and the text may not end; behind 11 only 21 does.
    tables = words_of((10, 20), (10, 11, 21), vocab_size=1024)
    device = Device(1024)
    place = device.place(0, tables, "g", ends=ends)
    assert place is not None
    behind_10 = tables.advance(0, 10)
    behind_11 = tables.advance(behind_10, 11)
    end = tables.advance(behind_11, 21)

    allowed_BV = device.allowed(rows_of([place] * 3, [behind_10, behind_11, end]))

    assert [np.flatnonzero(allowed_V).tolist() for allowed_V in allowed_BV[:3]] == [
        [11],
        [21],
        [1, 20, 21],
    ]


def test_the_last_tokens_of_a_budget_lead_to_an_end_in_time() -> None:
    for seed in range(4):
        tables = random_tables(seed, vocab_size=1000, num_states=40, num_classes=20)
        device, rng = Device(1000), np.random.default_rng(seed)
        place = device.place(0, tables, "g")
        assert place is not None
        distance_S = distances(tables)
        for budget in range(int(distance_S[0]), int(distance_S[0]) + 12):
            state, end_position = 0, 50 + budget
            for position in range(50, end_position):
                rows = rows_of([place], [state], position=position, end_position=end_position)
                allowed_V = device.allowed(rows)[0]
                num_left = end_position - position - 1
                next_V = tables.next_SC[state, tables.class_of_V]
                in_time_V = (next_V >= 0) & (distance_S[next_V] <= num_left)
                in_time_V[list(ENDS)] = tables.accepting_S[state]
                np.testing.assert_array_equal(allowed_V, in_time_V)
                token_id = int(rng.choice(np.flatnonzero(allowed_V)))
                state = device.next(rows, [token_id])[0]
                if token_id in ENDS:
                    break
            assert state == ENDED


def test_distances_count_the_end_id() -> None:
    tables = words_of((10,), (11, 12, 13), vocab_size=100)

    assert distances(tables).tolist() == [2, 1, 3, 2, 1]
    dead_end = tables_of(np.zeros(100, np.uint16), np.array([[-1], [0]], np.int16), [])
    assert distances(dead_end).tolist() == [MAX_DISTANCE, MAX_DISTANCE]


def test_a_grammar_may_begin_in_mid_stream() -> None:
    trigger = 500
    # Behind 10 the text may end or go on with 11; the trigger is text inside as well.
    inner = words_of((10,), (10, 11), (trigger, 12), vocab_size=900)
    tables = triggered(inner, trigger, vocab_size=1000)
    device = Device(1000)
    place = device.place(0, tables, "g")
    assert place is not None

    def walk(*ids: int) -> list[int] | str:
        """Return what may follow these ids, all of which must be allowed."""
        state = 0
        for token_id in ids:
            rows = rows_of([place], [state])
            assert device.allowed(rows)[0, token_id], token_id
            state = device.next(rows, [token_id])[0]
        allowed_V = device.allowed(rows_of([place], [state]))[0]
        np.testing.assert_array_equal(allowed_V, expected(tables, state, 1000))
        return "all" if allowed_V.all() else np.flatnonzero(allowed_V).tolist()

    assert walk() == walk(5, 999, 1, 7) == "all"
    assert walk(5, trigger) == [10, trigger]
    assert walk(trigger, trigger) == [12]
    assert walk(trigger, 10) == walk(trigger, trigger, 12) == walk(trigger, 10, 11) == "all"
    assert walk(trigger, 10, 7, 3) == "all"
    assert walk(trigger, 10, trigger) == [10, trigger]


def test_a_mask_of_the_host_is_taken_as_it_is() -> None:
    device = Device(1024)
    is_set_V = np.random.default_rng(1).random(1024) < 0.1
    device.write(Write(1 + 2, pack_bits(is_set_V)))
    rows = rows_of([(-1 - 2, 0), (0, 0)], [0, 0])

    allowed_BV = device.allowed(rows)

    np.testing.assert_array_equal(allowed_BV[0], is_set_V)
    assert allowed_BV[1].all()
    assert device.next(rows, [int(np.flatnonzero(is_set_V)[0]), 4]) == [0, 0, 0, 0]


def test_what_the_arena_cannot_hold_has_no_image() -> None:
    tables = random_tables(0, vocab_size=1000)
    image = pack(tables, "g", 1000, 100)
    assert image is not None
    many = tables_of(np.arange(5000, dtype=np.uint16), np.zeros((1, 5000), np.int16), [0])

    assert pack(tables, "g", 1000, len(image.rows_NR) - 1) is None
    assert pack(many, "m", 5000, 100) is None


def test_a_grammar_is_written_once_while_there_is_room() -> None:
    tables = [random_tables(seed, vocab_size=1000) for seed in range(4)]
    images = [pack(each, f"g{i}", 1000, 100) for i, each in enumerate(tables)]
    sizes = [len(image.rows_NR) + 1 for image in images if image is not None]
    device = Device(1000, num_rows=sum(sorted(sizes)[1:]) + 1)
    place = partial(device.place, live=())
    for i in range(3):
        assert place(i, tables[i], f"g{i}")
    num_written = device.num_written

    # All are there, whoever asks for them; slot 0 is the last to have asked for the first.
    for slot, i in ((3, 1), (2, 2), (0, 0)):
        assert device.place(slot, tables[i], f"g{i}", live=(0, 2, 3))
    assert device.num_written == num_written

    # A fourth takes the place of the one that no live slot uses any more.
    assert device.place(3, tables[3], "g3", live=(0, 2, 3)) is not None
    assert device.num_written == num_written + sizes[3]
    assert device.place(0, tables[0], "g0", live=(0, 2, 3)) is not None
    assert device.num_written == num_written + sizes[3]
    # While all that is there is in use, there is none for another, and nothing is lost.
    assert device.place(1, tables[1], "g1", live=(0, 1, 2, 3)) is None
    for slot, i in ((0, 0), (2, 2), (3, 3)):
        assert device.place(slot, tables[i], f"g{i}", live=(0, 1, 2, 3)) is not None
    assert device.num_written == num_written + sizes[3]

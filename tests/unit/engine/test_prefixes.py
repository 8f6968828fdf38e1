"""What a conversation costs with the tree, on a fake runner: counted, not timed."""

import random
from collections.abc import Sequence

import pytest

from jaxserve.device.buckets import ExtendBucket
from jaxserve.device.memory import PageMix
from jaxserve.models.windows import Windows
from jaxserve.types import RequestFinished, SamplingParams
from tests.fakes import FAKE_VOCAB_SIZE, FakeClock, FakeRunner, SteppedEngine, fake_generate

PAGE_SIZE = 32
WINDOW = 512
BUCKETS = tuple(ExtendBucket(tokens=n, block=32) for n in (64, 256, 1024))
TOKENS_PER_POINT = 8192
CONTEXT = 9000
Ids = tuple[int, ...]


def random_ids(rng: random.Random, count: int) -> Ids:
    return tuple(rng.choices(range(FAKE_VOCAB_SIZE), k=count))


def engine_of(num_tokens: int, *, num_slots: int = 8) -> SteppedEngine:
    """Make an engine that can cache so many tokens, with sliding pages by the default mix."""
    windows = Windows(page_size=PAGE_SIZE, window=WINDOW)
    mix = PageMix(
        kv_dtype="bfloat16",
        bytes_per_page=1,
        bytes_per_sliding_page=1,
        num_working_pages=num_slots * windows.row_pages + BUCKETS[-1].tokens // PAGE_SIZE,
        pages_per_point=windows.point_pages,
        tokens_per_point=TOKENS_PER_POINT,
        least_points=num_slots,
    )
    num_pages = 1 + windows.pages_for(num_tokens)
    return SteppedEngine(
        FakeRunner(
            num_pages=num_pages,
            num_sliding_pages=mix.num_sliding_pages(num_pages),
            window=WINDOW,
            page_size=PAGE_SIZE,
            num_slots=num_slots,
            max_model_len=CONTEXT,
            extend_buckets=BUCKETS,
        )
    )


def generate(
    engine: SteppedEngine,
    name: str,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    session: str | None = None,
    points: Sequence[int] = (),
) -> tuple[Ids, int]:
    """Run a request alone to its end; return its answer and how much of its prompt was cached."""
    request = engine.submit(
        name, prompt, num_tokens, session=session, seed=len(prompt), resume_points=points
    )
    engine.run_until_idle()
    end = engine.finished(name)
    assert engine.tokens_of(name) == fake_generate(request.prompt_ids, request.sampling)
    return engine.tokens_of(name), end.stats.num_cached_tokens


class Loop:
    """An agent's: each turn adds a tool's result to the history, and an answer."""

    def __init__(self, engine: SteppedEngine, name: str, system: Ids) -> None:
        self._engine, self._name = engine, name
        self._rng = random.Random(name)
        self._system, self.history = system, system
        self._points: list[int] = []
        self._num_turns = 0
        self.num_prefilled = 0
        self.num_new = len(system)
        self.num_missed = 0

    def turn(self, num_result: int, num_answer: int = 16, *, names_points: bool = False) -> None:
        if self._num_turns:
            self.history += random_ids(self._rng, num_result)
            # The last id of an answer is sampled, not computed.
            self.num_new += num_result + 1
        self._points.append(len(self.history) - 3)
        name = f"{self._name} {self._num_turns}"
        points = self._points if names_points else ()
        answer, num_cached = generate(self._engine, name, self.history, num_answer, points=points)
        num_computed = len(self.history) - num_cached
        self.num_prefilled += num_computed
        self.num_missed += self._num_turns > 0 and num_computed > num_result + 1
        self.history += answer
        self._num_turns += 1


@pytest.mark.parametrize("names_points", [False, True])
def test_a_loop_of_20_turns_prefills_its_new_tokens(names_points: bool) -> None:
    engine = engine_of(10_000)
    rng = random.Random(0)
    loop = Loop(engine, "agent", random_ids(rng, 500))
    for _ in range(20):
        loop.turn(378, names_points=names_points)
    assert 7_900 < len(loop.history) < 8_100
    assert loop.num_prefilled <= 1.02 * loop.num_new


@pytest.mark.parametrize("names_points", [False, True])
def test_eight_sessions_in_rotation_keep_their_hits(names_points: bool) -> None:
    # Eight of 4,000 tokens in the end, in pages for five fourths of that.
    engine = engine_of(40_000)
    rng = random.Random(1)
    loops = [Loop(engine, str(i), random_ids(rng, 2_000)) for i in range(8)]
    for _ in range(6):
        for loop in loops:
            loop.turn(384, names_points=names_points)
    assert engine.scheduler.pages.pool.num_used * PAGE_SIZE > 0.79 * 40_000
    assert [loop.num_missed for loop in loops] == [0] * 8


def test_long_histories_that_come_back_after_a_flush_do_not_drive_each_other_out() -> None:
    # Each names 12 points; there is room for those that matter.
    engine = engine_of(40_000)
    rng = random.Random(2)
    histories = [random_ids(rng, 4_000) for _ in range(8)]
    points = range(300, 4_000, 300)
    for turn in range(2):
        for i, history in enumerate(histories):
            _, num_cached = generate(engine, f"{turn} {i}", history, 1, points=points)
            assert num_cached == (0, 3_999)[turn]
    assert engine.scheduler.pages.tree.sliding.num_points_evicted > 0


def test_a_shared_system_prompt_outlives_its_branches() -> None:
    # 100 conversations of 1,000 tokens behind it, one after the other, where 20 have room.
    engine = engine_of(20_000, num_slots=2)
    rng = random.Random(3)
    system = random_ids(rng, 1_500)
    for i in range(100):
        _, num_cached = generate(engine, str(i), system + random_ids(rng, 1_000), 4)
        # The second finds where it parts from the first only after the window is gone.
        assert num_cached >= (0 if i < 2 else 1_500 - PAGE_SIZE)
    assert engine.scheduler.pages.tree.num_evicted > 1_000
    assert engine.scheduler.pages.tree.sliding.num_points_evicted > 0


def test_streams_that_start_together_compute_their_prefix_once() -> None:
    engine = engine_of(40_000)
    rng = random.Random(4)
    prefix = random_ids(rng, 2_000)
    prompts = [prefix + random_ids(rng, 1_500) for _ in range(6)]
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, 3)
    engine.run_until_idle()
    for i, prompt in enumerate(prompts):
        end = engine.finished(str(i))
        assert end.stats.num_cached_tokens >= (0 if i == 0 else 2_000 - PAGE_SIZE)
        sampling = SamplingParams(max_tokens=3, seed=0)
        assert engine.tokens_of(str(i)) == fake_generate(prompt, sampling)


def small_engine() -> SteppedEngine:
    return SteppedEngine(FakeRunner(num_pages=41, window=8, max_model_len=96))


def test_what_only_one_session_holds_is_dropped_with_it() -> None:
    engine, rng = small_engine(), random.Random(5)
    scheduler, system = engine.scheduler, random_ids(rng, 20)
    first, second = (system + random_ids(rng, 20) for _ in range(2))
    generate(engine, "a", first, 2, session="a")
    generate(engine, "b", second, 2, session="b")

    pages = scheduler.pages
    num_used = pages.pool.num_used + pages.sliding_pool.num_used
    num_freed = scheduler.release_session("a")

    # Six full-attention pages behind the system prompt, and sliding pages of two points.
    assert num_freed == num_used - pages.pool.num_used - pages.sliding_pool.num_used > 6
    assert scheduler.explain(None, first)[0] == len(system)
    assert scheduler.explain(None, second)[0] == len(second)
    assert scheduler.release_session("a") == 0
    assert generate(engine, "b again", second, 2)[1] == len(second) - 1


def test_what_runs_is_neither_flushed_nor_released() -> None:
    engine, rng = small_engine(), random.Random(6)
    idle, running = random_ids(rng, 20), random_ids(rng, 20)
    generate(engine, "idle", idle, 2)
    request = engine.submit("running", running, 30, session="a")
    engine.step(10)

    assert engine.scheduler.flush_cache() > 5
    assert engine.scheduler.release_session("a") == 0
    engine.scheduler.check_integrity()
    engine.run_until_idle()
    assert engine.tokens_of("running") == fake_generate(running, request.sampling)
    assert engine.scheduler.explain(None, idle) == (0, (running[0],))
    engine.scheduler.flush_cache()
    assert engine.scheduler.pages.pool.num_used == 0
    assert engine.scheduler.pages.sliding_pool.num_used == 0


def test_a_page_that_only_a_running_request_has_is_copied_whole() -> None:
    engine, prompt = small_engine(), (1, 2, 3, 4, 5)
    engine.submit("first", prompt, 2)
    # Computed beside the first, whose pages are in the tree: these are not.
    engine.submit("beside it", prompt, 40, num_prompt_logprobs=0)
    engine.step(6)
    assert isinstance(engine.end_of("first"), RequestFinished)
    engine.scheduler.flush_cache()
    assert engine.scheduler.explain(None, prompt) == (0, ())

    third = engine.submit("third", (*prompt, 6), 9)
    engine.run_until_idle()
    end = engine.finished("third")
    assert end.stats.num_cached_tokens == 4
    assert engine.tokens_of("third") == fake_generate(third.prompt_ids, third.sampling)


def test_explain_tells_how_far_ids_are_cached_and_what_comes_next() -> None:
    engine = small_engine()
    answer, _ = generate(engine, "a", (1, 2, 3, 4, 5, 6), 3)
    generate(engine, "b", (1, 2, 3, 4, 5, 9), 1)
    explain = engine.scheduler.explain

    assert explain(None, (1, 2, 3, 4, 5, 6)) == (6, answer[:1])
    assert explain(None, (1, 2, 3, 4, 5, 7)) == (5, (6, 9))
    assert explain(None, (1, 2, 8)) == (2, (3,))
    assert explain("salt", (1, 2, 3)) == (0, ())
    # The last id of an answer is not computed.
    assert explain(None, (1, 2, 3, 4, 5, 6, *answer)) == (8, ())


@pytest.mark.parametrize(("age_s", "is_kept"), [(59.0, True), (61.0, False)])
def test_what_is_kept_outlasts_what_was_used_later(age_s: float, is_kept: bool) -> None:
    clock, rng = FakeClock(), random.Random(7)
    engine = SteppedEngine(FakeRunner(num_pages=41, window=8, max_model_len=96, clock=clock))
    kept = random_ids(rng, 40)
    answer, _ = generate(engine, "tool call", kept, 4)
    engine.scheduler.keep(None, (*kept, *answer), clock.now_s)
    clock.now_s += age_s
    for i in range(5):
        generate(engine, str(i), random_ids(rng, 40), 1)
    assert (generate(engine, "result", (*kept, *answer, 5), 1)[1] > 0) == is_kept


@pytest.mark.parametrize("goes_on_from", ["prompt", "answer"])
def test_a_session_goes_on_from_its_prompt_or_its_answer(goes_on_from: str) -> None:
    clock, rng = FakeClock(), random.Random(9)
    engine = SteppedEngine(
        FakeRunner(num_pages=90, num_sliding_pages=30, window=8, max_model_len=128, clock=clock)
    )
    prompt = random_ids(rng, 40)
    answer, _ = generate(engine, "session", prompt, 40, session="s")
    for i in range(12):
        generate(engine, str(i), random_ids(rng, 12), 1)
    known = prompt if goes_on_from == "prompt" else (*prompt, *answer[:-1])
    _, num_cached = generate(engine, "next", (*known, *random_ids(rng, 3)), 1, session="s")
    assert num_cached >= len(known) - 1


def test_a_last_page_that_another_request_left_is_the_sessions_as_well() -> None:
    clock, rng = FakeClock(), random.Random(10)
    engine = SteppedEngine(FakeRunner(num_pages=41, window=8, max_model_len=96, clock=clock))
    prompt = random_ids(rng, 38)
    generate(engine, "nobody", prompt, 4)
    answer, _ = generate(engine, "x", prompt, 4, session="x")
    generate(engine, "y", prompt, 4, session="y")
    assert engine.scheduler.release_session("x") == 0
    for i in range(5):
        generate(engine, str(i), random_ids(rng, 40), 1)
    _, num_cached = generate(engine, "next", (*prompt, *answer[:-1], 5), 1)
    assert num_cached == len(prompt) + len(answer) - 1

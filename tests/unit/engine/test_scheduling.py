"""What the scheduler plans, seen at the runner and in the events of a stepped engine."""

import itertools

import pytest

from jaxserve.device.buckets import ExtendBucket
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError, InvariantError
from jaxserve.types import RequestFailed, RequestFinished
from tests.fakes import FAKE_BUCKETS, FakeRunner, SteppedEngine, fake_generate


def prompt(length: int, first_id: int = 0) -> tuple[int, ...]:
    return tuple((first_id + i) % 97 for i in range(length))


def test_a_prompt_longer_than_the_largest_bucket_is_prefilled_in_chunks() -> None:
    engine = SteppedEngine(FakeRunner(max_model_len=128, num_pages=65))
    request = engine.submit("a", prompt(70), 3)
    engine.run_until_idle()
    spans = [
        (chunk.start, len(chunk.token_ids), chunk.sample) for [chunk] in engine.runner.extended
    ]
    assert spans == [(0, 32, False), (32, 32, False), (64, 6, True)]
    assert engine.tokens_of("a") == fake_generate(request.prompt_ids, request.sampling)


def test_short_prompts_share_one_extend_block_by_block() -> None:
    engine = SteppedEngine()
    for number, length in enumerate((3, 9, 8)):
        engine.submit(str(number), prompt(length, number), 1)
    engine.run_until_idle()
    # The largest bucket has four blocks of 8: 1 + 2 + 1.
    assert [len(chunk.token_ids) for chunk in engine.runner.extended[0]] == [3, 9, 8]
    assert len(engine.runner.extended) == 1


def test_a_chunk_that_is_cut_leaves_no_block_half_used() -> None:
    engine = SteppedEngine()
    engine.submit("a", prompt(9), 1)
    engine.submit("b", prompt(30, 40), 1)
    engine.run_until_idle()
    assert [len(chunk.token_ids) for chunk in engine.runner.extended[0]] == [9, 16]
    assert [len(chunk.token_ids) for chunk in engine.runner.extended[1]] == [14]


def test_a_finished_prompt_joins_the_decode_batch_at_the_next_step() -> None:
    engine = SteppedEngine()
    engine.submit("a", prompt(3), 20)
    engine.step(4)
    engine.submit("b", prompt(3), 20)
    engine.step(2)
    assert engine.runner.decoded_slots[-2:] == [[0], [0, 1]]


def test_decode_goes_on_in_every_step_of_somebody_elses_prefill() -> None:
    engine = SteppedEngine(FakeRunner(max_model_len=128))
    engine.submit("a", prompt(3), 60)
    engine.step(4)
    engine.submit("b", prompt(60), 2)
    num_decodes = len(engine.runner.decoded_slots)
    num_extends = len(engine.runner.extended)
    engine.step(3)
    assert len(engine.runner.decoded_slots) == num_decodes + 3
    assert len(engine.runner.extended) == num_extends + 3


def test_where_more_streams_wait_than_run_prefill_takes_the_largest_bucket() -> None:
    buckets = tuple(ExtendBucket(tokens=8 * 2**i, block=8) for i in range(4))
    runner = FakeRunner(
        num_pages=300,
        max_model_len=1024,
        extend_buckets=buckets,
        decode_s=0.010,
        extend_s_per_token=0.004,
    )
    engine = SteppedEngine(runner)
    engine.submit("running", prompt(3), 100)
    engine.step(10)
    for name in "ab":
        engine.submit(name, prompt(100), 1)
    engine.step()

    assert sum(len(chunk.token_ids) for chunk in runner.extended[-1]) == buckets[-1].tokens


def test_prefill_never_triples_the_gap_between_a_running_streams_tokens() -> None:
    buckets = tuple(ExtendBucket(tokens=8 * 2**i, block=8) for i in range(6))
    runner = FakeRunner(
        num_pages=300,
        max_model_len=1024,
        extend_buckets=buckets,
        decode_s=0.010,
        extend_s_per_token=0.0004,
    )
    engine = SteppedEngine(runner)
    engine.submit("running", prompt(3), 100)
    engine.step(10)
    engine.submit("long", prompt(600), 1)
    engine.run_until_idle()

    # 32 tokens take 12.8 ms, which fits 1.5 times the 10 ms of a decode; 64 do not.
    assert max(len(chunk.token_ids) for chunks in runner.extended for chunk in chunks) == 32
    times_s = [
        time_s
        for time_s, events in engine.published
        if any(e.request_id == "running" for e in events)
    ]
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert max(gaps_s) < 3 * 0.010


def test_nobody_waits_for_decode_when_nothing_decodes() -> None:
    engine = SteppedEngine()
    engine.submit("a", prompt(40), 1)
    engine.step()
    assert len(engine.runner.extended[0][0].token_ids) == 32


def test_requests_beyond_the_slots_wait_in_order_of_arrival() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=2))
    for name in "abcd":
        engine.submit(name, prompt(3), 5)
    engine.step()
    assert (engine.scheduler.roster.num_running, engine.scheduler.roster.num_waiting) == (2, 2)
    engine.run_until_idle()
    ends = [event.request_id for event in engine.events if isinstance(event, RequestFinished)]
    assert ends == ["a", "b", "c", "d"]


def test_pages_are_taken_as_they_are_needed() -> None:
    engine = SteppedEngine(FakeRunner(page_size=4))
    engine.submit("a", prompt(4), 50)
    engine.step()
    assert engine.scheduler.pages.pool.num_used == 1
    engine.step()
    assert engine.scheduler.pages.pool.num_used == 2


def test_the_latest_arrival_gives_way_when_pages_run_out_and_its_tokens_stay_the_same() -> None:
    # Nine pages: two sequences of 24 tokens want twelve.
    engine = SteppedEngine(FakeRunner(num_pages=10, page_size=4, max_model_len=36))
    requests = [engine.submit(name, prompt(8, i), 16, seed=i) for i, name in enumerate("ab")]
    engine.run_until_idle()
    assert engine.runner.calls.count("open_slot") == 3
    ends = [event.request_id for event in engine.events if isinstance(event, RequestFinished)]
    assert ends == ["a", "b"]
    for request in requests:
        assert engine.tokens_of(request.request_id) == fake_generate(
            request.prompt_ids, request.sampling
        )
    assert b"jaxserve_num_preemptions_total 1.0" in engine.metrics.render()


def test_preemption_waits_until_what_is_in_flight_has_settled() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=10, page_size=4, max_model_len=36))
    for i, name in enumerate("ab"):
        engine.submit(name, prompt(8, 30 * i), 16, seed=i)
    while engine.scheduler.roster.num_waiting == 0 or engine.scheduler.roster.num_running != 1:
        num_unread_before = len(engine.runner.unread)
        engine.step()
    # The pass that preempts found nothing unread: the pass before it only settled.
    assert num_unread_before == 0


def test_a_preempted_request_comes_before_those_that_arrived_later() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=10, num_slots=2, page_size=4, max_model_len=36))
    for i, name in enumerate("abc"):
        engine.submit(name, prompt(8, 30 * i), 16, seed=i)
    engine.run_until_idle()
    assert engine.runner.calls.count("open_slot") > 3
    ends = [event.request_id for event in engine.events if isinstance(event, RequestFinished)]
    assert ends == ["a", "b", "c"]


def test_a_request_does_not_start_on_pages_that_a_running_prefill_will_need() -> None:
    # "a" needs eight of the ten pages and has two of them after its first chunk.
    runner = FakeRunner(
        num_pages=11, page_size=4, max_model_len=40, extend_buckets=FAKE_BUCKETS[:1]
    )
    engine = SteppedEngine(runner)
    engine.submit("a", prompt(32), 1)
    engine.step()
    engine.submit("b", prompt(8, 50), 1)
    engine.run_until_idle()
    assert [chunk.start for [chunk] in runner.extended] == [0, 8, 16, 24, 0]


def test_a_prefill_goes_as_far_as_pages_do_and_on_when_there_are_more() -> None:
    # "c" gets 14 of its 15 pages, for "a" and "b" have grown to three each, and the last one later.
    runner = FakeRunner(
        num_pages=21, page_size=4, max_model_len=80, extend_buckets=FAKE_BUCKETS[:1]
    )
    engine = SteppedEngine(runner)
    requests = [
        engine.submit("a", prompt(2), 10),
        engine.submit("b", prompt(2), 10),
        engine.submit("c", prompt(60), 10),
    ]
    engine.run_until_idle()
    calls = [call for call in runner.calls if call in ("extend", "decode")]
    assert calls[: calls.index("extend", 14) + 1] == [
        *["extend"],
        *["extend", "decode"] * 7,
        *["decode"] * 2,
        *["extend"],
    ]
    assert runner.calls.count("open_slot") == 3
    for request in requests:
        assert engine.tokens_of(request.request_id) == fake_generate(
            request.prompt_ids, request.sampling
        )


def test_a_request_is_not_admitted_only_to_be_preempted() -> None:
    # "a" runs with 5 of 10 pages; "b" would fit the free five, yet not beside the page that "a"
    # wants next.
    engine = SteppedEngine(FakeRunner(num_pages=11, page_size=4, max_model_len=40))
    engine.submit("a", prompt(20), 10)
    engine.submit("b", prompt(20, 50), 10)
    engine.run_until_idle()
    assert engine.runner.calls.count("open_slot") == 2


def test_one_sequence_of_full_length_fits_exactly() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=11, page_size=4, max_model_len=40))
    request = engine.submit("a", prompt(10), 30)
    engine.run_until_idle()
    assert engine.tokens_of("a") == fake_generate(request.prompt_ids, request.sampling)


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 40"):
        Scheduler(FakeRunner(num_pages=10, page_size=4, max_model_len=40))


def test_a_request_beyond_the_context_fails_alone() -> None:
    engine = SteppedEngine(FakeRunner(max_model_len=64))
    engine.submit("long", prompt(60), 5)
    engine.submit("good", prompt(60), 4)
    engine.run_until_idle()
    end = engine.end_of("long")
    assert isinstance(end, RequestFailed)
    assert isinstance(end.error, ContextLengthError)
    assert isinstance(engine.end_of("good"), RequestFinished)


def test_an_empty_prompt_fails_alone() -> None:
    engine = SteppedEngine()
    engine.submit("empty", (), 5)
    engine.step()
    end = engine.end_of("empty")
    assert isinstance(end, RequestFailed)
    assert isinstance(end.error, InvalidRequestError)


def test_integrity_check_finds_a_lost_page_and_a_lost_slot() -> None:
    scheduler = Scheduler(FakeRunner())
    scheduler.check_integrity()
    pages = scheduler.pages.pool.allocate(1) or []
    with pytest.raises(InvariantError, match="1 pages are used"):
        scheduler.check_integrity()
    scheduler.pages.pool.release(pages)
    scheduler.roster._free_slots.pop()
    with pytest.raises(InvariantError, match="slots"):
        scheduler.check_integrity()

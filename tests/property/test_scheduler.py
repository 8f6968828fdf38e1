"""The loop under random load: whatever comes, goes or runs short, each request is right."""

from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxserve.models.windows import Windows
from jaxserve.types import RequestFinished, SamplingParams
from tests.fakes import (
    FAKE_BUCKETS,
    FAKE_VOCAB_SIZE,
    FakeRunner,
    SteppedEngine,
    fake_generate,
    fake_logprobs,
)

PAGE_SIZE = 4
MAX_MODEL_LEN = 40
# A tenth of the vocabulary: many requests end early, with a step too far in flight.
STOP_IDS = frozenset(range(10))


@dataclass(frozen=True)
class Planned:
    """A request, the pass before which it comes in, and the one before which it is aborted."""

    num_prompt: int
    num_shared: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    submit_step: int
    abort_step: int | None
    priority: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    cache_salt: str | None
    session: str | None
    resume_points: tuple[int, ...]
    repeats: bool
    forced: dict[int, int] | None

    def prompt_ids(self, number: int) -> tuple[int, ...]:
        """Begin with what all requests begin with; the rest is this one's alone, or is repeated."""
        own = 0 if self.repeats else number
        return tuple(
            (i if i < self.num_shared else 13 * own + i) % FAKE_VOCAB_SIZE
            for i in range(self.num_prompt)
        )


@st.composite
def forced_ids(draw: st.DrawFn) -> dict[int, int]:
    """Force runs of an answer's ids, which may be end ids too."""
    forced: dict[int, int] = {}
    for start, length in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)))):
        forced |= {start + i: (7 * start + 3 * i) % FAKE_VOCAB_SIZE for i in range(length)}
    return forced


@st.composite
def planned_requests(draw: st.DrawFn) -> Planned:
    num_prompt = draw(st.integers(1, 8) | st.integers(1, MAX_MODEL_LEN - 1))
    num_left = MAX_MODEL_LEN - num_prompt
    submit_step = draw(st.just(0) | st.integers(0, 12))
    return Planned(
        num_prompt=num_prompt,
        num_shared=draw(st.just(0) | st.integers(0, num_prompt)),
        # Long answers to short prompts: pages run out in mid-decode.
        max_tokens=draw(st.just(num_left) | st.integers(1, num_left)),
        stop_token_ids=draw(st.sampled_from([frozenset[int](), frozenset[int](), STOP_IDS])),
        submit_step=submit_step,
        abort_step=draw(st.none() | st.none() | st.integers(submit_step, submit_step + 30)),
        priority=draw(st.just(0) | st.integers(-1, 1)),
        num_logprobs=draw(st.none() | st.integers(0, 3)),
        num_prompt_logprobs=draw(st.none() | st.none() | st.integers(0, 3)),
        cache_salt=draw(st.none() | st.none() | st.sampled_from(["", "a"])),
        session=draw(st.none() | st.sampled_from(["x", "y"])),
        resume_points=tuple(draw(st.lists(st.integers(0, num_prompt + 1), max_size=3))),
        repeats=draw(st.booleans()),
        forced=draw(st.none() | forced_ids()),
    )


def run(engine: SteppedEngine, plan: list[Planned]) -> None:
    """Drive the plan to its end; fail where somebody starves."""
    last_step = max(planned.abort_step or planned.submit_step for planned in plan)
    # More than it takes to run everybody alone, one after the other, with preemptions on top.
    max_steps = 50 + 3 * MAX_MODEL_LEN * len(plan)
    for step in range(max_steps):
        is_any = False
        for number, planned in enumerate(plan):
            if planned.submit_step == step:
                is_any = True
                engine.submit(
                    str(number),
                    planned.prompt_ids(number),
                    planned.max_tokens,
                    seed=number,
                    stop_token_ids=planned.stop_token_ids,
                    num_logprobs=planned.num_logprobs,
                    num_prompt_logprobs=planned.num_prompt_logprobs,
                    priority=planned.priority,
                    cache_salt=planned.cache_salt,
                    session=planned.session,
                    resume_points=planned.resume_points,
                    forced=planned.forced,
                )
            if planned.abort_step == step:
                is_any = True
                engine.abort(str(number))
        if is_any or not engine.core.is_idle:
            engine.step()
            engine.scheduler.check_integrity()
        elif step > last_step:
            return
    raise AssertionError(f"requests {engine.scheduler.roster.live_ids()} starve")


def assert_told(
    engine: SteppedEngine, request_id: str, planned: Planned, prompt_ids: tuple[int, ...]
) -> None:
    """Check what is told of each token so far, of the prompt's as of the output's."""
    told, scored = engine.logprobs_of(request_id), engine.prompt_logprobs_of(request_id)
    if planned.num_logprobs is None:
        assert told == ()
    else:
        token_ids = engine.tokens_of(request_id)
        assert told == tuple(fake_logprobs(i).cut(planned.num_logprobs) for i in token_ids)
    if planned.num_prompt_logprobs is None:
        assert scored == ()
    else:
        targets = prompt_ids[1 : 1 + len(scored)]
        assert scored == tuple(fake_logprobs(i).cut(planned.num_prompt_logprobs) for i in targets)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and as few pages as one sequence of full length needs, or a few more."""

    plan: list[Planned]
    num_spare_pages: int
    num_spare_sliding_pages: int
    window: int
    reuses_prefixes: bool
    num_slots: int
    num_buckets: int
    decode_s: float


CASES = st.builds(
    Case,
    plan=st.lists(planned_requests(), min_size=2, max_size=8),
    num_spare_pages=st.integers(0, 4),
    num_spare_sliding_pages=st.integers(0, 6),
    window=st.sampled_from([2, 3, 5, 8, 9, MAX_MODEL_LEN]),
    reuses_prefixes=st.sampled_from([True, True, True, False]),
    num_slots=st.integers(2, 5),
    num_buckets=st.integers(1, 3),
    # An extend takes 8 ms: in slow decodes all runs pay, in quick ones none do.
    decode_s=st.sampled_from([0.001, 0.010, 0.100]),
)


def check(case: Case) -> None:
    windows = Windows(page_size=PAGE_SIZE, window=case.window)
    num_pages = MAX_MODEL_LEN // PAGE_SIZE
    engine = SteppedEngine(
        FakeRunner(
            num_pages=1 + num_pages + case.num_spare_pages,
            num_sliding_pages=1 + min(num_pages, windows.row_pages) + case.num_spare_sliding_pages,
            window=case.window,
            page_size=PAGE_SIZE,
            num_slots=case.num_slots,
            max_model_len=MAX_MODEL_LEN,
            extend_buckets=FAKE_BUCKETS[: case.num_buckets],
            decode_s=case.decode_s,
        ),
        reuses_prefixes=case.reuses_prefixes,
    )
    run(engine, case.plan)

    event(
        "preempted" if engine.runner.calls.count("open_slot") > len(case.plan) else "not preempted"
    )
    num_forced = sum(
        end.stats.num_forced_tokens for end in engine.events if isinstance(end, RequestFinished)
    )
    event("forced" if num_forced else "not forced")
    engine.scheduler.check_idle()
    assert engine.runner.max_unread <= 4
    for number, planned in enumerate(case.plan):
        request_id = str(number)
        end, token_ids = engine.end_of(request_id), engine.tokens_of(request_id)
        assert isinstance(end, RequestFinished)
        assert end.stats.num_output_tokens == len(token_ids)
        sampling = SamplingParams(
            max_tokens=planned.max_tokens, seed=number, stop_token_ids=planned.stop_token_ids
        )
        prompt_ids = planned.prompt_ids(number)
        alone = fake_generate(prompt_ids, sampling, planned.forced)
        num_targets = len(prompt_ids) - 1
        assert_told(engine, request_id, planned, prompt_ids)
        if end.reason == "abort":
            assert planned.abort_step is not None
            assert token_ids == alone[: len(token_ids)]
        else:
            assert token_ids == alone
            num_scored = len(engine.prompt_logprobs_of(request_id))
            assert num_scored == (0 if planned.num_prompt_logprobs is None else num_targets)
            assert end.reason == ("stop" if alone[-1] in planned.stop_token_ids else "length")


@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_every_request_gets_what_it_gets_alone(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=4_000, deadline=None)
@given(case=CASES)
def test_every_request_gets_what_it_gets_alone_in_thousands_of_cases(case: Case) -> None:
    check(case)

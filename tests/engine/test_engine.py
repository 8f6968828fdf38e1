"""The whole engine on a real model: a request's tokens are its own, whatever else happens."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.runner import ModelRunner
from jaxserve.errors import EngineDeadError
from jaxserve.types import GenerationRequest, RequestFailed, SamplingParams
from tests.engine.tiny import PLAN, Sizes, TinyEngine, TinyModel, prompt_of, request_of, run_alone

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

# Greedy rows, and sampled ones with and without filters; more than there are slots.
REQUESTS = (
    request_of("greedy", prompt_of(9), 24),
    request_of("one token", prompt_of(1), 20),
    request_of("plain", prompt_of(30), 24, SamplingParams(max_tokens=1, seed=1)),
    request_of("top-k", prompt_of(70), 24, SamplingParams(max_tokens=1, seed=2, top_k=20)),
    request_of(
        "all",
        prompt_of(33),
        30,
        SamplingParams(
            max_tokens=1, seed=2**63 + 3, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01
        ),
    ),
    request_of("top-p", prompt_of(16), 17, SamplingParams(max_tokens=1, seed=4, top_p=0.95)),
    request_of("long", prompt_of(100), 20),
    request_of("hot", prompt_of(5), 30, SamplingParams(max_tokens=1, seed=5, temperature=1.9)),
    request_of("short", prompt_of(40), 1, SamplingParams(max_tokens=1, seed=6)),
    request_of("same prompt", prompt_of(30), 24, SamplingParams(max_tokens=1, seed=7)),
)

Alone = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def alone(e2b: TinyModel) -> Alone:
    """What every request gets that has the engine to itself."""
    return {request.request_id: run_alone(e2b.runner, request) for request in REQUESTS}


def by_id(name: str) -> GenerationRequest:
    return next(request for request in REQUESTS if request.request_id == name)


def assert_as_alone(engine: TinyEngine, alone: Alone) -> None:
    for name, tokens in alone.items():
        end = engine.finished(name)
        if end.reason == "abort":
            assert engine.tokens_of(name) == tokens[: len(engine.tokens_of(name))]
        else:
            assert engine.tokens_of(name) == tokens, name


def test_greedy_requests_get_the_likeliest_tokens(e2b: TinyModel, alone: Alone) -> None:
    for name in ("greedy", "one token", "long"):
        e2b.assert_greedy(by_id(name).prompt_ids, alone[name])


def test_samples_differ_by_their_seeds(alone: Alone) -> None:
    assert alone["plain"] != alone["same prompt"]
    assert len(set(alone["hot"])) > 20


@pytest.mark.parametrize("order", range(4))
def test_company_changes_no_token(e2b: TinyModel, alone: Alone, order: int) -> None:
    engine, rng = TinyEngine(e2b.runner), np.random.default_rng(order)

    for i in rng.permutation(len(REQUESTS)):
        engine.add(REQUESTS[i])
        for _ in range(rng.integers(0, 4) if order else 0):  # all at once, or joining later
            engine.step()
    engine.run_until_idle()

    assert_as_alone(engine, alone)


def test_every_slot_gives_the_same_tokens(e2b: TinyModel, alone: Alone) -> None:
    request = by_id("all")
    for num_others in range(1, PLAN.num_slots):
        engine = TinyEngine(e2b.runner)
        for i in range(num_others):  # they hold the slots before it
            engine.add(request_of(f"other {i}", prompt_of(3, seed=i), 40))
        engine.run(request)
        assert engine.tokens_of("all") == alone["all"], f"in slot {num_others}"


@pytest.mark.parametrize(("num_pages", "num_slots"), [(18, 8), (25, 8), (40, 3)])
def test_preemption_and_queueing_change_no_token(
    e2b: TinyModel, alone: Alone, num_pages: int, num_slots: int
) -> None:
    engine = TinyEngine(e2b.runner, Sizes(num_pages=num_pages, num_slots=num_slots))

    engine.run(*REQUESTS)

    assert_as_alone(engine, alone)
    assert (engine.num_preemptions > 0) == (num_slots == 8)


def test_what_a_sequence_left_in_the_pages_does_not_matter(e2b: TinyModel, alone: Alone) -> None:
    # One sequence's worth of pages: every request is given those of the one before it.
    engine = TinyEngine(e2b.runner, Sizes(num_pages=17, num_slots=1))

    engine.run(*REQUESTS)

    assert_as_alone(engine, alone)


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_at_any_step_frees_the_row_and_disturbs_nobody(
    e2b: TinyModel, alone: Alone, num_steps: int
) -> None:
    """Its prefill takes 2 steps, at least; from then on it decodes with a step in flight."""
    engine = TinyEngine(e2b.runner)
    engine.add(request_of("victim", prompt_of(90), 30), *REQUESTS)

    engine.abort_after(num_steps, "victim")

    assert_as_alone(engine, alone)


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_aborts_and_preemptions_at_random(e2b: TinyModel, alone: Alone, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    engine = TinyEngine(e2b.runner, Sizes(num_pages=int(rng.integers(17, 40))))
    names = [REQUESTS[i].request_id for i in rng.permutation(len(REQUESTS))]
    to_abort = set(names[::3])

    for name in names:
        engine.add(by_id(name))
        for _ in range(rng.integers(0, 6)):
            engine.step() if not engine.core.is_idle else None
        if to_abort and rng.random() < 0.5:
            engine.abort(to_abort.pop())
    engine.run_until_idle()

    assert_as_alone(engine, alone)


@pytest.mark.parametrize("name", ["greedy", "all"])
def test_a_stop_id_ends_the_sequence_and_is_its_last_token(
    e2b: TinyModel, alone: Alone, name: str
) -> None:
    tokens = alone[name]
    stop_id = tokens[8]
    sampling = by_id(name).sampling
    stopping = SamplingParams(
        max_tokens=30,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop_token_ids=frozenset({stop_id, 1023}),
    )
    engine = TinyEngine(e2b.runner)

    engine.run(request_of("stopped", by_id(name).prompt_ids, 30, stopping))

    end = engine.finished("stopped")
    assert end.reason == "stop"
    assert engine.tokens_of("stopped") == tokens[: tokens.index(stop_id) + 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_the_number_of_tokens(e2b: TinyModel, alone: Alone, max_tokens: int) -> None:
    engine = TinyEngine(e2b.runner)

    engine.run(request_of("cut", by_id("greedy").prompt_ids, max_tokens))

    end = engine.finished("cut")
    assert (end.reason, end.stats.num_output_tokens) == ("length", max_tokens)
    assert engine.tokens_of("cut") == alone["greedy"][:max_tokens]


def test_a_program_that_fails_ends_every_request_once(e2b: TinyModel) -> None:
    calls = 0

    def fail_later(*arguments: object) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the chip is gone")
        return program(*arguments)

    bucket = DecodeBucket(rows=8, table_size=PLAN.table_sizes[0])
    program = cast(Callable[..., Any], e2b.compiled[bucket])
    programs = {**e2b.compiled, bucket: cast(Any, fail_later)}
    engine = TinyEngine(ModelRunner(e2b.params, e2b.config, e2b.plan, programs))
    engine.add(*REQUESTS)  # some run, some wait

    engine.core.run()

    for request in REQUESTS:
        end = engine.end_of(request.request_id)
        if request.request_id != "short":
            assert isinstance(end, RequestFailed)
            assert isinstance(end.error, EngineDeadError)
    assert [str(fault) for fault in engine.faults] == ["the chip is gone"]

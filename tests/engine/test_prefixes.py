"""A request served from the prefix tree gets what it gets cold, wherever the two part."""

from dataclasses import replace

import pytest

from jaxserve.types import PromptOutput, SamplingParams
from tests.checkpoints import Kind
from tests.engine.conftest import TinyModels
from tests.engine.tiny import (
    PLAN,
    Sizes,
    TinyEngine,
    TinyModel,
    prompt_of,
    request_of,
    run_alone,
)

# The window is 16, a page 8, a chunk of attention 32: all have borders here, and ±1 of them.
CUTS = [1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 39, 40, 41]
PROMPT = prompt_of(44)
# Shared layers skipped in prefill, and none; a program for each number of rows, and one for all.
KINDS: list[Kind] = ["e2b", "gemma3"]
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0, num_logprobs=1)
# Natural logarithms; chunks of other sizes sum in another order.
TOLERANCE = 2e-3


def cached_tokens(engine: TinyEngine, name: str) -> int:
    return engine.finished(name).stats.num_cached_tokens


def run(engine: TinyEngine, name: str, prompt: tuple[int, ...], *points: int) -> None:
    request = request_of(name, prompt, 12, GREEDY)
    engine.run(replace(request, resume_points=points))


def assert_as_cold(
    model: TinyModel, engine: TinyEngine, name: str, prompt: tuple[int, ...]
) -> None:
    """Compare with an engine that has cached nothing; it overwrites the other's pages."""
    cold = TinyEngine(model.runner, sizes_of(model))
    run(cold, "cold", prompt)
    assert engine.tokens_of(name) == cold.tokens_of("cold")
    model.assert_greedy(prompt, engine.tokens_of(name))
    hit, miss = engine.logprobs_of(name), cold.logprobs_of("cold")
    for one, other in zip(hit, miss, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def sizes_of(model: TinyModel) -> Sizes:
    return Sizes(extend_buckets=model.plan.extend_buckets)


def assert_hit_equals_miss(model: TinyModel, cut: int) -> None:
    """Compare a prompt that parts from an earlier one with the same prompt cold."""
    engine = TinyEngine(model.runner, sizes_of(model))
    run(engine, "first", PROMPT, *range(1, len(PROMPT)))
    other = PROMPT[:cut] + prompt_of(45 - cut, seed=1)
    run(engine, "second", other)

    assert cached_tokens(engine, "second") == cut
    assert_as_cold(model, engine, "second", other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
def test_hit_equals_miss_at_every_cut(tiny_models: TinyModels, kind: Kind, cut: int) -> None:
    assert_hit_equals_miss(tiny_models(kind), cut)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
def test_hit_equals_miss_where_the_windows_pages_are_gone(
    tiny_models: TinyModels, kind: Kind, cut: int
) -> None:
    model = tiny_models(kind)
    engine = TinyEngine(model.runner, sizes_of(model))
    run(engine, "first", PROMPT)
    engine.scheduler.pages.tree.sliding.flush()
    other = PROMPT[:cut] + prompt_of(45 - cut, seed=1)
    num_used = engine.scheduler.pages.pool.num_used
    run(engine, "second", other)

    # Sliding layers compute all of it again, yet whole pages of the others are shared.
    assert cached_tokens(engine, "second") == 0
    num_new = engine.scheduler.pages.pool.num_used - num_used
    assert num_new == -(-(len(other) + 11) // PLAN.page_size) - cut // PLAN.page_size

    # What was computed again can be resumed from.
    third = other[:44] + prompt_of(9, seed=2)
    run(engine, "third", third)
    assert cached_tokens(engine, "third") == 44
    assert_as_cold(model, engine, "second", other)
    assert_as_cold(model, engine, "third", third)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [25, 31, 32, 33, 47, 48, 49, 64, 70, 79])
@pytest.mark.parametrize("point", [23, 24, 25])
def test_hit_equals_miss_where_it_resumes_before_what_is_shared(
    tiny_models: TinyModels, kind: Kind, cut: int, point: int
) -> None:
    model = tiny_models(kind)
    engine = TinyEngine(model.runner, sizes_of(model))
    long = prompt_of(100)
    run(engine, "first", long, point)
    other = long[:cut] + prompt_of(88 - cut, seed=1)
    run(engine, "second", other)

    # Any position of the point's page will do: up to its end, or to where the two part.
    end = -(-point // PLAN.page_size) * PLAN.page_size
    assert cached_tokens(engine, "second") == min(end, cut)
    assert_as_cold(model, engine, "second", other)


def test_a_prompt_again_costs_its_last_token(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    for name in ("first", "second"):
        engine.run(request_of(name, PROMPT, 9))
    assert engine.tokens_of("first") == engine.tokens_of("second")
    assert cached_tokens(engine, "first") == 0
    assert cached_tokens(engine, "second") == len(PROMPT) - 1


def test_an_answer_is_reused_as_well(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    engine.run(request_of("turn 1", PROMPT, 20))
    history = (*PROMPT, *engine.tokens_of("turn 1"), *prompt_of(5, seed=2))
    engine.run(request_of("turn 2", history, 9))
    # The last token of an answer is never computed.
    assert cached_tokens(engine, "turn 2") == len(PROMPT) + 20 - 1
    e2b.assert_greedy(history, engine.tokens_of("turn 2"))


def test_requests_that_come_together_compute_their_prefix_once(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    prefix = prompt_of(80, seed=3)
    prompts = [(*prefix, *prompt_of(6, seed=4 + i)) for i in range(5)]
    engine.run(*(request_of(str(i), prompt, 6) for i, prompt in enumerate(prompts)))
    num_computed = sum(len(p) - cached_tokens(engine, str(i)) for i, p in enumerate(prompts))
    assert num_computed < len(prefix) + 5 * (6 + PLAN.page_size)
    for i, prompt in enumerate(prompts):
        e2b.assert_greedy(prompt, engine.tokens_of(str(i)))


def test_requests_that_wait_for_a_prefix_resume_where_it_ends(e2b: TinyModel) -> None:
    # The first has long left the window at the prefix's end when the others start.
    engine = TinyEngine(e2b.runner)
    prefix = prompt_of(66, seed=3)
    prompts = [(*prefix, *prompt_of(50, seed=4 + i)) for i in range(3)]
    engine.run(*(request_of(str(i), prompt, 6) for i, prompt in enumerate(prompts)))
    assert all(cached_tokens(engine, str(i)) >= 64 for i in (1, 2))
    for i, prompt in enumerate(prompts):
        e2b.assert_greedy(prompt, engine.tokens_of(str(i)))


def test_a_scored_prompt_bypasses_the_cache_and_gets_the_same_scores_twice(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, num_prompt_logprobs=2)
    scores = []
    for name in ("first", "second"):
        engine.run(request_of(name, PROMPT, 2, sampling))
        outputs = [e for e in engine.events if isinstance(e, PromptOutput)]
        scores.append([s for e in outputs if e.request_id == name for s in e.logprobs])
    assert len(scores[0]) == len(PROMPT) - 1
    assert scores[0] == scores[1]
    assert cached_tokens(engine, "second") == 0


def test_salts_do_not_share(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    for name, salt in [("a", None), ("b", "b"), ("c", ""), ("d", "b")]:
        engine.run(replace(request_of(name, PROMPT, 2), cache_salt=salt))
    assert [cached_tokens(engine, name) for name in "abcd"] == [0, 0, 0, len(PROMPT) - 1]


@pytest.mark.parametrize("num_sliding_pages", [16, 24])
def test_tokens_stay_the_same_where_pages_are_evicted_and_requests_preempted(
    e2b: TinyModel, num_sliding_pages: int
) -> None:
    sampling = SamplingParams(max_tokens=1, seed=5, temperature=1.0)
    requests = [
        request_of(str(i), PROMPT[: 9 * (i % 5)] + prompt_of(20, seed=i), 30, sampling)
        for i in range(12)
    ]
    alone = [run_alone(e2b.runner, request) for request in requests]
    sizes = Sizes(num_pages=24, num_sliding_pages=num_sliding_pages, num_slots=4)
    engine = TinyEngine(e2b.runner, sizes)
    engine.run(*requests)
    tree = engine.scheduler.pages.tree
    assert tree.num_evicted + tree.sliding.num_points_evicted > 0
    assert engine.num_preemptions > 0
    assert [engine.tokens_of(request.request_id) for request in requests] == alone

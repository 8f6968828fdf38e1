"""A request served from the prefix tree gets what it gets cold, wherever the two part."""

from dataclasses import replace

import pytest

from jaxserve.types import PromptOutput, RequestFinished, SamplingParams
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


def cached_tokens(engine: TinyEngine, name: str) -> int:
    end = engine.end_of(name)
    assert isinstance(end, RequestFinished)
    return end.stats.num_cached_tokens


@pytest.mark.parametrize("cut", CUTS)
def test_hit_equals_miss_at_every_cut(e2b: TinyModel, cut: int) -> None:
    engine = TinyEngine(e2b.runner)
    engine.submit(request_of("first", PROMPT, 5))
    engine.step()
    engine.run_until_idle()
    other = PROMPT[:cut] + prompt_of(45 - cut, seed=1)
    engine.submit(request_of("second", other, 12))
    engine.step()
    engine.run_until_idle()

    assert cached_tokens(engine, "second") == cut
    e2b.assert_greedy(other, engine.tokens_of("second"))
    assert engine.tokens_of("second") == run_alone(e2b.runner, request_of("cold", other, 12))


def test_a_prompt_again_costs_its_last_token(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    for name in ("first", "second"):
        engine.submit(request_of(name, PROMPT, 9))
        engine.step()
        engine.run_until_idle()
    assert engine.tokens_of("first") == engine.tokens_of("second")
    assert cached_tokens(engine, "first") == 0
    assert cached_tokens(engine, "second") == len(PROMPT) - 1


def test_an_answer_is_reused_as_well(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    engine.submit(request_of("turn 1", PROMPT, 20))
    engine.step()
    engine.run_until_idle()
    history = (*PROMPT, *engine.tokens_of("turn 1"), *prompt_of(5, seed=2))
    engine.submit(request_of("turn 2", history, 9))
    engine.step()
    engine.run_until_idle()
    # The last token of an answer is never computed.
    assert cached_tokens(engine, "turn 2") == len(PROMPT) + 20 - 1
    e2b.assert_greedy(history, engine.tokens_of("turn 2"))


def test_requests_that_come_together_compute_their_prefix_once(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    prefix = prompt_of(80, seed=3)
    prompts = [(*prefix, *prompt_of(6, seed=4 + i)) for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.submit(request_of(str(i), prompt, 6))
    engine.step()
    engine.run_until_idle()
    num_computed = sum(len(p) - cached_tokens(engine, str(i)) for i, p in enumerate(prompts))
    assert num_computed < len(prefix) + 5 * (6 + PLAN.page_size)
    for i, prompt in enumerate(prompts):
        e2b.assert_greedy(prompt, engine.tokens_of(str(i)))


def test_a_scored_prompt_bypasses_the_cache_and_gets_the_same_scores_twice(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, num_prompt_logprobs=2)
    scores = []
    for name in ("first", "second"):
        engine.submit(request_of(name, PROMPT, 2, sampling))
        engine.step()
        engine.run_until_idle()
        outputs = [e for e in engine.events if isinstance(e, PromptOutput)]
        scores.append([s for e in outputs if e.request_id == name for s in e.logprobs])
    assert len(scores[0]) == len(PROMPT) - 1
    assert scores[0] == scores[1]
    assert cached_tokens(engine, "second") == 0


def test_salts_do_not_share(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    for name, salt in [("a", None), ("b", "b"), ("c", ""), ("d", "b")]:
        engine.submit(replace(request_of(name, PROMPT, 2), cache_salt=salt))
        engine.step()
        engine.run_until_idle()
    assert [cached_tokens(engine, name) for name in "abcd"] == [0, 0, 0, len(PROMPT) - 1]


def test_tokens_stay_the_same_where_pages_are_evicted_and_requests_preempted(
    e2b: TinyModel,
) -> None:
    sampling = SamplingParams(max_tokens=1, seed=5, temperature=1.0)
    requests = [
        request_of(str(i), PROMPT[: 9 * (i % 5)] + prompt_of(20, seed=i), 30, sampling)
        for i in range(12)
    ]
    alone = [run_alone(e2b.runner, request) for request in requests]
    engine = TinyEngine(e2b.runner, Sizes(num_pages=24, num_slots=4))
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.run_until_idle()
    assert engine.scheduler.pages.tree.num_evicted > 0
    assert engine.num_preemptions > 0
    assert [engine.tokens_of(request.request_id) for request in requests] == alone

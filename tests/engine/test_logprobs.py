"""What is told of a token is what the oracle says of it: the model's own log-softmax."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from jaxserve.device.buckets import ExtendBucket
from jaxserve.types import (
    MAX_LOGPROBS,
    GenerationRequest,
    PromptOutput,
    SamplingParams,
    TokenLogprobs,
)
from tests.checkpoints import Array, Kind
from tests.engine.conftest import TinyModels
from tests.engine.tiny import (
    CLOSE,
    PLAN,
    Sizes,
    TinyEngine,
    TinyModel,
    prompt_of,
    request_of,
    run_alone,
)

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

KINDS = get_args(Kind)

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=1, seed=1),
    "filtered": SamplingParams(max_tokens=1, seed=2, temperature=0.7, top_k=20, top_p=0.9),
    # What is told are the model's own probabilities, whatever the ids were sampled from.
    "adjusted": SamplingParams(
        max_tokens=1,
        seed=3,
        temperature=0.0,
        frequency_penalty=2.0,
        allowed_token_ids=frozenset(range(0, 1024, 5)),
    ),
}


def assert_told(logprobs: TokenLogprobs, logits_V: Array, token_id: int) -> None:
    """Compare with the oracle's logits, as far as float32 sums allow."""
    z_V = logits_V.astype(np.float64)
    expected_V = z_V - z_V.max() - np.log(np.exp(z_V - z_V.max()).sum())
    assert logprobs.token_id == token_id
    assert math.isclose(logprobs.logprob, expected_V[token_id], abs_tol=CLOSE)
    surely, perhaps = ((z_V > z_V[token_id] + shift).sum() for shift in (CLOSE, -CLOSE))
    assert surely < logprobs.rank <= perhaps
    top_ids, top_logprobs = list(logprobs.top_ids), np.array(logprobs.top_logprobs)
    assert len(set(top_ids)) == MAX_LOGPROBS
    assert (np.diff(top_logprobs) <= 0).all()
    np.testing.assert_allclose(top_logprobs, expected_V[top_ids], atol=CLOSE)
    np.testing.assert_allclose(top_logprobs, np.sort(expected_V)[::-1][:MAX_LOGPROBS], atol=CLOSE)


def engine_of(model: TinyModel, *, num_pages: int = PLAN.num_pages) -> TinyEngine:
    sizes = Sizes(num_pages=num_pages, extend_buckets=model.plan.extend_buckets)
    return TinyEngine(model.runner, sizes)


def run(model: TinyModel, *requests: GenerationRequest) -> TinyEngine:
    engine = engine_of(model)
    engine.run(*requests)
    return engine


def scored(request: GenerationRequest, num_top: int = MAX_LOGPROBS) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, num_prompt_logprobs=num_top))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scored_prompt_of_every_length(tiny_models: TinyModels, kind: Kind) -> None:
    model = tiny_models(kind)
    size = model.plan.extend_buckets[0].tokens
    lengths = {1, 2, 7, 8, 9, size - 1, size, size + 1, size + 2, 2 * size, 2 * size + 1, 119}
    for length in sorted(n for n in lengths if n < PLAN.max_model_len):
        prompt = prompt_of(length, seed=5)
        engine = run(model, scored(request_of("a", prompt, 1)))

        told, logits_TV = engine.prompt_logprobs_of("a"), model.logits(prompt)
        assert len(told) == length - 1
        for logprobs, logits_V, token_id in zip(told, logits_TV, prompt[1:], strict=False):
            assert_told(logprobs, logits_V, token_id)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_is_told_of_each_token(e2b: TinyModel, name: str) -> None:
    prompt = prompt_of(21)
    sampling = replace(SAMPLINGS[name], num_logprobs=MAX_LOGPROBS)
    engine = run(e2b, request_of("a", prompt, 20, sampling))

    ids, told = engine.tokens_of("a"), engine.logprobs_of("a")
    logits_NV = e2b.logits([*prompt, *ids])[len(prompt) - 1 : -1]
    for logprobs, logits_V, token_id in zip(told, logits_NV, ids, strict=True):
        assert_told(logprobs, logits_V, token_id)
    assert (max(logprobs.rank for logprobs in told) > 1) == (name != "greedy")


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("length", [5, 16, 17, 40, 90])
def test_to_be_told_changes_no_token(e2b: TinyModel, name: str, length: int) -> None:
    request = request_of("a", prompt_of(length), 12, SAMPLINGS[name])
    told = scored(request, num_top=2)

    plain = run_alone(e2b.runner, request)

    assert run_alone(e2b.runner, told) == plain
    told = replace(told, sampling=replace(told.sampling, num_logprobs=0))
    assert run_alone(e2b.runner, told) == plain


def mixed_requests() -> list[GenerationRequest]:
    """Scored prompts and others, told rows and others, some of which go on for long."""
    requests = []
    for i in range(10):
        sampling = list(SAMPLINGS.values())[i % len(SAMPLINGS)]
        sampling = replace(
            sampling,
            seed=i,
            num_logprobs=(None, 0, 3)[i % 3],
            num_prompt_logprobs=(4, None)[i % 2],
        )
        requests.append(request_of(str(i), prompt_of(5 + 9 * i), 36 - 2 * i, sampling))
    return requests


def assert_as_alone(model: TinyModel, engine: TinyEngine, request: GenerationRequest) -> None:
    name, sampling = request.request_id, request.sampling
    alone = run(model, request)
    assert engine.tokens_of(name) == alone.tokens_of(name)
    for told, expected in (
        (engine.logprobs_of(name), alone.logprobs_of(name)),
        (engine.prompt_logprobs_of(name), alone.prompt_logprobs_of(name)),
    ):
        assert [one.token_id for one in told] == [one.token_id for one in expected]
        assert [len(one.top_ids) for one in told] == [len(one.top_ids) for one in expected]
        np.testing.assert_allclose(
            [one.logprob for one in told], [one.logprob for one in expected], atol=CLOSE
        )
    num_told = 0 if sampling.num_logprobs is None else len(engine.tokens_of(name))
    num_scored = 0 if sampling.num_prompt_logprobs is None else len(request.prompt_ids) - 1
    assert len(engine.logprobs_of(name)) == num_told
    assert len(engine.prompt_logprobs_of(name)) == num_scored


@pytest.mark.parametrize("seed", range(2))
def test_company_changes_nothing_that_is_told(e2b: TinyModel, seed: int) -> None:
    engine, rng, requests = engine_of(e2b), np.random.default_rng(seed), mixed_requests()

    for i in rng.permutation(len(requests)):
        engine.add(requests[i])
        for _ in range(rng.integers(0, 3)):
            engine.step()
    engine.run_until_idle()

    for request in requests:
        assert_as_alone(e2b, engine, request)


@pytest.mark.parametrize("num_pages", [18, 22])
def test_preemption_repeats_and_loses_nothing_that_is_told(e2b: TinyModel, num_pages: int) -> None:
    engine, requests = engine_of(e2b, num_pages=num_pages), mixed_requests()

    engine.run(*requests)

    assert engine.num_preemptions > 0
    for request in requests:
        assert_as_alone(e2b, engine, request)


@pytest.mark.parametrize("num_pages", [22, 24])
def test_a_prompt_preempted_while_it_is_scored(e2b: TinyModel, num_pages: int) -> None:
    # Scored 8 tokens a step, it takes long enough for three rows to want two pages each meanwhile.
    buckets = (ExtendBucket(tokens=8, block=8), *PLAN.extend_buckets[1:])
    engine = TinyEngine(e2b.runner, Sizes(num_pages=num_pages, extend_buckets=buckets))
    rows = [request_of(name, prompt_of(6, seed=ord(name)), 60) for name in "abc"]
    request = scored(request_of("scored", prompt_of(118), 9), num_top=1)
    engine.add(*rows)
    engine.step()
    engine.add(request)
    while engine.num_preemptions == 0:
        engine.step()
    num_told = len(engine.prompt_logprobs_of("scored"))
    engine.run_until_idle()

    assert 0 < num_told < 117
    for one in (*rows, request):
        assert_as_alone(e2b, engine, one)
    assert all(event.logprobs for event in engine.events if isinstance(event, PromptOutput))

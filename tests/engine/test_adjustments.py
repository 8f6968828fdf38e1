"""Bans, biases and penalties on a real model: alone, in company, and after a preemption."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.device.runner import ModelRunner
from jaxserve.types import GenerationRequest, RequestFinished, SamplingParams
from tests.adjusted import adjusted
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

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1, seed=8, temperature=0.8, top_k=50, top_p=0.9)
EVEN = frozenset(range(0, 1024, 2))
PROMPT = prompt_of(9)
Tokens = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def unadjusted(e2b: TinyModel) -> tuple[int, ...]:
    """What PROMPT's greedy continuation is if nothing adjusts it."""
    return run_alone(e2b.runner, request_of("unadjusted", PROMPT, 24))


@pytest.fixture(scope="module")
def requests(unadjusted: tuple[int, ...]) -> list[GenerationRequest]:
    """Each option alone and all at once, greedy and sampled, beside rows that use none."""
    first, second, third, fourth = unadjusted[:4]
    options: dict[str, SamplingParams] = {
        "plain": GREEDY,
        "plain sampled": SAMPLED,
        "presence": replace(GREEDY, presence_penalty=1.8),
        "frequency": replace(GREEDY, frequency_penalty=0.7),
        "repetition": replace(GREEDY, repetition_penalty=1.6),
        "bias": replace(GREEDY, logit_bias=((first, -100.0), (third, -3.0), (77, 2.0))),
        "allowed": replace(GREEDY, allowed_token_ids=frozenset(range(5, 1000, 20))),
        "bad words": replace(GREEDY, bad_words=((first, second), (third,), (fourth, fourth))),
        "min tokens": replace(GREEDY, stop_token_ids=EVEN, min_tokens=7),
        "all": replace(
            GREEDY,
            presence_penalty=0.5,
            frequency_penalty=-0.4,
            repetition_penalty=1.2,
            logit_bias=tuple((i, i % 5 - 2.0) for i in range(3, 900, 4)),
            allowed_token_ids=frozenset(range(3, 900)),
            bad_words=tuple((i,) for i in range(100, 160)),
            stop_token_ids=EVEN,
            min_tokens=20,
            num_logprobs=2,
            num_prompt_logprobs=0,
        ),
        "penalties sampled": replace(SAMPLED, presence_penalty=1.5, repetition_penalty=1.3),
        "allowed sampled": replace(SAMPLED, allowed_token_ids=frozenset(range(40)), num_logprobs=1),
    }
    long = {"plain sampled", "frequency", "allowed", "min tokens", "all"}
    return [
        request_of(name, prompt_of(40 + i) if name in long else PROMPT, 24 + i, sampling)
        for i, (name, sampling) in enumerate(options.items())
    ]


def by_name(requests: list[GenerationRequest], name: str) -> GenerationRequest:
    return next(request for request in requests if request.request_id == name)


@pytest.fixture(scope="module")
def alone(e2b: TinyModel, requests: list[GenerationRequest]) -> Tokens:
    """What every request gets that has the engine to itself."""
    return {request.request_id: run_alone(e2b.runner, request) for request in requests}


def assert_likeliest(model: TinyModel, request: GenerationRequest, ids: Sequence[int]) -> None:
    """Check each id against the oracle's logits, adjusted in numpy, after those before it."""
    prompt, sampling = request.prompt_ids, request.sampling
    tolerance = CLOSE * max(sampling.repetition_penalty, 1.0)
    logits_NV = model.logits([*prompt, *ids])[len(prompt) - 1 : -1]
    for i, (logits_V, token_id) in enumerate(zip(logits_NV, ids, strict=True)):
        z_V = adjusted(logits_V, sampling, prompt, ids[:i])
        assert z_V[token_id] > z_V.max() - tolerance, f"at {i}"


def test_each_option_gives_the_likeliest_of_the_adjusted_logits(
    e2b: TinyModel, requests: list[GenerationRequest], alone: Tokens
) -> None:
    for request in requests:
        if request.sampling.temperature == 0:
            assert_likeliest(e2b, request, alone[request.request_id])


def test_each_option_matters(
    e2b: TinyModel, requests: list[GenerationRequest], alone: Tokens
) -> None:
    for request in requests:
        plain = SAMPLED if request.sampling.temperature else GREEDY
        tokens = run_alone(e2b.runner, replace(request, sampling=replace(plain, max_tokens=30)))
        ids = alone[request.request_id]
        assert (ids == tokens[: len(ids)]) != request.sampling.adjusts_logits, request.request_id


def test_min_tokens_come_before_an_end(alone: Tokens) -> None:
    *before, last = alone["min tokens"]
    assert len(before) >= 7
    assert last in EVEN
    assert not EVEN.intersection(before)


def test_sampled_ids_are_allowed_ones(alone: Tokens) -> None:
    assert set(alone["allowed sampled"]) <= set(range(40))
    assert len(set(alone["allowed sampled"])) > 5


@pytest.mark.parametrize("length", range(1, 9))
def test_a_bad_word_is_cut_before_its_last_token(
    e2b: TinyModel, unadjusted: tuple[int, ...], length: int
) -> None:
    word = unadjusted[5 : 5 + length]
    request = request_of("a", PROMPT, 24, replace(GREEDY, bad_words=(word,)))

    ids = run_alone(e2b.runner, request)

    ends = [i for i in range(length, 25) if unadjusted[i - length : i] == word]
    assert ids[: ends[0] - 1] == unadjusted[: ends[0] - 1]
    assert ids[ends[0] - 1] != unadjusted[ends[0] - 1]
    assert_likeliest(e2b, request, ids)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_allowed_ids_go_before_bad_words(e2b: TinyModel, sampling: SamplingParams) -> None:
    allowed = frozenset({40, 41})
    words = tuple((a, b) for a in allowed for b in allowed)
    asked = replace(sampling, allowed_token_ids=allowed, bad_words=words)
    ids = run_alone(e2b.runner, request_of("a", PROMPT, 12, asked))
    assert len(ids) == 12
    assert set(ids) <= allowed


class RecordedRunner(ModelRunner):
    """Keeps the requests that were given a slot again, with ids to count anew."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(model.params, model.config, model.plan, model.compiled)
        self.reopened: list[SamplingParams] = []

    def open_slot(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        if output_ids:
            self.reopened.append(sampling)
        super().open_slot(slot, sampling, prompt_ids, output_ids)


@pytest.mark.parametrize(
    ("num_pages", "num_slots"), [(PLAN.num_pages, 8), (18, 8), (24, 8), (40, 3), (17, 1)]
)
@pytest.mark.parametrize("seed", range(2))
def test_company_and_preemption_change_no_token(
    e2b: TinyModel,
    requests: list[GenerationRequest],
    alone: Tokens,
    num_pages: int,
    num_slots: int,
    seed: int,
) -> None:
    runner = RecordedRunner(e2b)
    engine = TinyEngine(runner, Sizes(num_pages=num_pages, num_slots=num_slots))
    rng = np.random.default_rng(seed)

    for i in rng.permutation(len(requests)):
        engine.add(requests[i])
        for _ in range(rng.integers(0, 3) if seed else 0):  # all at once, or joining later
            engine.step()
    engine.run_until_idle()

    for request in requests:
        name = request.request_id
        assert engine.tokens_of(name) == alone[name], name
        assert isinstance(engine.end_of(name), RequestFinished)
        num_told = 0 if request.sampling.num_logprobs is None else len(alone[name])
        assert len(engine.logprobs_of(name)) == num_told
    assert len(engine.prompt_logprobs_of("all")) == len(by_name(requests, "all").prompt_ids) - 1
    # Joining later, they share so much that few are preempted.
    if num_pages < 30 and num_slots == 8 and seed == 0:
        assert any(sampling.adjusts_logits for sampling in runner.reopened)


def test_a_slot_that_was_aborted_leaves_nothing_to_the_next(
    e2b: TinyModel, requests: list[GenerationRequest], alone: Tokens
) -> None:
    engine = TinyEngine(e2b.runner, Sizes(num_slots=1))
    for request in requests:
        # Its row is in flight when the next request takes over its slot.
        victim = replace(by_name(requests, "all"), request_id=f"before {request.request_id}")
        engine.add(victim)
        engine.step(5)
        engine.abort(victim.request_id)
        engine.run(request)
        assert engine.tokens_of(request.request_id) == alone[request.request_id]

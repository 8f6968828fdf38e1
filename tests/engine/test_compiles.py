"""Nothing is compiled while serving, whatever is asked for."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxserve.types import SamplingParams
from tests.engine.tiny import PLAN, Sizes, TinyEngine, TinyModel, prompt_of, request_of

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

SAMPLINGS = (
    SamplingParams(max_tokens=1, seed=0, temperature=0.0),
    SamplingParams(max_tokens=1, seed=1),
    SamplingParams(max_tokens=1, seed=2, top_k=300),
    SamplingParams(max_tokens=1, seed=3, top_p=0.99),
    SamplingParams(max_tokens=1, seed=4, temperature=0.5, top_k=9, top_p=0.5, min_p=0.1),
    SamplingParams(max_tokens=1, seed=5, temperature=0.0, num_logprobs=5, num_prompt_logprobs=20),
    SamplingParams(max_tokens=1, seed=6, logit_bias=((5, 1.0),), bad_words=((7,), (8, 9))),
    SamplingParams(
        max_tokens=1,
        seed=7,
        temperature=0.0,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
    ),
    SamplingParams(
        max_tokens=1,
        seed=8,
        allowed_token_ids=frozenset(range(9)),
        min_tokens=3,
        stop_token_ids=frozenset({1}),
        num_prompt_logprobs=0,
    ),
)


@pytest.fixture(scope="module")
def warm(e2b: TinyModel) -> TinyModel:
    """The model as it is when serving begins."""
    e2b.runner.warm_up()
    return e2b


@pytest.mark.parametrize("num_streams", range(1, 9))
def test_streams_of_every_sampling(
    warm: TinyModel, num_compiles: Callable[[], int], num_streams: int
) -> None:
    before = num_compiles()
    engine = TinyEngine(warm.runner)

    for i in range(num_streams):
        sampling = SAMPLINGS[(i + num_streams) % len(SAMPLINGS)]
        engine.add(request_of(str(i), prompt_of(3 + 5 * i), 6 + i, sampling))
    engine.run_until_idle()

    assert num_compiles() == before


@pytest.mark.parametrize("num_prompt_logprobs", [None, 1])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 100, PLAN.max_model_len - 1])
def test_prompts_of_every_length(
    warm: TinyModel,
    num_compiles: Callable[[], int],
    length: int,
    num_prompt_logprobs: int | None,
) -> None:
    before = num_compiles()
    engine = TinyEngine(warm.runner)

    sampling = replace(SAMPLINGS[0], num_prompt_logprobs=num_prompt_logprobs)
    engine.run(request_of("a", prompt_of(length), PLAN.max_model_len - length, sampling))

    assert num_compiles() == before


def test_aborts_and_preemption(warm: TinyModel, num_compiles: Callable[[], int]) -> None:
    before = num_compiles()
    engine = TinyEngine(warm.runner, Sizes(num_pages=18))

    for i in range(10):
        engine.add(request_of(str(i), prompt_of(20), 40, SAMPLINGS[i % len(SAMPLINGS)]))
    for i in range(0, 10, 3):
        engine.step()
        engine.abort(str(i))
    engine.run_until_idle()

    assert engine.num_preemptions > 0
    assert num_compiles() == before

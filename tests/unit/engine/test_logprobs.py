"""Who is told which log-probabilities, and when a prompt's are computed."""

import pytest

from jaxserve.types import PromptOutput, RequestFinished, SamplingParams, TokenOutput
from tests.fakes import FakeRunner, SteppedEngine, fake_generate, fake_logprobs


def prompt(length: int, first_id: int = 0) -> tuple[int, ...]:
    return tuple((first_id + i) % 97 for i in range(length))


def lengths(engine: SteppedEngine) -> list[list[int]]:
    """Tokens of each chunk of each extend."""
    return [[len(chunk.token_ids) for chunk in chunks] for chunks in engine.runner.extended]


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
def test_each_token_is_told_with_as_many_logprobs_as_are_wanted(num_logprobs: int) -> None:
    engine = SteppedEngine()
    engine.submit("plain", prompt(3), 4, seed=1)
    request = engine.submit("a", prompt(3), 5, num_logprobs=num_logprobs)
    engine.run_until_idle()

    token_ids = fake_generate(request.prompt_ids, request.sampling)
    assert engine.tokens_of("a") == token_ids
    assert engine.logprobs_of("a") == tuple(fake_logprobs(i).cut(num_logprobs) for i in token_ids)
    assert len(engine.logprobs_of("a")[0].top_ids) == num_logprobs
    for event in engine.events_of("plain"):
        assert not isinstance(event, TokenOutput) or event.logprobs == ()


def test_logprobs_of_rows_that_end_or_are_aborted_go_to_nobody() -> None:
    engine = SteppedEngine()
    stop_id = fake_generate(prompt(3), engine.submit("a", prompt(3), 9, num_logprobs=1).sampling)[3]
    engine.submit("b", prompt(3), 9, num_logprobs=1, stop_token_ids=[stop_id])
    engine.submit("c", prompt(3, 5), 9, num_logprobs=1)
    engine.step(3)
    engine.abort("c")
    engine.run_until_idle()

    for name in "abc":
        told = [logprobs.token_id for logprobs in engine.logprobs_of(name)]
        assert told == list(engine.tokens_of(name))
    assert engine.tokens_of("b") == engine.tokens_of("a")[:4]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 10, 16, 17, 33])
@pytest.mark.parametrize("num_top", [0, 2])
def test_a_prompts_tokens_after_the_first_are_scored_once_each(length: int, num_top: int) -> None:
    engine = SteppedEngine()
    request = engine.submit("a", prompt(length, 3), 2, num_prompt_logprobs=num_top)
    engine.run_until_idle()

    expected = tuple(fake_logprobs(i).cut(num_top) for i in request.prompt_ids[1:])
    assert engine.prompt_logprobs_of("a") == expected
    assert engine.tokens_of("a") == fake_generate(request.prompt_ids, request.sampling)
    assert all(event.logprobs for event in engine.events if isinstance(event, PromptOutput))


def test_a_scored_prompt_goes_by_chunks_of_the_smallest_bucket() -> None:
    engine = SteppedEngine()
    engine.submit("a", prompt(21), 1, num_prompt_logprobs=1)
    engine.run_until_idle()
    assert lengths(engine) == [[8], [8], [5]]
    targets = [chunk.targets for [chunk] in engine.runner.extended]
    assert targets == [prompt(8, 1), prompt(8, 9), prompt(4, 17)]


def test_a_last_token_that_has_none_after_it_needs_no_scoring() -> None:
    engine = SteppedEngine()
    engine.submit("a", prompt(17), 1, num_prompt_logprobs=1)
    engine.submit("b", prompt(3, 50), 1)
    engine.run_until_idle()
    # It shares its extend with the one that waited.
    assert lengths(engine) == [[8], [8], [1, 3]]
    assert len(engine.prompt_logprobs_of("a")) == 16


def test_a_scored_prompt_has_its_extends_alone_and_keeps_its_place() -> None:
    engine = SteppedEngine()
    for name, scored in (("a", None), ("b", 1), ("c", None), ("d", 0)):
        engine.submit(name, prompt(6, ord(name)), 1, num_prompt_logprobs=scored)
    engine.run_until_idle()
    firsts = [[chunk.token_ids[0] for chunk in chunks] for chunks in engine.runner.extended]
    assert firsts == [[97 % 97], [98 % 97], [99 % 97], [100 % 97]]
    ends = [event.request_id for event in engine.events if isinstance(event, RequestFinished)]
    assert ends == ["a", "b", "c", "d"]


def test_a_scored_prompt_under_way_waits_for_those_before_it_only() -> None:
    engine = SteppedEngine(FakeRunner(max_model_len=128))
    engine.submit("long", prompt(60), 1)
    engine.submit("scored", prompt(20), 1, num_prompt_logprobs=0)
    engine.submit("after", prompt(4, 70), 1)
    engine.run_until_idle()
    # The long one's last chunk leaves room in its extend, yet none that a scored prompt could use.
    assert lengths(engine) == [[32], [28], [8], [8], [4], [4]]


def test_decode_goes_on_beside_a_scored_prompt() -> None:
    engine = SteppedEngine()
    engine.submit("running", prompt(3), 30)
    engine.step(3)
    num_decodes = len(engine.runner.decoded_slots)
    engine.submit("scored", prompt(40), 1, num_prompt_logprobs=0)
    engine.step(5)
    assert len(engine.runner.decoded_slots) == num_decodes + 5
    assert len(engine.runner.extended) == 1 + 5


def test_scores_come_before_the_token_of_the_same_step() -> None:
    engine = SteppedEngine()
    engine.submit("a", prompt(8), 1, num_prompt_logprobs=0, num_logprobs=0)
    engine.submit("b", prompt(3), 1, seed=1)
    engine.run_until_idle()
    kinds = [type(event) for event in engine.events_of("a")]
    assert kinds == [PromptOutput, TokenOutput, RequestFinished]
    [first, *_] = engine.published
    assert [type(event) for event in first[1]] == kinds


@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_while_a_prompt_is_scored(num_steps: int) -> None:
    """Its prefill takes five steps; then it decodes with a step in flight."""
    engine = SteppedEngine()
    request = engine.submit("a", prompt(40), 20, num_prompt_logprobs=2)
    other = engine.submit("other", prompt(5, 50), 12, num_prompt_logprobs=0)
    engine.abort_after(num_steps, "a")

    told = engine.prompt_logprobs_of("a")
    # One chunk of 8 for each step but the one in flight.
    assert len(told) == min(8 * max(num_steps - 1, 0), 39)
    assert told == tuple(fake_logprobs(i).cut(2) for i in request.prompt_ids[1 : len(told) + 1])
    assert len(engine.prompt_logprobs_of("other")) == 4
    assert engine.tokens_of("other") == fake_generate(other.prompt_ids, other.sampling)


# Three rows take a page in every other step, so the scored prompt runs out of them on its way.
@pytest.mark.parametrize(
    ("num_pages", "is_first"), [*((n, False) for n in range(37, 43)), (37, True), (39, True)]
)
def test_a_preemption_neither_repeats_nor_loses_a_score(num_pages: int, is_first: bool) -> None:
    engine = SteppedEngine(FakeRunner(num_pages=num_pages, page_size=2, max_model_len=64))
    scored = prompt(48)
    if is_first:  # it is of a lower priority then
        engine.submit("scored", scored, 6, num_prompt_logprobs=1, num_logprobs=0, priority=1)
    rows = [engine.submit(name, prompt(4, ord(name)), 36, seed=ord(name)) for name in "abc"]
    engine.step(2)
    if not is_first:
        engine.submit("scored", scored, 6, num_prompt_logprobs=1, num_logprobs=0)
    engine.run_until_idle()

    chunks = [chunk for chunks in engine.runner.extended for chunk in chunks if chunk.targets]
    assert [chunk.start for chunk in chunks].count(0) > 1, "it gave way on its way"
    expected = tuple(fake_logprobs(i).cut(1) for i in scored[1:])
    assert engine.prompt_logprobs_of("scored") == expected
    assert engine.tokens_of("scored") == fake_generate(scored, SamplingParams(max_tokens=6, seed=0))
    for row in rows:
        assert engine.tokens_of(row.request_id) == fake_generate(row.prompt_ids, row.sampling)


def test_a_request_preempted_after_its_scores_is_not_scored_again() -> None:
    # Nine pages: two sequences of 24 tokens want twelve.
    engine = SteppedEngine(FakeRunner(num_pages=10, page_size=4, max_model_len=36))
    engine.submit("a", prompt(8), 16)
    request = engine.submit("b", prompt(8, 50), 16, num_prompt_logprobs=0, num_logprobs=2, seed=1)
    engine.run_until_idle()
    assert engine.runner.calls.count("open_slot") == 3
    assert sum(bool(chunk.targets) for chunks in engine.runner.extended for chunk in chunks) == 1
    token_ids = fake_generate(request.prompt_ids, request.sampling)
    assert engine.logprobs_of("b") == tuple(fake_logprobs(i).cut(2) for i in token_ids)
    assert len(engine.prompt_logprobs_of("b")) == 7

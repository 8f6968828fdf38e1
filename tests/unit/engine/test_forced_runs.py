"""When ids that a grammar leaves no choice about are taken in at once, and what that saves."""

import pytest

from jaxserve.engine.scheduler import Scheduler
from tests.fakes import FAKE_BUCKETS, FakeRunner, SteppedEngine, fake_generate

# The smallest extend takes 8 ms.
QUICK_DECODE_S = 0.001
SLOW_DECODE_S = 0.010
RUN = {place: 3 * place + 1 for place in range(4, 10)}


def engine_of(decode_s: float, **sizes: int) -> SteppedEngine:
    return SteppedEngine(FakeRunner(decode_s=decode_s, **sizes))  # type: ignore[arg-type]


def num_forced(engine: SteppedEngine, name: str) -> int:
    end = engine.finished(name)
    return end.stats.num_forced_tokens


def test_a_run_takes_one_extend_instead_of_its_steps() -> None:
    engine = engine_of(SLOW_DECODE_S)
    request = engine.submit("a", (5, 6, 7), 16, forced=RUN)
    engine.run_until_idle()

    assert engine.tokens_of("a") == fake_generate((5, 6, 7), request.sampling, RUN)
    # The id in flight when the run is planned is the first of it, and sampled already.
    assert num_forced(engine, "a") == len(RUN) - 1
    [_, [chunk]] = engine.runner.extended
    assert (tuple(chunk.token_ids), chunk.start, chunk.sample) == (tuple(RUN.values()), 7, True)
    assert len(engine.runner.decoded_slots) == 16 - 1 - len(RUN)
    assert b"jaxserve_guided_forced_tokens_total 5.0" in engine.metrics.render()
    # Those of the run are no part of the prompt.
    assert b"jaxserve_prompt_tokens_total 3.0" in engine.metrics.render()
    assert b"jaxserve_generation_tokens_total 16.0" in engine.metrics.render()


def test_the_ids_of_a_run_come_in_one_event() -> None:
    engine = engine_of(SLOW_DECODE_S)
    request = engine.submit("a", (5, 6, 7), 16, forced=RUN)
    engine.run_until_idle()
    sizes = [len(getattr(event, "token_ids", ())) for event in engine.events_of("a")]
    # The first of it was in flight; the last event has the others and the one sampled behind them.
    assert sizes == [1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1, 0]
    assert fake_generate((5, 6, 7), request.sampling, RUN) == engine.tokens_of("a")


def test_what_is_forced_at_the_beginning_is_computed_with_the_prompt() -> None:
    engine = engine_of(QUICK_DECODE_S)
    forced = {place: 50 + place for place in range(4)}
    request = engine.submit("a", (5, 6, 7), 8, forced=forced)
    engine.run_until_idle()

    assert engine.tokens_of("a") == fake_generate((5, 6, 7), request.sampling, forced)
    assert [tuple(chunk.token_ids) for [chunk] in engine.runner.extended] == [
        (5, 6, 7, *forced.values())
    ]
    assert len(engine.runner.decoded_slots) == 8 - 1 - len(forced)


def test_a_run_that_an_extend_takes_longer_for_is_sampled() -> None:
    engine = engine_of(QUICK_DECODE_S)
    engine.submit("a", (5, 6, 7), 16, forced=RUN)
    engine.run_until_idle()
    assert num_forced(engine, "a") == 0
    assert len(engine.runner.extended) == 1


def test_one_run_does_not_hold_up_many_rows() -> None:
    engine = engine_of(SLOW_DECODE_S, num_slots=8, num_pages=200)
    engine.submit("a", (5, 6, 7), 16, forced=RUN)
    for i in range(7):
        engine.submit(f"free{i}", (5, 6, i), 20)
    engine.run_until_idle()
    assert num_forced(engine, "a") == 0


def test_rows_that_are_forced_together_share_an_extend() -> None:
    engine = engine_of(SLOW_DECODE_S)
    names = "abcd"
    engine.scheduler.times.learn_extend(FAKE_BUCKETS[0], 0.008)
    # Two blocks hold two rows' runs: the longest ones.
    for i, name in enumerate(names):
        engine.submit(name, (5, 6, i), 16, forced={4 + j: j for j in range(i + 1)})
    engine.run_until_idle()
    assert [num_forced(engine, name) for name in names] == [0, 0, 2, 3]
    assert len(engine.runner.extended[-1]) == 2


def test_a_run_joins_an_extend_that_runs_anyway() -> None:
    engine = engine_of(QUICK_DECODE_S)
    run = {place: 40 + place for place in range(4, 8)}
    request = engine.submit("a", (5, 6, 7), 16, forced=run)
    # The first four are read, and the first of the run is in flight.
    engine.step(5)
    engine.submit("b", (8, 9), 4)
    engine.step()
    assert [tuple(chunk.token_ids) for chunk in engine.runner.extended[-1]] == [
        (8, 9),
        tuple(run.values()),
    ]
    engine.run_until_idle()
    assert engine.tokens_of("a") == fake_generate((5, 6, 7), request.sampling, run)


def test_an_id_that_may_end_the_sequence_is_sampled() -> None:
    engine = engine_of(SLOW_DECODE_S)
    request = engine.submit("a", (5, 6, 7), 16, forced=RUN, stop_token_ids=[RUN[7]])
    engine.run_until_idle()
    tokens = engine.tokens_of("a")
    assert tokens == fake_generate((5, 6, 7), request.sampling, RUN)
    assert tokens[-1] == RUN[7]
    assert num_forced(engine, "a") == 2


def test_log_probabilities_are_told_of_sampled_ids_alone() -> None:
    engine = engine_of(SLOW_DECODE_S)
    engine.submit("a", (5, 6, 7), 16, forced={0: 1, **RUN}, num_logprobs=1)
    engine.run_until_idle()
    assert num_forced(engine, "a") == 0
    assert len(engine.logprobs_of("a")) == 16


@pytest.mark.parametrize("forces_runs", [True, False])
def test_runs_can_be_turned_off(forces_runs: bool) -> None:
    engine = engine_of(SLOW_DECODE_S)
    scheduler = Scheduler(engine.runner, forces_runs=forces_runs)
    engine.core._scheduler = engine.scheduler = scheduler
    engine.submit("a", (5, 6, 7), 16, forced={0: 1, **RUN})
    engine.run_until_idle()
    assert (num_forced(engine, "a") > 0) == forces_runs

"""The loop: one step ahead, aborts in every phase, one terminal event whatever happens."""

import threading
import time
from collections.abc import Mapping

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Inbox, Stop, Submit
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineDeadError, InvariantError
from jaxserve.metrics import Metrics
from jaxserve.types import (
    GenerationRequest,
    OutputEvent,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokenOutput,
)
from tests.fakes import FakeRunner, SteppedEngine, fake_generate

PROMPT = (5, 6, 7)


def test_step_n_plus_1_is_dispatched_before_step_n_is_read() -> None:
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 4)
    engine.run_until_idle()
    calls = [call for call in engine.runner.calls if call in ("extend", "decode", "read")]
    assert calls == ["extend", "decode", "read", "decode", "read", "decode", "read", "read"]


def test_no_step_is_run_beyond_max_tokens() -> None:
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 4)
    engine.run_until_idle()
    assert len(engine.runner.decoded_slots) == 3


def test_a_step_gives_one_output_per_sequence_in_one_publish() -> None:
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 3)
    engine.submit("b", PROMPT, 3, seed=1)
    engine.run_until_idle()
    shapes = [
        [(event.request_id, type(event)) for event in events] for _, events in engine.published
    ]
    a, b = ("a", TokenOutput), ("b", TokenOutput)
    assert shapes == [[a, b], [a, b], [a, ("a", RequestFinished), b, ("b", RequestFinished)]]


def test_what_ran_past_an_end_id_is_dropped() -> None:
    sampling = SamplingParams(max_tokens=20, seed=0)
    ids = fake_generate(PROMPT, sampling)
    stop_id = ids[4]
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 20, stop_token_ids=[stop_id])
    engine.run_until_idle()
    end = engine.finished("a")
    assert end.reason == "stop"
    assert engine.tokens_of("a") == ids[: ids.index(stop_id) + 1]
    # The prompt's extend gave the first id; the decode beyond the end was in flight already.
    assert len(engine.runner.decoded_slots) == ids.index(stop_id) + 1


def test_an_end_id_as_the_last_allowed_token_is_a_stop() -> None:
    ids = fake_generate(PROMPT, SamplingParams(max_tokens=1, seed=0))
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 1, stop_token_ids=ids)
    engine.run_until_idle()
    end = engine.finished("a")
    assert end.reason == "stop"


def test_pages_of_a_row_in_flight_may_go_to_the_next_request() -> None:
    # One slot and pages for one: "b" takes over all that "a" held while a stale step of "a" is
    # queued.
    stop_id = fake_generate(PROMPT, SamplingParams(max_tokens=6, seed=0))[5]
    engine = SteppedEngine(FakeRunner(num_pages=11, num_slots=1, max_model_len=40))
    engine.submit("a", PROMPT, 30, stop_token_ids=[stop_id])
    b = engine.submit("b", (9,) * 20, 20, seed=3)
    engine.run_until_idle()
    assert engine.tokens_of("b") == fake_generate(b.prompt_ids, b.sampling)


def test_stats_say_when_a_request_ran() -> None:
    engine = SteppedEngine(FakeRunner(decode_s=0.010, extend_s_per_token=0.001))
    engine.submit("a", PROMPT, 3)
    engine.run_until_idle()
    end = engine.finished("a")
    stats = end.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (3, 0, 3)
    # The smallest bucket's 8 ms, then two decodes.
    assert stats.queue_s == 0.0
    assert stats.ttft_s == pytest.approx(0.008)
    assert stats.total_s == pytest.approx(0.028)


@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_ends_the_request_with_the_next_step(num_steps: int) -> None:
    """The passes are: prefill 1 of 2, 2 of 2, first decode, then decode with one in flight."""
    engine = SteppedEngine(
        FakeRunner(max_model_len=64, extend_buckets=(FakeRunner().extend_buckets[-1],))
    )
    request = engine.submit("a", (1,) * 40, 20)
    other = engine.submit("other", PROMPT, 12, seed=8)
    engine.abort_after(num_steps, "a")
    alone = fake_generate(request.prompt_ids, request.sampling)
    assert engine.tokens_of("a") == alone[: len(engine.tokens_of("a"))]
    assert engine.tokens_of("other") == fake_generate(other.prompt_ids, other.sampling)


def test_an_abort_of_a_waiting_request() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=1))
    engine.submit("a", PROMPT, 12)
    engine.submit("b", PROMPT, 12)
    engine.step(3)
    engine.abort("b")
    engine.step()
    end = engine.finished("b")
    assert (end.reason, end.stats.queue_s, end.stats.ttft_s) == ("abort", None, None)


def test_an_abort_of_a_preempted_request() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=10, page_size=4, max_model_len=36))
    for i, name in enumerate("ab"):
        engine.submit(name, (3 + i,) * 8, 16, seed=i)
    while engine.scheduler.roster.num_waiting == 0 or engine.scheduler.roster.num_running != 1:
        engine.step()
    engine.abort("b")
    engine.run_until_idle()
    end = engine.finished("b")
    assert end.reason == "abort"


def test_an_abort_of_an_ended_or_unknown_request_changes_nothing() -> None:
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 2)
    engine.run_until_idle()
    events = list(engine.events)
    engine.abort("a")
    engine.abort("nobody")
    engine.step()
    assert engine.events == events


def test_tokens_past_an_end_id_are_not_counted() -> None:
    ids = fake_generate(PROMPT, SamplingParams(max_tokens=20, seed=0))
    stop_id = ids[4]
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 20, stop_token_ids=[stop_id])
    engine.run_until_idle()
    num_tokens = ids.index(stop_id) + 1
    assert len(engine.runner.decoded_slots) == num_tokens  # one step too far, its id dropped
    assert f"jaxserve_generation_tokens_total {num_tokens}.0" in engine.metrics.render().decode()


def test_metrics_and_host_times_follow_the_steps() -> None:
    engine = SteppedEngine()
    engine.submit("a", PROMPT, 4)
    engine.run_until_idle()
    text = engine.metrics.render().decode()
    assert "jaxserve_generation_tokens_total 4.0" in text
    assert "jaxserve_prompt_tokens_total 3.0" in text
    assert 'jaxserve_request_success_total{finished_reason="length"} 1.0' in text
    assert "jaxserve_step_duration_seconds_count 4.0" in text
    assert "jaxserve_num_requests_running 0.0" in text
    # The fake clock moves only while the host waits for the device, and waiting is not host work.
    assert {sum(times) for times in engine.core.host_times} == {0.0}


class ThreadedEngine:
    """The loop in a thread of its own."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.inbox = Inbox()
        self.events: list[OutputEvent] = []
        self.faults: list[Exception] = []
        self.metrics = Metrics()
        self.core = EngineCore(
            runner,
            Scheduler(runner),
            self.inbox,
            publish=self.events.extend,
            on_death=self.faults.append,
            metrics=self.metrics,
            clock=runner.clock,
        )
        self.thread = threading.Thread(target=self.core.run)

    def submit(self, request_id: str, max_tokens: int = 8) -> bool:
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=PROMPT,
            sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        )
        return self.inbox.put(Submit(request=request, arrival_s=0.0))

    def run(self) -> None:
        """Run the loop to its end."""
        self.thread.start()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()

    def ends(self) -> Mapping[str, OutputEvent]:
        ends = [event for event in self.events if not isinstance(event, TokenOutput)]
        by_id = {event.request_id: event for event in ends}
        assert len(by_id) == len(ends)
        return by_id


def test_stop_lets_live_sequences_end_first() -> None:
    engine = ThreadedEngine(FakeRunner())
    engine.submit("a")
    engine.inbox.put(Stop())
    engine.run()
    assert isinstance(engine.ends()["a"], RequestFinished)
    assert engine.faults == []
    assert not engine.submit("late")


def test_an_idle_loop_sleeps_until_a_command_comes() -> None:
    engine = ThreadedEngine(FakeRunner())
    engine.thread.start()
    engine.submit("a")
    engine.inbox.put(Stop())
    engine.thread.join(timeout=30)
    # A pass for each of the 8 ids and no more than a few around them: the loop does not spin.
    assert len(engine.core.host_times) <= 12
    assert isinstance(engine.ends()["a"], RequestFinished)


@pytest.mark.parametrize(
    ("call", "number"),
    [("open_slot", 2), ("set_pages", 2), ("extend", 1), ("decode", 3), ("read", 2)],
)
def test_a_device_fault_fails_every_request_once(
    call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner(num_slots=2)
    runner.fail_at = {call: number}
    engine = ThreadedEngine(runner)
    for name in "abc":
        engine.submit(name)
    engine.run()
    ends = engine.ends()
    assert set(ends) == {"a", "b", "c"}
    for end in ends.values():
        assert isinstance(end, RequestFailed)
        assert isinstance(end.error, EngineDeadError)
    assert [str(fault) for fault in engine.faults] == [f"the device failed in {call}"]
    assert not engine.submit("late")
    assert 'finished_reason="error"} 3.0' in engine.metrics.render().decode()
    assert "The engine died" in caplog.text


def test_what_ended_before_the_fault_keeps_its_own_end() -> None:
    runner = FakeRunner()
    engine = ThreadedEngine(runner)
    engine.submit("short", max_tokens=1)
    engine.submit("long", max_tokens=9)
    # The third read is of the step after the one that ended "short".
    runner.fail_at = {"read": 3}
    engine.run()
    assert isinstance(engine.ends()["short"], RequestFinished)
    assert isinstance(engine.ends()["long"], RequestFailed)


def test_a_fault_in_a_command_does_not_lose_the_commands_behind_it() -> None:
    engine = ThreadedEngine(FakeRunner())
    for name in ("a", "a", "b"):  # a live id again is our bug
        engine.submit(name)
    engine.run()
    assert isinstance(engine.faults[0], InvariantError)
    assert {name: type(end) for name, end in engine.ends().items()} == {
        "a": RequestFailed,
        "b": RequestFailed,
    }


def test_a_fault_within_a_submit_does_not_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SteppedEngine()

    def fail(request: Request) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.scheduler, "add", fail)
    engine.submit("a", PROMPT, 4)
    engine.core.run()
    assert isinstance(engine.end_of("a"), RequestFailed)


def test_submits_that_race_with_death_are_refused_or_failed() -> None:
    runner = FakeRunner(num_slots=1)
    runner.fail_at = {"decode": 20}
    engine = ThreadedEngine(runner)
    accepted: list[str] = []

    def send() -> None:
        number = 0
        while engine.submit(str(number)):
            accepted.append(str(number))
            number += 1
            time.sleep(1e-4)  # else millions may come before the loop's thread has a turn

    sender = threading.Thread(target=send)
    engine.thread.start()
    sender.start()
    sender.join(timeout=30)
    engine.thread.join(timeout=30)
    assert not sender.is_alive()
    assert not engine.thread.is_alive()
    assert set(engine.ends()) == set(accepted)


def test_a_lost_page_is_found_when_idle() -> None:
    engine = SteppedEngine()
    engine.scheduler.pages.pool.allocate(1)
    engine.put(Stop())
    engine.core.run()
    assert isinstance(engine.faults[0], InvariantError)

"""Who comes first where requests have priorities, seen in the events of a stepped engine."""

from jaxserve.types import RequestFinished
from tests.fakes import FakeRunner, SteppedEngine, fake_generate


def ends(engine: SteppedEngine) -> list[str]:
    return [event.request_id for event in engine.events if isinstance(event, RequestFinished)]


def test_those_that_wait_start_in_order_of_priority_then_of_arrival() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=1))
    for name, priority in (("a", 0), ("b", 7), ("c", -1), ("d", 0), ("e", -1), ("f", 7)):
        engine.submit(name, (1, 2, 3), 3, priority=priority)
    engine.run_until_idle()
    assert ends(engine) == ["c", "e", "a", "d", "b", "f"]


def test_a_request_that_waits_is_overtaken_by_a_later_one_of_higher_priority() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=1))
    engine.submit("running", (1, 2, 3), 8, priority=5)
    engine.step(3)
    engine.submit("low", (1, 2, 3), 3, priority=5)
    engine.step()
    engine.submit("high", (1, 2, 3), 3, priority=4)
    engine.run_until_idle()
    # A slot is not taken away for a priority.
    assert ends(engine) == ["running", "high", "low"]
    assert engine.runner.calls.count("open_slot") == 3


def test_prefill_serves_the_higher_priority_first_once_both_run() -> None:
    engine = SteppedEngine(FakeRunner(max_model_len=256, num_pages=129))
    engine.submit("low", (1,) * 36, 2, priority=1)
    engine.step()
    engine.submit("high", (2,) * 100, 2, priority=0)
    engine.step()
    # The running prompt's last 4 tokens take a block; the other three go to the new one.
    assert [len(chunk.token_ids) for chunk in engine.runner.extended[-1]] == [4, 24]

    engine.submit("lower", (3,) * 100, 2, priority=2)
    engine.submit("highest", (4,) * 100, 2, priority=-1)
    engine.run_until_idle()
    assert ends(engine) == ["low", "high", "highest", "lower"]


def test_the_lowest_priority_gives_way_when_pages_run_out_however_early_it_came() -> None:
    # Nine pages: two sequences of 24 tokens want twelve.
    engine = SteppedEngine(FakeRunner(num_pages=10, page_size=4, max_model_len=36))
    low = engine.submit("low", (1,) * 8, 16, priority=1, seed=1)
    engine.step(2)
    high = engine.submit("high", (2,) * 8, 16, priority=0, seed=2)
    engine.run_until_idle()
    assert ends(engine) == ["high", "low"]
    assert engine.runner.calls.count("open_slot") == 3
    for request in (low, high):
        assert engine.tokens_of(request.request_id) == fake_generate(
            request.prompt_ids, request.sampling
        )


def test_a_preempted_request_waits_behind_higher_and_before_its_equals() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=10, num_slots=2, page_size=4, max_model_len=36))
    for name, priority in (("a", 0), ("b", 1)):
        engine.submit(name, (ord(name),) * 8, 16, priority=priority)
    engine.step(3)
    for name, priority in (("c", 0), ("d", 1)):
        engine.submit(name, (ord(name),) * 8, 16, priority=priority)
    engine.run_until_idle()
    assert engine.runner.calls.count("open_slot") > 4
    assert ends(engine) == ["a", "c", "b", "d"]


def test_many_priorities_with_pages_for_one_come_to_their_ends_in_order() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=10, num_slots=4, page_size=4, max_model_len=36))
    requests = [
        engine.submit(str(i), (i,) * 8, 28, priority=priority, seed=i)
        for i, priority in enumerate((3, 1, 2, 0, 3, 1))
    ]
    engine.run_until_idle()
    assert ends(engine) == ["3", "1", "5", "2", "0", "4"]
    for request in requests:
        assert engine.tokens_of(request.request_id) == fake_generate(
            request.prompt_ids, request.sampling
        )

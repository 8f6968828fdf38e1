"""The real loop and scheduler on some runner, driven pass by pass in the test's own thread."""

import time
from collections.abc import Callable

from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Abort, Command, Inbox, Submit
from jaxserve.engine.runner import Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.metrics import Metrics
from jaxserve.types import (
    GenerationRequest,
    OutputEvent,
    PromptOutput,
    RequestFailed,
    RequestFinished,
    TokenLogprobs,
    TokenOutput,
)


class DrivenEngine:
    """Collects what is published."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self._inbox = Inbox()
        self.metrics = Metrics()
        self.events: list[OutputEvent] = []
        self.faults: list[Exception] = []
        self.core = EngineCore(
            runner,
            scheduler,
            self._inbox,
            publish=self._keep,
            on_death=self.faults.append,
            metrics=self.metrics,
            clock=clock,
        )
        self._is_told = False

    def put(self, command: Command) -> None:
        self._inbox.put(command)
        self._is_told = True

    def add(self, *requests: GenerationRequest, arrival_s: float = 0.0) -> None:
        for request in requests:
            self.put(Submit(request=request, arrival_s=arrival_s))

    def abort(self, request_id: str) -> None:
        self.put(Abort(request_id=request_id))

    def step(self, count: int = 1) -> None:
        """Make so many passes; the loop must not be idle without a command."""
        for _ in range(count):
            self._is_told = False
            self.core.step()

    def run_until_idle(self, max_steps: int = 2_000) -> None:
        """Make passes until nothing is live, when every page must be free; fail after too many."""
        for _ in range(max_steps):
            if self.core.is_idle and not self._is_told:
                self.scheduler.check_integrity()
                self.scheduler.check_idle()
                return
            self.step()
        raise AssertionError(
            f"still live after {max_steps} steps: {self.scheduler.roster.live_ids()}"
        )

    def run(self, *requests: GenerationRequest) -> None:
        """Generate these, all submitted at once."""
        self.add(*requests)
        self.run_until_idle()

    def abort_after(self, num_steps: int, request_id: str) -> None:
        """Abort a sequence after so many passes, and run all others to their end.

        The next pass must end it, and nothing of it come after.
        """
        self.step(num_steps)
        self.abort(request_id)
        self.step()
        end = self.finished(request_id)
        assert end.reason == "abort"
        self.run_until_idle()
        assert self.end_of(request_id) is end

    def events_of(self, request_id: str) -> list[OutputEvent]:
        return [event for event in self.events if event.request_id == request_id]

    def tokens_of(self, request_id: str) -> tuple[int, ...]:
        """Published ids of a sequence."""
        outputs = (event for event in self.events_of(request_id) if isinstance(event, TokenOutput))
        return tuple(token_id for output in outputs for token_id in output.token_ids)

    def logprobs_of(self, request_id: str) -> tuple[TokenLogprobs, ...]:
        """Published log-probabilities of a sequence's output."""
        outputs = (event for event in self.events_of(request_id) if isinstance(event, TokenOutput))
        return tuple(logprobs for output in outputs for logprobs in output.logprobs)

    def prompt_logprobs_of(self, request_id: str) -> tuple[TokenLogprobs, ...]:
        """Published log-probabilities of a sequence's prompt; none after the first token's."""
        events = self.events_of(request_id)
        told = [event for event in events if isinstance(event, PromptOutput)]
        assert events[: len(told)] == told
        return tuple(logprobs for event in told for logprobs in event.logprobs)

    def end_of(self, request_id: str) -> RequestFinished | RequestFailed:
        """Return a sequence's terminal event, which must be its last and only one."""
        *outputs, end = self.events_of(request_id)
        assert all(isinstance(output, PromptOutput | TokenOutput) for output in outputs)
        assert isinstance(end, RequestFinished | RequestFailed)
        return end

    def finished(self, request_id: str) -> RequestFinished:
        """Return the end of a sequence that did not fail."""
        end = self.end_of(request_id)
        assert isinstance(end, RequestFinished)
        return end

    @property
    def num_preemptions(self) -> int:
        lines = self.metrics.render().decode().splitlines()
        value = next(line for line in lines if line.startswith("jaxserve_num_preemptions_total"))
        return int(float(value.split()[-1]))

    def _keep(self, events: list[OutputEvent]) -> None:
        self.events += events

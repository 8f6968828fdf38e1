"""The device thread's loop: commands → schedule → dispatch → settle the previous step → publish.

It owns the order of things: step N+1 is dispatched before step N's ids are read, so that the device
never waits for the host. It knows nothing of text or HTTP, and leaves what runs to the scheduler
and how to the runner.

Every sequence that was submitted gets exactly one terminal event, also when the loop dies.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.engine.batch import Batch, StepResults
from jaxserve.engine.guides import host_masks
from jaxserve.engine.inbox import Abort, Ask, Command, Inbox, Submit
from jaxserve.engine.request import Request
from jaxserve.engine.runner import PendingTokens, Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ApiError, EngineDeadError, InvariantError
from jaxserve.metrics import Metrics
from jaxserve.types import GrammarPath, OutputEvent, RequestFailed, RequestFinished

logger = logging.getLogger(__name__)

_NUM_HOST_TIMES = 4096


class HostTimes(NamedTuple):
    """Seconds of host work in one pass of the loop; waiting for the device is left out."""

    schedule_s: float
    dispatch_s: float
    settle_s: float
    publish_s: float


class _StepInFlight(NamedTuple):
    batch: Batch
    extended: PendingTokens | None
    decoded: PendingTokens | None
    dispatched_s: float


class EngineCore:
    """Runs the scheduler's steps on the runner, one step ahead."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        inbox: Inbox,
        *,
        publish: Callable[[list[OutputEvent]], None],
        on_death: Callable[[Exception], None],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire the loop.

        Args:
            runner: the device's side of a step.
            scheduler: built for the same runner.
            inbox: where commands come in.
            publish: gets each step's events; called in the loop's thread, must not raise.
            on_death: gets the fault that ended the loop, after the last publish.
            metrics: fed once a step and once a request.
            clock: seconds, the one that Submit commands are stamped with.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._publish = publish
        self._on_death = on_death
        self._metrics = metrics
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._events: list[OutputEvent] = []
        self._in_flight: _StepInFlight | None = None
        self._settled_s = 0.0
        self._num_evicted = (0, 0)
        self._is_stopping = False
        self.host_times: deque[HostTimes] = deque(maxlen=_NUM_HOST_TIMES)
        self._note_load()

    def run(self) -> None:
        """Work until told to stop, or until a fault; then end every sequence that is left."""
        try:
            while self.step():
                pass
        except Exception as fault:
            # Whatever went wrong, clients wait: each gets its terminal event before this ends.
            logger.exception("The engine died")
            try:
                self._end_all(EngineDeadError(f"the engine died: {type(fault).__name__}"))
            finally:
                self._on_death(fault)
        else:
            self._end_all(EngineDeadError("the engine has stopped"))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is live or in flight: the next pass sleeps until a command comes."""
        return self._in_flight is None and not self._scheduler.roster.has_live

    def step(self) -> bool:
        """Make one pass of the loop; False, and nothing done, once told to stop and idle."""
        if not self._take_commands():
            return False
        started_s = self._clock()
        batch = self._scheduler.schedule(started_s)
        if batch is None and self._in_flight is None and self._scheduler.roster.has_live:
            raise InvariantError("requests are live, but there is no step to run or to wait for")
        scheduled_s = self._clock()
        ahead = None if batch is None else self._dispatch(batch)
        dispatched_s = self._clock()
        waited_s = self._settle_in_flight()
        self._in_flight = ahead
        settled_s = self._clock()
        self._note_load()
        self._publish_events()
        times = HostTimes(
            scheduled_s - started_s,
            dispatched_s - scheduled_s,
            settled_s - dispatched_s - waited_s,
            self._clock() - settled_s,
        )
        self.host_times.append(times)
        self._metrics.observe_host(sum(times))
        return True

    # Commands

    def _take_commands(self) -> bool:
        """Apply what came in; sleep for it when idle. False: stop."""
        is_idle = self.is_idle
        if is_idle:
            self._scheduler.check_idle()
            if self._is_stopping:
                return False
        self._commands += self._inbox.take(block=is_idle)
        while self._commands:
            # Popped when applied: a fault in between must not lose the sequence.
            self._apply(self._commands[0])
            self._commands.popleft()
        return True

    def _apply(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            ended = self._scheduler.abort(command.request_id, self._clock(), command.reason)
            if ended is not None:
                self._events.append(ended)
        elif isinstance(command, Ask):
            command.answer.set_result(command.run(self._scheduler))
        else:
            self._is_stopping = True

    def _submit(self, command: Submit) -> None:
        try:
            self._scheduler.add(Request.from_submitted(command.request, command.arrival_s))
        except ApiError as error:
            self._events.append(RequestFailed(command.request.request_id, error))

    # A step

    def _dispatch(self, batch: Batch) -> _StepInFlight:
        """Queue a step on the device.

        The extend goes first, so that a step's ids are all there when its decode ends: running
        streams then see one even gap, decode plus chunk, and not two chunks round a decode.
        """
        for request in batch.admitted:
            self._runner.open_slot(
                request.slot, request.sampling, request.prompt_ids, request.output_ids
            )
        for request in batch.admitted:  # none of their slots has an old grammar any more
            self._open_grammar(request)
        for chunk in batch.forced:
            self._skip_ahead(chunk.request, chunk.token_ids)
        masks = host_masks((*batch.prefilled, *batch.decoded))
        if masks:
            self._runner.write_masks(masks)
        if batch.copies:
            self._runner.copy_pages(batch.copies)
        for grant in batch.page_grants:
            self._runner.set_pages(*grant)
        extended = self._runner.extend(batch.chunks) if batch.chunks else None
        decoded = self._runner.decode(batch.slots, batch.positions) if batch.slots else None
        if batch.num_looked_up:
            self._metrics.observe_looked_up(batch.num_looked_up, batch.num_cached)
        if batch.num_preempted:
            self._metrics.observe_preempted(batch.num_preempted)
        return _StepInFlight(batch, extended, decoded, self._clock())

    def _open_grammar(self, request: Request) -> None:
        guide = request.guide
        if guide is None or request.guidance is None:
            return
        request.catch_up(guide)
        is_on_device = self._runner.open_grammar(
            request.slot,
            request.guidance,
            state=guide.state,
            end_position=request.num_prompt_tokens + request.sampling.max_tokens,
            live_slots=self._scheduler.roster.running_slots,
        )
        path: GrammarPath = "device" if is_on_device else "host"
        if request.grammar_path is None:
            self._metrics.observe_guided(path)
        request.grammar_path = path

    def _skip_ahead(self, request: Request, token_ids: Sequence[int]) -> None:
        """Tell the device of ids that it takes in as known ones, where it would have sampled."""
        guide = request.guide
        if guide is not None and request.grammar_path == "device":
            request.catch_up(guide)
            self._runner.set_grammar_state(request.slot, guide.state)
        self._runner.count_tokens(request.slot, request.sampling, token_ids, request.output_ids)

    def _settle_in_flight(self) -> float:
        """Read the ids of the step in flight and keep its events; return the seconds waited."""
        step = self._in_flight
        if step is None:
            return 0.0
        batch = step.batch
        results = StepResults()
        asked_s = self._clock()
        # The device began this step when it was queued, or when it had done the one before.
        begun_s = done_s = max(step.dispatched_s, self._settled_s)
        if step.extended is not None:
            results.token_ids += step.extended.token_ids()
            extend_done_s = self._clock()
            if batch.bucket is not None:
                self._scheduler.times.learn_extend(batch.bucket, extend_done_s - done_s)
            done_s = extend_done_s
        if step.decoded is not None:
            results.token_ids += step.decoded.token_ids()
            decode_done_s = self._clock()
            self._scheduler.times.learn_decode(len(batch.slots), decode_done_s - done_s)
            done_s = decode_done_s
        self._settled_s = done_s
        if batch.wants_logprobs:
            pending = (step.extended, step.decoded)
            results.logprobs = [
                logprobs for each in pending if each is not None for logprobs in each.logprobs()
            ]
        if batch.scored is not None and step.extended is not None:
            results.target_logprobs = step.extended.target_logprobs()
        num_prefilled = sum(len(chunk.token_ids) for chunk in batch.chunks)
        num_prefilled -= sum(len(chunk.token_ids) for chunk in batch.forced)
        num_told = self._scheduler.settle(batch, results, done_s, self._events)
        self._metrics.observe_settled(done_s - begun_s, num_prefilled, num_told)
        return done_s - asked_s

    def _publish_events(self) -> None:
        """Publish this pass's events; counted first, for who reads them may read the metrics."""
        if not self._events:
            return
        for event in self._events:
            if type(event) is RequestFinished:
                self._metrics.observe_finished(
                    event.reason,
                    num_output_tokens=event.stats.num_output_tokens,
                    num_forced_tokens=event.stats.num_forced_tokens,
                    queue_s=event.stats.queue_s,
                    ttft_s=event.stats.ttft_s,
                    total_s=event.stats.total_s,
                )
            elif type(event) is RequestFailed:
                self._metrics.observe_failed()
        events, self._events = self._events, []
        self._publish(events)

    def _note_load(self) -> None:
        pages = self._scheduler.pages
        sliding = pages.tree.sliding
        num_evicted = (pages.tree.num_evicted, sliding.num_points_evicted)
        self._metrics.observe_evicted(
            num_pages=num_evicted[0] - self._num_evicted[0],
            num_points=num_evicted[1] - self._num_evicted[1],
        )
        self._num_evicted = num_evicted
        self._metrics.set_load(
            num_running=self._scheduler.roster.num_running,
            num_waiting=self._scheduler.roster.num_waiting,
        )
        self._metrics.set_pages(pages.counts, pages.sliding_counts)
        self._metrics.set_resume_points(sliding.num_points)

    # The end

    def _end_all(self, error: EngineDeadError) -> None:
        """Close the inbox; fail every sequence without a terminal event: live, taken, queued."""
        self._commands += self._inbox.close()
        submitted = []
        for command in self._commands:
            if isinstance(command, Submit):
                submitted.append(command.request.request_id)
            elif isinstance(command, Ask):
                command.answer.set_exception(error)
        # A dict keeps one of each: a fault within a Submit leaves its sequence in both places.
        failed = dict.fromkeys((*self._scheduler.roster.live_ids(), *submitted))
        self._events += [RequestFailed(request_id, error) for request_id in failed]
        self._publish_events()

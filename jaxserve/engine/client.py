"""The event loop's end of the engine: submit a sequence, read its events, drain.

It owns one stream per live sequence and the bounds of the queue. It knows nothing of steps, slots
or arrays. Everything runs on the event loop, except `deliver`, `set_status` and `status`, which any
thread may call.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

from jaxserve.engine.inbox import Abort, Ask, Inbox, Stop, Submit
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineDeadError, InvariantError, OverloadedError, UnavailableError
from jaxserve.types import TERMINAL_EVENTS, EndedBy, GenerationRequest, OutputEvent, TokenOutput

T = TypeVar("T")

Phase = Literal["fetching", "loading", "compiling", "warming", "ready", "draining", "dead"]

# A phase gives way only to one of higher rank (or its own, for progress): a loader that gets ready
# while the server drains does not undo that.
_RANK: dict[Phase, int] = {"draining": 1, "dead": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What the engine is doing; requests are accepted only when ready.

    Attributes:
        done: steps of the phase that are done (bytes loaded, programs compiled), of `total`.
        detail: text for a human.
    """

    phase: Phase
    done: int = 0
    total: int = 0
    detail: str = ""


class OutputStream:
    """The events of one sequence, for one reader; ends after the terminal event.

    A reader that lags gets the TokenOutputs it missed as one. Nobody waits for a reader: what it
    does not read is bounded by the sequence's own max_tokens.
    """

    def __init__(self, request_id: str, inbox: Inbox) -> None:
        self.request_id = request_id
        self._inbox = inbox
        self._is_aborted = False
        self._events: deque[OutputEvent] = deque()
        self._is_open = True
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputEvent:
        while not self._events:
            if not self._is_open:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        event = self._events.popleft()
        if type(event) is TokenOutput and self._events and type(self._events[0]) is TokenOutput:
            return self._merge_tokens(event)
        return event

    def _merge_tokens(self, first: TokenOutput) -> TokenOutput:
        token_ids, logprobs = list(first.token_ids), list(first.logprobs)
        while self._events and type(event := self._events[0]) is TokenOutput:
            token_ids += event.token_ids
            logprobs += event.logprobs
            self._events.popleft()
        return replace(first, token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def abort(self, reason: EndedBy = "abort") -> None:
        """Ask for the sequence's end; its terminal event still arrives. Idempotent."""
        if self._is_open and not self._is_aborted:
            self._is_aborted = True
            # Refused only by an engine that has stopped, whose last events end this stream anyway.
            self._inbox.put(Abort(request_id=self.request_id, reason=reason))

    def push(self, event: OutputEvent) -> None:
        """Append an event; a terminal one closes the stream. For EngineClient only."""
        self._events.append(event)
        if type(event) in TERMINAL_EVENTS:
            self._is_open = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineClient:
    """Submits sequences to the device thread and hands their events to their streams."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bound the queue: sequences that have no first token yet, and their prompts' tokens."""
        self._inbox = inbox
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._status = EngineStatus(phase="loading")
        self._status_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, OutputStream] = {}
        # Prompt tokens of each request that has had no event yet.
        self._waiting: dict[str, int] = {}
        self._num_waiting_tokens = 0
        self._drained = asyncio.Event()

    @property
    def status(self) -> EngineStatus:
        """What the engine is doing. Any thread."""
        return self._status

    def set_status(self, status: EngineStatus) -> None:
        """Set the status; draining and dead are not undone. Any thread."""
        with self._status_lock:
            if _RANK.get(status.phase, 0) >= _RANK.get(self._status.phase, 0):
                self._status = status

    def submit(self, requests: Sequence[GenerationRequest]) -> list[OutputStream]:
        """Queue sequences that belong together, all or none, and return their streams.

        Raises:
            UnavailableError: the engine starts or drains.
            OverloadedError: the queue has no room for them.
            EngineDeadError: the engine is gone.
        """
        self._check_accepting()
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        self._check_room(len(requests), num_tokens)
        request_ids = {request.request_id for request in requests}
        if len(request_ids) < len(requests) or not request_ids.isdisjoint(self._streams):
            raise InvariantError(f"a request id of {sorted(request_ids)} is live already")
        self._loop = asyncio.get_running_loop()
        arrival_s = self._clock()
        submits = [Submit(request=request, arrival_s=arrival_s) for request in requests]
        if not self._inbox.put(*submits):
            raise EngineDeadError("the engine has stopped")
        streams = [OutputStream(request.request_id, self._inbox) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            self._streams[request.request_id] = stream
            self._waiting[request.request_id] = len(request.prompt_ids)
        self._num_waiting_tokens += num_tokens
        return streams

    def deliver(self, events: list[OutputEvent]) -> None:
        """Hand a step's events to their streams by one wake-up of the loop. Any thread."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:
            # The loop is closed: nobody is left to read, which is no fault of the device thread.
            return

    async def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; return how many pages that were.

        This and the next two raise what `submit` raises where the engine does not serve.
        """
        return await self._ask(lambda scheduler: scheduler.flush_cache())

    async def release_session(self, session: str) -> int:
        """Drop what only this session has in the cache; return how many pages that were."""
        return await self._ask(lambda scheduler: scheduler.release_session(session))

    async def explain(self, salt: str | None, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return how many of the ids are cached, and which ids are cached at the next position."""
        return await self._ask(lambda scheduler: scheduler.explain(salt, ids))

    def keep(self, salt: str | None, ids: tuple[int, ...]) -> None:
        """Keep what is cached of these ids as long as what a session leaves."""
        now_s = self._clock()
        # Nobody waits for it, and an engine that has stopped keeps nothing.
        self._inbox.put(Ask(lambda scheduler: scheduler.keep(salt, ids, now_s), Future()))

    async def drain(self, grace_s: float | None = None) -> None:
        """Accept nothing more; return when every live sequence has ended.

        What is left after `grace_s` is aborted; None: it may take its time.
        """
        self.set_status(EngineStatus(phase="draining"))
        self._note_if_drained()
        try:
            await asyncio.wait_for(self._drained.wait(), grace_s)
        except TimeoutError:
            for stream in self._streams.values():
                stream.abort()
            await self._drained.wait()

    def stop(self) -> None:
        """Tell the device thread to leave once nothing is live."""
        self._inbox.put(Stop())

    async def _ask(self, run: Callable[[Scheduler], T]) -> T:
        self._check_accepting()
        answer: Future[T] = Future()
        # Whoever waits may give up, and the device thread answers all the same.
        answer.set_running_or_notify_cancel()
        if not self._inbox.put(Ask(run, answer)):
            raise EngineDeadError("the engine has stopped")
        return await asyncio.wrap_future(answer)

    def _check_accepting(self) -> None:
        phase = self._status.phase
        if phase == "dead":
            raise EngineDeadError("the engine has stopped")
        if phase != "ready":
            raise UnavailableError(f"the server is {phase}")

    def _check_room(self, num_sequences: int, num_tokens: int) -> None:
        if not self._waiting:
            # Larger than the bounds, it is let in alone: nothing is refused for ever.
            return
        if len(self._waiting) + num_sequences > self._max_waiting_requests:
            limit = f"{self._max_waiting_requests} sequences"
        elif self._num_waiting_tokens + num_tokens > self._max_waiting_tokens:
            limit = f"{self._max_waiting_tokens} prompt tokens"
        else:
            return
        raise OverloadedError(f"the queue is full: {limit} may wait")

    def _dispatch(self, events: list[OutputEvent]) -> None:
        for event in events:
            request_id = event.request_id
            self._num_waiting_tokens -= self._waiting.pop(request_id, 0)
            if type(event) in TERMINAL_EVENTS:
                self._streams.pop(request_id).push(event)
            else:
                self._streams[request_id].push(event)
        self._note_if_drained()

    def _note_if_drained(self) -> None:
        if not self._streams and self._status.phase in ("draining", "dead"):
            self._drained.set()

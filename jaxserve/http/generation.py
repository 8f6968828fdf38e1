"""All sequences of one HTTP request: submitted together, read as text as it comes, ended together.

It knows engine events and text, not OpenAI's JSON. Event loop only.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from jaxserve.engine.client import EngineStatus
from jaxserve.errors import UnavailableError
from jaxserve.http.choice import ChoiceText, TextDelta
from jaxserve.http.limits import CutBy
from jaxserve.openai.responses import FinishReason
from jaxserve.text.turns import TurnEvent
from jaxserve.types import (
    TERMINAL_EVENTS,
    EndedBy,
    GenerationRequest,
    GrammarPath,
    OutputEvent,
    PromptOutput,
    RequestFailed,
    RequestFinished,
    RequestStats,
    TokenOutput,
)


class EventStream(Protocol):
    """The events of one sequence; ends after the terminal one."""

    def __aiter__(self) -> AsyncIterator[OutputEvent]: ...

    def abort(self, reason: EndedBy = "abort") -> None:
        """End the sequence; its terminal event still comes. Repeating it does nothing."""


class Generator(Protocol):
    """What runs sequences."""

    def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[EventStream]:
        """Queue all sequences, or raise OverloadedError, UnavailableError or EngineDeadError."""


class Engine(Generator, Protocol):
    """What HTTP needs of the engine; EngineClient is one."""

    @property
    def status(self) -> EngineStatus:
        """What the engine is doing."""

    async def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; return how many pages that were."""

    async def release_session(self, session: str) -> int:
        """Drop what only this session has in the cache; return how many pages that were."""

    async def explain(self, salt: str | None, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return how many of the ids are cached, and which ids are cached at the next position."""

    def keep(self, salt: str | None, ids: tuple[int, ...]) -> None:
        """Keep what is cached of these ids as long as what a session leaves."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step gave a choice; its text is empty while it could still change."""

    index: int
    delta: TextDelta


@dataclass(frozen=True, slots=True)
class Ending:
    """The last thing of a choice.

    Attributes:
        parts: what was held back until the end.
        stop_reason: what ended it, where that was a stop string or one of the request's own ids.
    """

    index: int
    parts: Sequence[TurnEvent]
    reason: FinishReason
    stop_reason: str | int | None
    cut_by: CutBy | None


class Generation:
    """Runs the sequences of one request; `close` must be called, whatever happens."""

    def __init__(
        self,
        engine: Generator,
        requests: Sequence[GenerationRequest],
        choices: Sequence[ChoiceText],
        *,
        num_samples: int = 1,
        timeout_s: float | None = None,
        on_answer: Callable[[GenerationRequest, ChoiceText], None] | None = None,
    ) -> None:
        """Submit all sequences, or none where the engine refuses; choice i reads sequence i.

        So many samples in a row are of one prompt. After `timeout_s` those that have not ended are
        cut. `on_answer` gets each sequence that has come to
        its end.
        """
        self._requests = requests
        self._choices = choices
        self._num_samples = num_samples
        self._on_answer = on_answer
        self._stats: list[RequestStats | None] = [None] * len(requests)
        self._num_cached: list[int | None] = [None] * len(requests)
        self._reasons = ["abort"] * len(requests)
        self._streams = engine.submit(requests)
        self._timer = (
            None
            if timeout_s is None
            else asyncio.get_running_loop().call_later(timeout_s, self._time_out)
        )

    async def outputs(self) -> AsyncGenerator[Delta | Ending, None]:
        """Yield every choice's deltas and then its ending, as they come.

        Raises:
            ApiError: a fault ended one of the sequences; the others are of no use then.
        """
        # What answers a prompt whose scores are not all here: these precede it.
        held: list[tuple[int, TokenOutput | RequestFinished]] = []
        async with aclosing(_merge(self._streams)) as events:
            async for index, event in events:
                if isinstance(event, RequestFailed):
                    self._reasons[index] = "error"
                    raise event.error
                ready: list[tuple[int, TokenOutput | RequestFinished]] = []
                if not isinstance(event, TokenOutput):
                    # Scores, or the end of the sequence that tells them, may free what is held.
                    ready, held = held, []
                if isinstance(event, PromptOutput):
                    self._choices[index].prompt.tokens += event.logprobs
                else:
                    ready.append((index, event))
                for each in ready:
                    if not self._is_due(*each):
                        held.append(each)
                    elif (output := self._read(*each)) is not None:
                        yield output

    def close(self) -> None:
        """Abort what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.abort()

    @property
    def num_output_tokens(self) -> int:
        """Ids of all choices so far, end ids included."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_thought_tokens(self) -> int:
        """Those of them that belong to thoughts."""
        return sum(choice.num_thought_tokens for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Ids of all prompts, each counted once."""
        return sum(len(request.prompt_ids) for request in self._requests[:: self._num_samples])

    @property
    def num_cached_tokens(self) -> int:
        """Those that did not have to be computed: of each prompt, as its first sample tells."""
        return sum(number or 0 for number in self._num_cached[:: self._num_samples])

    @property
    def has_started(self) -> bool:
        """Whether any sequence that has ended was begun."""
        return any(stats is not None and stats.queue_s is not None for stats in self._stats)

    @property
    def num_forced_tokens(self) -> int:
        """Ids of sequences that have ended which a grammar left no choice about."""
        # Behind a stop string there may be more of them, which are nobody's.
        return sum(
            min(stats.num_forced_tokens, choice.num_tokens)
            for stats, choice in zip(self._stats, self._choices, strict=True)
            if stats is not None
        )

    @property
    def grammar_path(self) -> GrammarPath | None:
        """What kept the sequences to their grammar: the host, where it was any one's."""
        paths = {stats.grammar_path for stats in self._stats if stats is not None}
        return "host" if "host" in paths else "device" if "device" in paths else None

    def times_s(self) -> tuple[float, float, float]:
        """Tell when the first sequence started, the first token came, and the last sequence ended.

        Seconds from the submission on, ascending; all sequences have ended.
        """
        stats = [each for each in self._stats if each is not None]
        ended_s = max((s.total_s for s in stats), default=0.0)
        started_s = min((s.queue_s for s in stats if s.queue_s is not None), default=ended_s)
        first_s = min((s.ttft_s for s in stats if s.ttft_s is not None), default=ended_s)
        return started_s, first_s, ended_s

    def _is_due(self, index: int, event: TokenOutput | RequestFinished) -> bool:
        choice = self._choices[index]
        is_abort = isinstance(event, RequestFinished) and event.reason == "abort"
        # A choice that was cut waits for no scores: they may never come.
        return is_abort or choice.cut_by is not None or choice.prompt.are_complete

    def _read(self, index: int, event: TokenOutput | RequestFinished) -> Delta | Ending | None:
        if isinstance(event, RequestFinished):
            return self._end(index, event)
        choice = self._choices[index]
        if self._num_cached[index] is None:
            self._num_cached[index] = event.num_cached_tokens
        # Until the engine has seen the abort, ids still come after a stop string.
        if choice.is_stopped:
            return None
        delta = choice.push(event.token_ids, event.logprobs)
        if choice.is_stopped:
            self._streams[index].abort("stop")
        return Delta(index, delta)

    def _end(self, index: int, event: RequestFinished) -> Ending:
        choice = self._choices[index]
        self._stats[index] = event.stats
        self._num_cached[index] = event.stats.num_cached_tokens
        is_late = choice.cut_by in ("timeout", "repetition")
        parts = choice.finish(is_cut=is_late or event.reason != "stop")
        if is_late:
            reason: FinishReason = "length"
        elif choice.is_stopped:
            reason = "stop"
        elif event.reason == "abort":
            raise UnavailableError("The server stopped before this answer was complete.")
        else:
            reason = "length" if choice.is_muted else event.reason
        if reason == "stop" and choice.ends_in_calls:
            reason = "tool_calls"
        self._reasons[index] = choice.cut_by or reason
        if self._on_answer is not None:
            self._on_answer(self._requests[index], choice)
        return Ending(index, parts, reason, choice.stop_reason, choice.cut_by)

    def _time_out(self) -> None:
        """Cut the choices that are not over."""
        for choice, stream, stats in zip(self._choices, self._streams, self._stats, strict=True):
            if stats is None and not choice.is_stopped:
                choice.cut_by = "timeout"
                stream.abort("stop")

    def summary(self) -> str:
        """Tell of this request what a line of the log holds, as far as it has come."""
        first = next((stats for stats in self._stats if stats is not None), None)
        return (
            f"sequences={len(self._requests)} prompt={self.num_prompt_tokens}"
            f" cached={self.num_cached_tokens} output={self.num_output_tokens}"
            f" queue_ms={_ms(first.queue_s if first else None)}"
            f" ttft_ms={_ms(first.ttft_s if first else None)}"
            f" tpot_ms={_ms(_tpot_s(first) if first else None)}"
            f" reason={','.join(sorted(set(self._reasons)))}"
        )


async def _merge(streams: Sequence[EventStream]) -> AsyncGenerator[tuple[int, OutputEvent], None]:
    """Yield (index, event) of all streams, as they come."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    iterators = [aiter(stream) for stream in streams]
    waiting = {asyncio.ensure_future(anext(it)): index for index, it in enumerate(iterators)}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in [future for future in waiting if future.done()]:
                index, event = waiting.pop(future), future.result()
                if not isinstance(event, TERMINAL_EVENTS):
                    waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, event
    finally:
        for future in waiting:
            future.cancel()


def _tpot_s(stats: RequestStats) -> float | None:
    if stats.ttft_s is None or stats.num_output_tokens < 2:
        return None
    return (stats.total_s - stats.ttft_s) / (stats.num_output_tokens - 1)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"

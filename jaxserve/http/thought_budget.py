"""Thoughts of a limited length: an engine around the engine, which closes a thought in time.

Where a thought has had its tokens, the sequence goes on as another one, whose prompt is all that
there is and the marker that ends a thought; the prefix cache has nearly all of it. Its reader sees
one sequence, with the marker among its ids. Noise depends on seed and position alone, so what
follows is what one sequence would have sampled behind that marker, but for presence and frequency
penalties, which begin anew. Event loop only.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from jaxserve.errors import OverloadedError, UnavailableError
from jaxserve.http.answer_parts import with_ban
from jaxserve.http.generation import EventStream, Generator
from jaxserve.text.markers import Markers
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import (
    EndedBy,
    GenerationRequest,
    Guidance,
    OutputEvent,
    RequestFailed,
    RequestFinished,
    TokenOutput,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """An engine whose sequences think for `num_tokens` tokens, at most, behind the opening marker.

    The tokens of all thoughts of a sequence are counted together.

    Attributes:
        guidance: holds of what follows; None: what held before.
        forced: by the ids that close a thought, what has them sampled, so that they have
            log-probabilities; without it they are part of the next sequence's prompt.
    """

    engine: Generator
    num_tokens: int
    markers: Markers
    tokenizer: Tokenizer
    guidance: Guidance | None = None
    forced: Mapping[tuple[int, ...], Guidance] = field(default_factory=dict)

    def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[EventStream]:
        """Queue all sequences, or raise as the engine does."""
        closers = [self._closer_of(request) for request in requests]
        streams = self.engine.submit(
            [
                self._closed(request, closer) if closer else request
                for request, closer in zip(requests, closers, strict=True)
            ]
        )
        return [_Stream(self, *each) for each in zip(requests, streams, closers, strict=True)]

    def is_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends within a thought."""
        return self.markers.is_in_thought(prompt_ids, self.tokenizer.special_ids)

    def closer(self, last_id: int) -> tuple[int, ...]:
        """Return the ids that end a thought behind an id: with a new line, as templates do."""
        bare, with_newline = closers(self.markers, self.tokenizer)
        piece = self.tokenizer.piece(last_id)
        return bare if isinstance(piece, str) and piece.endswith("\n") else with_newline

    def continued(
        self, request: GenerationRequest, ids: Sequence[int], guidance: Guidance | None
    ) -> GenerationRequest:
        """Return what goes on behind ids, which are fewer than the request may have."""
        sampling = request.sampling
        return replace(
            request,
            request_id=f"{request.request_id}.thought",
            prompt_ids=(*request.prompt_ids, *ids),
            sampling=replace(
                with_ban(sampling, self.markers.thought_start),
                max_tokens=sampling.max_tokens - len(ids),
                min_tokens=max(0, sampling.min_tokens - len(ids)),
                num_prompt_logprobs=None,
            ),
            guidance=guidance or request.guidance,
        )

    def _closed(self, request: GenerationRequest, closer: tuple[int, ...]) -> GenerationRequest:
        """Return a request whose prompt has opened a thought, with that closed."""
        if not self.forced:
            return self.continued(request, closer, self.guidance)
        sampling = with_ban(request.sampling, self.markers.thought_start)
        return replace(request, sampling=sampling, guidance=self.forced[closer])

    def _closer_of(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return what closes a thought that the prompt has opened and that may not begin."""
        if self.num_tokens or not self.is_in_thought(request.prompt_ids):
            return ()
        closer = self.closer(request.prompt_ids[-1])
        return closer if len(closer) < request.sampling.max_tokens else ()


def closers(markers: Markers, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that can end a thought: the marker, and a new line with it."""
    newline = tokenizer.encode("\n", add_special_tokens=False)
    return (markers.thought_end,), (*newline, markers.thought_end)


class _Stream:
    """The events of one sequence, or of two that are one to their reader."""

    def __init__(
        self,
        budget: ThoughtBudget,
        request: GenerationRequest,
        stream: EventStream,
        closer: tuple[int, ...],
    ) -> None:
        self._budget = budget
        self._request = request
        self._stream = stream
        self._events = aiter(stream)
        self._next: EventStream | None = None
        told = () if budget.forced else closer
        self._ids = [*told]
        self._ready: deque[OutputEvent] = deque()
        self._is_in_thought = budget.is_in_thought(request.prompt_ids) and not closer
        self._num_left = budget.num_tokens
        self._is_aborted = False
        self._finished: RequestFinished | None = None
        if told:
            self._ready.append(TokenOutput(request.request_id, told))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputEvent:
        if self._ready:
            return self._ready.popleft()
        event = await anext(self._events)
        while self._next is not None and isinstance(event, TokenOutput):
            event = await anext(self._events)  # sampled before the engine saw the abort
        if isinstance(event, TokenOutput):
            return self._cut(event)
        if isinstance(event, RequestFailed):
            if self._next is not None:
                self._next.abort()
            return event
        if not isinstance(event, RequestFinished):
            return event
        if self._next is None:
            return self._joined(event)
        self._finished = event
        self._stream, self._next = self._next, None
        self._events = aiter(self._stream)
        return await anext(self)

    def abort(self, reason: EndedBy = "abort") -> None:
        """End the sequence; its terminal event still comes."""
        self._is_aborted = True
        self._stream.abort(reason)
        if self._next is not None:
            self._next.abort(reason)

    def _cut(self, event: TokenOutput) -> TokenOutput:
        """Take a step's ids, up to where a thought has to end."""
        for count, token_id in enumerate(event.token_ids, start=1):
            self._ids.append(token_id)
            if self._is_to_close(token_id):
                closer = self._switch(token_id)
                if closer is not None:
                    self._ids += closer
                    self._is_in_thought = False
                    return replace(
                        event,
                        token_ids=(*event.token_ids[:count], *closer),
                        logprobs=event.logprobs[:count],
                    )
        return event

    def _is_to_close(self, token_id: int) -> bool:
        markers = self._budget.markers
        if token_id == markers.thought_end:
            self._is_in_thought = False
        elif self._is_in_thought:
            self._num_left -= 1
        elif token_id == markers.thought_start:
            self._is_in_thought = True
        is_end = token_id in self._request.sampling.stop_token_ids
        return self._is_in_thought and self._num_left <= 0 and not is_end

    def _switch(self, last_id: int) -> tuple[int, ...] | None:
        """Begin the sequence that goes on; returns the ids that close the thought.

        None of them where it is to sample them itself. Returns None where the engine takes no
        further sequence, or nothing could follow: the thought goes on.
        """
        budget = self._budget
        closer = budget.closer(last_id)
        num_left = self._request.sampling.max_tokens - len(self._ids) - len(closer)
        guidance = budget.guidance
        least = 1
        if guidance is not None and guidance.ensures_complete:
            least = guidance.grammar.min_tokens or 1
        if self._is_aborted or num_left < least or self._finished is not None:
            return None
        if budget.forced:
            closer, guidance = (), budget.forced[closer]
        request = budget.continued(self._request, [*self._ids, *closer], guidance)
        try:
            [self._next] = budget.engine.submit([request])
        except (OverloadedError, UnavailableError):
            return None
        self._stream.abort("stop")
        return closer

    def _joined(self, event: RequestFinished) -> RequestFinished:
        """Tell the end of both sequences as one's."""
        if self._finished is None:
            return event
        first = self._finished.stats
        stats = replace(
            first,
            num_output_tokens=first.num_output_tokens + event.stats.num_output_tokens,
            num_forced_tokens=first.num_forced_tokens + event.stats.num_forced_tokens,
            grammar_path=event.stats.grammar_path or first.grammar_path,
            total_s=first.total_s + event.stats.total_s,
        )
        return replace(event, request_id=self._request.request_id, stats=stats)

"""One choice as its reader sees it: token ids go in, parts that are final come out.

A text completion has one part, its text; a chat's are its thoughts, its content and its calls.
However the ids are split into pushes, the joined parts are the same. No I/O.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxserve.http.limits import CutBy, LoopDetector
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.logprobs import ScoredToken
from jaxserve.openai.options import GenerationOptions
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopAutomaton, StopStrings
from jaxserve.text.turns import CallEnded, CallStarted, Content, TurnEvent, TurnParser, merge
from jaxserve.types import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class TextDelta:
    """What a push gave: parts that are final, the ids that count, and what is known of them."""

    parts: list[TurnEvent] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    tokens: list[ScoredToken] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class PromptScores:
    """How likely a prompt's tokens after the first are; the first of its sequences tells it.

    Attributes:
        num_expected: of those tokens; 0 where nobody asks.
    """

    num_expected: int
    tokens: list[TokenLogprobs] = field(default_factory=list)

    @property
    def are_complete(self) -> bool:
        """Whether all have come."""
        return len(self.tokens) >= self.num_expected


class ChoiceText:
    """Detokenizes one sequence and ends it at its first stop string.

    An id that ends the sequence is no text, nor is a stop string, unless the options include what
    ended it. No stop string ends within the first min_tokens tokens, or in anything but content.

    Attributes:
        cut_by: what else ended it, if anything did.
        call_ids: names of the calls so far, the one under way included.
        is_muted: the echo is all of it; the one token that the engine must generate is nobody's.
        token_ids: those taken, up to the one that completed a stop string.
        prompt: scores of the prompt, as far as they have come; all of its choices share them.
    """

    def __init__(
        self,
        model: ServedModel,
        options: GenerationOptions,
        sampling: SamplingParams,
        stop: StopAutomaton,
        *,
        prompt: PromptScores,
        offset: int,
        turn: TurnParser | None = None,
        max_calls: int | None = None,
        tells_limit: bool = False,
        tells_calls: bool = True,
    ) -> None:
        """`offset` is the length of the text that precedes the choice's own.

        `turn` splits what is more than content; `max_calls` and `tells_limit` are a ToolUse's.
        `tells_calls`: that it ends with calls is told as the reason of its end.
        """
        self._detokenizer = Detokenizer(
            model.tokenizer, skip_special_tokens=options.skip_special_tokens
        )
        self._stops = StopStrings(stop)
        self._includes_stop = options.include_stop
        self._end_ids = sampling.stop_token_ids
        own = frozenset(options.stop_token_ids)
        self._own_end_ids = own if options.ignore_eos else own - model.end_token_ids
        self._min_tokens = options.min_tokens
        self.is_muted = options.max_tokens == 0
        self._offset = offset
        self.token_ids: list[int] = []
        self._turn = turn
        self._max_calls = max_calls
        self._tells_limit = tells_limit
        self._tells_calls = tells_calls
        self._loop = None if options.repetition is None else LoopDetector(options.repetition)
        self.cut_by: CutBy | None = None
        self.call_ids: list[str] = []
        self.prompt = prompt

    @property
    def num_tokens(self) -> int:
        """Count the ids taken."""
        return len(self.token_ids)

    @property
    def is_stopped(self) -> bool:
        """Whether the choice is over for its reader; nothing may be pushed after that."""
        return self._stops.hit is not None or self.cut_by is not None

    @property
    def num_calls(self) -> int:
        """Calls so far, the one under way included."""
        return len(self.call_ids)

    @property
    def is_whole(self) -> bool:
        """Whether its last id is the last of a call, or of all that the model had to say."""
        return not self.is_stopped or self.cut_by in ("calls", "max_tool_calls")

    @property
    def ends_in_calls(self) -> bool:
        """Whether calls are why it ends."""
        return self._tells_calls and self.num_calls > 0

    @property
    def num_thought_tokens(self) -> int:
        """Ids of thoughts so far."""
        return 0 if self._turn is None else self._turn.num_thought_tokens

    @property
    def faults(self) -> Sequence[str]:
        """What departed from the syntax of a turn."""
        return () if self._turn is None else self._turn.faults

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the request's own stop id, that ended the choice, if one did."""
        if self._stops.hit is not None:
            return self._stops.hit
        last_id = self.token_ids[-1] if self.token_ids else None
        return last_id if last_id in self._own_end_ids else None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> TextDelta:
        """Take a step's ids; ids after the one that ends the choice do not count."""
        delta = TextDelta()
        if self.is_muted:
            return delta
        # One id at a time, because which id completed the stop string counts.
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            is_text = token_id not in self._end_ids or self._includes_stop
            # A chat's tokens are not told with their places in its text.
            text = self._detokenizer.push((token_id,)) if is_text and self._turn is None else ""
            if logprobs:
                # An id may make final, before its own text, that of the bytes in front of it.
                before = len(text) - self._detokenizer.length(token_id) if text else 0
                scored = ScoredToken(
                    token_id=token_id, offset=self._offset + before, scored=logprobs[count - 1]
                )
                delta.tokens.append(scored)
            if self._turn is not None and is_text:
                delta.parts += self._read(self._turn.push(token_id))
            elif released := self._take(text):
                delta.parts.append(Content(released))
            if self._loop is not None and self._loop.push(token_id) and not self.is_stopped:
                self.cut_by = "repetition"
            if self.is_stopped:
                token_ids = token_ids[:count]
                break
        if len(delta.parts) > 1:
            delta.parts = merge(delta.parts)
        delta.token_ids = tuple(token_ids)
        return delta

    @property
    def text_ids(self) -> list[int]:
        """The ids that the text is made of, where that is no stop string's doing."""
        ids = self.token_ids
        is_end = bool(ids) and ids[-1] in self._end_ids and not self._includes_stop
        return ids[:-1] if is_end else ids

    def finish(self, *, is_cut: bool) -> list[TurnEvent]:
        """Return what was held back; may still find a stop string in it.

        `is_cut`: the end came before the model's own.
        """
        if self._stops.hit is not None:
            return []
        if self._turn is not None:
            parts = self._read(self._turn.finish(is_cut=is_cut))
        else:
            parts = [Content(self._take(self._detokenizer.finish()))]
        # Where that completes a stop string, nothing is held any more.
        parts.append(Content(self._stops.finish()))
        return merge([part for part in parts if not isinstance(part, Content) or part.text])

    def _read(self, events: Sequence[TurnEvent]) -> list[TurnEvent]:
        """Return a turn's parts up to where the choice ends."""
        parts: list[TurnEvent] = []
        for event in events:
            if self.is_stopped:
                break
            if isinstance(event, Content):
                released = self._take(event.text)
                if released:
                    parts.append(Content(released))
                continue
            if isinstance(event, CallStarted):
                event = replace(event, id=f"call_{secrets.token_hex(12)}")
                self.call_ids.append(event.id)
            parts.append(event)
            if isinstance(event, CallEnded) and self.num_calls == self._max_calls:
                self.cut_by = "max_tool_calls" if self._tells_limit else "calls"
        return parts

    def _take(self, text: str) -> str:
        """Return what a piece of text releases."""
        self._offset += len(text)
        released = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
        if self._stops.hit is not None and self._includes_stop:
            released += self._stops.hit
        return released

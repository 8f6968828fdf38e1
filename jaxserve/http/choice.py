"""One choice as its reader sees it: token ids go in, text that is final comes out.

However the ids are split into pushes, the joined text is the same. No I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.http.served_model import ServedModel
from jaxserve.openai.logprobs import ScoredToken
from jaxserve.openai.options import GenerationOptions
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopAutomaton, StopStrings
from jaxserve.types import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class TextDelta:
    """What a push gave: text that is final, the ids that count, and what is known of them."""

    text: str = ""
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
    ended it. No stop string ends within the first min_tokens tokens.

    Attributes:
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
    ) -> None:
        """`offset` is the length of the text that precedes the choice's own."""
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
        self.prompt = prompt

    @property
    def num_tokens(self) -> int:
        """Count the ids taken."""
        return len(self.token_ids)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text; nothing may be pushed after it."""
        return self._stops.hit is not None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the request's own stop id, that ended the choice, if one did."""
        if self._stops.hit is not None:
            return self._stops.hit
        last_id = self.token_ids[-1] if self.token_ids else None
        return last_id if last_id in self._own_end_ids else None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> TextDelta:
        """Take a step's ids; ids after the one that completes a stop string do not count."""
        delta = TextDelta()
        if self.is_muted:
            return delta
        texts = []
        # One id at a time, because which id completed the stop string counts.
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            is_text = token_id not in self._end_ids or self._includes_stop
            text = self._detokenizer.push((token_id,)) if is_text else ""
            if logprobs:
                # An id may make final, before its own text, that of the bytes in front of it.
                before = len(text) - self._detokenizer.length(token_id) if text else 0
                scored = ScoredToken(
                    token_id=token_id, offset=self._offset + before, scored=logprobs[count - 1]
                )
                delta.tokens.append(scored)
            texts.append(self._take(text))
            if self.is_stopped:
                token_ids = token_ids[:count]
                break
        delta.text, delta.token_ids = "".join(texts), tuple(token_ids)
        return delta

    @property
    def text_ids(self) -> list[int]:
        """The ids that the text is made of, where that is no stop string's doing."""
        ids = self.token_ids
        is_end = bool(ids) and ids[-1] in self._end_ids and not self._includes_stop
        return ids[:-1] if is_end else ids

    def finish(self) -> str:
        """Return what was held back; may still find a stop string in it."""
        if self.is_stopped:
            return ""
        # Where that completes a stop string, nothing is held any more.
        return self._take(self._detokenizer.finish()) + self._stops.finish()

    def _take(self, text: str) -> str:
        """Return what a piece of text releases."""
        self._offset += len(text)
        released = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
        if self._stops.hit is not None and self._includes_stop:
            released += self._stops.hit
        return released

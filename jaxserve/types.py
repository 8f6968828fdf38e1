"""Values that cross threads: what a request asks of the engine, and what the engine answers.

Everything here is immutable. It knows nothing of HTTP, of text or of the device's arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.errors import ApiError

FinishReason = Literal["stop", "length", "abort"]
MAX_LOGPROBS = 20
"""Most likely tokens that are told for each position: OpenAI's limit."""

MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
"""Bad words of one sequence, and tokens of one: the device keeps them for every slot."""

BANNED = -1e30
"""A logit, or a bias, that is never chosen beside others; finite, so that no sum is NaN."""

EndedBy = Literal["stop", "abort"]
"""Why the reader of a sequence ends it: a stop string was found, or nobody wants the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What is sampled with where a request does not say; fields as in SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled; ranges are validated where the request is parsed.

    Attributes:
        max_tokens: most tokens to generate, at least 1; prompt + max_tokens fit the context.
        seed: unsigned 64-bit; with a token's position it alone decides that token's noise.
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 drops none.
        stop_token_ids: ids that end the sequence; empty when end ids are to be ignored.
        min_tokens: none of those is sampled before so many tokens.
        logit_bias: pairs of an id and what is added to its logit; an id occurs once. BANNED
            bans it.
        allowed_token_ids: the only ids that may be sampled; None: all.
        bad_words: sequences of at most MAX_BAD_WORD_TOKENS ids that never appear in the output; at
            most MAX_BAD_WORDS.
        presence_penalty: subtracted from the logits of generated ids; 0: none.
        frequency_penalty: the same times the number of their occurrences.
        repetition_penalty: divides positive logits of ids of prompt and output, and multiplies
            negative ones; 1: none.
        num_logprobs: most likely tokens to tell with each token, at most MAX_LOGPROBS, and its own
            log-probability; None: nothing.
        num_prompt_logprobs: the same for the prompt's tokens after the first.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def adjusts_logits(self) -> bool:
        """Whether ids are sampled from anything but the model's own logits."""
        return bool(
            (self.min_tokens and self.stop_token_ids)
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )


class Guide(Protocol):
    """Where one sequence is in its grammar, on the host."""

    @property
    def state(self) -> int:
        """The state as the grammar's image numbers it; -1 after an end. Only if it has one."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""
        ...

    def allowed_words(self, max_left: int | None = None) -> npt.NDArray[np.uint32]:
        """Return the tokens that may follow; bit b of word w is token 32·w + b. No end ids.

        With `max_left`, where the guide can tell, only those after which the shortest way to an end
        takes no more tokens than that, the end id included.
        """
        ...

    def forced_ids(self, limit: int) -> Sequence[int]:
        """Return the first of the ids that must follow, at most so many.

        The mask of each place allows its id alone, so they are what would be sampled; end ids may
        be among them.
        """
        ...

    def advance(self, token_id: int) -> None:
        """Go on behind a token that was sampled; one that is not allowed is an end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrammarImage:
    """A grammar's tables as the device keeps them: device/arena.py makes it and says what is in it.

    `key` names the grammar: equal keys, equal tables.
    """

    key: str
    rows_NR: npt.NDArray[np.uint32]
    num_classes: int
    first_state_word: int
    first_next_word: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grammar:
    """What a sequence has to be, compiled.

    Attributes:
        start: gives a guide at the beginning.
        image: what the device needs to do without the guide; None: it can't.
        host_reason: why there is no image, where that is known.
        min_tokens: of the shortest text with its end id; None: not known.
        loosened: names of tools whose calls are well formed, and no more, though more was asked.
    """

    start: Callable[[], Guide]
    image: GrammarImage | None = None
    host_reason: str | None = None
    min_tokens: int | None = None
    loosened: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guidance:
    """How a grammar guides one request.

    Attributes:
        end_ids: allowed exactly where the text may end; not empty.
        ensures_complete: near the end of max_tokens only what leads to an end in time is allowed.
    """

    grammar: Grammar
    end_ids: frozenset[int]
    ensures_complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    `request_id` is unique among live sequences; `prompt_ids` is not empty. Of those that wait the
    one with the least `priority` comes first, then the earliest. Only requests of one `cache_salt`
    share cached prefixes; what one with a `session` leaves in the cache is kept longer. At
    `resume_points`, positions of its prompt, later requests are likely to part from it.
    `guidance`: what the output has to be; None: anything.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    session: str | None = None
    resume_points: tuple[int, ...] = ()
    guidance: Guidance | None = None


GrammarPath = Literal["device", "host"]
"""Who keeps a sequence to its grammar: the step programs, or a guide that makes masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Counts and times of one sequence that ended; a time of None: it never got there.

    `grammar_path` is None where it had no grammar, or never ran. `num_forced_tokens` of its output
    took no step of their own: the grammar left no choice about them.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float
    grammar_path: GrammarPath | None = None
    num_forced_tokens: int = 0


class TokenLogprobs(NamedTuple):
    """How likely a token was, by the model's own logits; natural logarithms, all finite.

    Attributes:
        rank: 1 for the most likely token.
        top_ids: the most likely ids, the likeliest first, with `top_logprobs`.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def cut(self, num_top: int) -> "TokenLogprobs":
        """Keep only so many of the most likely tokens."""
        return self._replace(
            top_ids=self.top_ids[:num_top], top_logprobs=self.top_logprobs[:num_top]
        )


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Log-probabilities of the prompt's next tokens; the first event's begin with its second."""

    request_id: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens that a step added to a sequence, in order, an end id included.

    `logprobs` has one entry for each where the request asks for them, else none. The first output
    of a sequence tells how many tokens of its prompt were cached.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a sequence that ended by itself or was aborted."""

    request_id: str
    reason: FinishReason
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The last event of a sequence that a fault ended."""

    request_id: str
    error: ApiError


OutputEvent = PromptOutput | TokenOutput | RequestFinished | RequestFailed
"""Per sequence: PromptOutputs and TokenOutputs, then exactly one of the other two, always."""

TERMINAL_EVENTS = (RequestFinished, RequestFailed)

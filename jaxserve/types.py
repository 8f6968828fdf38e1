"""Values that cross threads: what a request asks of the engine, and what the engine answers.

Everything here is immutable. It knows nothing of HTTP, of text or of arrays.
"""

from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ApiError

FinishReason = Literal["stop", "length", "abort"]
EndedBy = Literal["stop", "abort"]
"""Why the reader of a sequence ends it: a stop string was found, or nobody wants the rest."""


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
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    `request_id` is unique among live sequences; `prompt_ids` is not empty.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Counts and times of one sequence that ended; a time of None: it never got there."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens that a step added to a sequence, in order, an end id included."""

    request_id: str
    token_ids: tuple[int, ...]


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


OutputEvent = TokenOutput | RequestFinished | RequestFailed
"""Per sequence: any number of TokenOutput, then exactly one of the other two, always."""

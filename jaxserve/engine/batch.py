"""What one step is to do, and what it gave: plain values between the scheduler and the loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.device.buckets import ExtendBucket, ExtendChunk
from jaxserve.engine.request import Request
from jaxserve.models.config import AttentionKind
from jaxserve.types import TokenLogprobs


class PageGrant(NamedTuple):
    """Entries [start, start + len(pages)) of a slot's page table of a kind."""

    slot: int
    start: int
    pages: list[int]
    kind: AttentionKind


class PageCopy(NamedTuple):
    """A full-attention page and a sliding one, each from its source to its destination."""

    source: int
    target: int
    sliding_source: int
    sliding_target: int


class ForcedChunk(NamedTuple):
    """A request whose next ids are certain, and the ids that are computed of it at once."""

    request: Request
    token_ids: Sequence[int]


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step, to be dispatched in this order; the scheduler fills all of it, the core only reads.

    Attributes:
        now_s: when it is planned, in seconds of the engine's clock.
        admitted: requests whose slots are to be opened.
        copies: pages to copy before anything else.
        chunks: for one extend, which `bucket` is the smallest to fit; None where it is scored.
        prefilled: the requests of those chunks that sample, in their order.
        decoded: the requests of the decode, row by row, with their slots and positions.
        scored: the request of the only chunk, where that is scored.
        forced: chunks among them that take in ids which a grammar leaves no choice about.
        num_preempted: requests that lost their pages for the sake of this step.
        num_looked_up: prompt tokens of first admissions that were looked for in the prefix tree.
        num_cached: how many of those need not be computed.
    """

    now_s: float
    admitted: list[Request] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    page_grants: list[PageGrant] = field(default_factory=list)
    chunks: list[ExtendChunk] = field(default_factory=list)
    bucket: ExtendBucket | None = None
    prefilled: list[Request] = field(default_factory=list)
    decoded: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    scored: Request | None = None
    forced: list[ForcedChunk] = field(default_factory=list)
    num_preempted: int = 0
    num_looked_up: int = 0
    num_cached: int = 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether any of its ids are to be told with their log-probabilities."""
        return any(
            request.sampling.num_logprobs is not None
            for request in (*self.prefilled, *self.decoded)
        )


@dataclass(slots=True, kw_only=True)
class StepResults:
    """What a batch gave: an entry for each request of `prefilled`, then of `decoded`.

    Attributes:
        logprobs: empty unless the batch wants them.
        target_logprobs: those of the scored chunk's targets.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    target_logprobs: list[TokenLogprobs] = field(default_factory=list)

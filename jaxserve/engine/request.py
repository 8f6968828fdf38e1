"""One live sequence: its ids, how far it is computed, what it holds. Mutable; device thread only.

Positions of a sequence of P prompt ids and G settled output ids, all half-open:

    [0, num_computed_tokens)                their KV is written, or will be by what is in flight
    [num_computed_tokens, prefill_end)      known ids that prefill still has to write
    [0, len(pages) * page_size)             covered by full-attention pages; those of
                                            [0, len(path) * page_size) are the prefix tree's, whose
                                            nodes are locked
    [sliding_start, sliding_end)            pages, not positions: covered by sliding pages, which
                                            is the window and a little before it
    [num_computed_tokens, full_start)       shared with others: computed for sliding layers alone
    [P, P + G)                              output ids that the host knows: it has read them, or a
                                            grammar leaves no choice about them
    [P + G, P + num_sampled_tokens)         output ids that only the device has, or will have
    [P, P + num_told_tokens)                output ids that are published

A decoding row always has num_computed_tokens = P + num_sampled_tokens - 1: the last sampled id is
not written yet.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.cache.node import Node, Root
from jaxserve.errors import InvariantError
from jaxserve.types import (
    GenerationRequest,
    GrammarPath,
    Guidance,
    Guide,
    RequestStats,
    SamplingParams,
)


class RequestStatus(enum.Enum):
    """Where a request is in its life; FINISHED is final and has its terminal event."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A sequence between Submit and its terminal event.

    Attributes:
        slot: row of the device's state; meaningful while RUNNING.
        prefill_end: ids that were known when the request was (re)admitted, or when more became
            known at once; the prompt's length at first.
        arrival_s: when the client submitted it. Times are seconds of the engine's clock; None:
            never got there.
        named_points: positions of the prompt that it wants resume points at.
        pages: full-attention pages of its positions, in order; those of `path` are the tree's.
        sliding_pages: those of [sliding_start, sliding_end); the tree's where a node has the same.
        root: where the path begins; locked, as the path is, while RUNNING.
        is_off_tree: another request entered the ids after `path` first.
        num_kept_pages: pages that are in the tree, and their sliding pages wherever it lacked them.
        pending_points: positions of resume points that are still to be made, ascending, and whether
            each is a spare one.
        num_copyable_tokens: computed by steps before the one that is planned.
        num_cached_tokens: prompt tokens that it need not compute, as of its first admission.
        num_scored_tokens: prompt tokens after the first whose log-probabilities are published.
        guide: has gone along with the first `num_guided_tokens` output ids; makes a mask for each
            token, where the device does not do without.
        num_told_tokens: output ids that are published.
        num_forced_tokens: output ids that became known without a step of their own.
        foreseen_place: of the id in flight among the output ids, if it is known already; else -1.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    cache_salt: str | None = None
    session: str | None = None
    named_points: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    sliding_start: int = 0
    sliding_pages: deque[int] = field(default_factory=deque)
    full_start: int = 0
    root: Root | None = None
    path: list[Node] = field(default_factory=list)
    is_off_tree: bool = False
    num_kept_pages: int = 0
    pending_points: list[tuple[int, bool]] = field(default_factory=list)
    num_copyable_tokens: int = 0
    num_cached_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    prefill_end: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_scored_tokens: int = 0
    guidance: Guidance | None = None
    grammar_path: GrammarPath | None = None
    guide: Guide | None = None
    num_guided_tokens: int = 0
    num_told_tokens: int = 0
    num_forced_tokens: int = 0
    foreseen_place: int = -1
    admitted_s: float | None = None
    first_token_s: float | None = None

    @classmethod
    def from_submitted(cls, submitted: GenerationRequest, arrival_s: float) -> "Request":
        """Make a waiting request of what the client sent."""
        return cls(
            request_id=submitted.request_id,
            prompt_ids=submitted.prompt_ids,
            sampling=submitted.sampling,
            arrival_s=arrival_s,
            priority=submitted.priority,
            cache_salt=submitted.cache_salt,
            session=submitted.session,
            named_points=submitted.resume_points,
            guidance=submitted.guidance,
            guide=None if submitted.guidance is None else submitted.guidance.grammar.start(),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output ids that the host has."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def own_pages(self) -> list[int]:
        """Its full-attention pages that are not the tree's."""
        return self.pages[len(self.path) :]

    @property
    def sliding_end(self) -> int:
        """The page after the last that it has a sliding page for."""
        return self.sliding_start + len(self.sliding_pages)

    def sliding_page(self, index: int) -> int:
        """Return its sliding page for a page of its positions; -1: it has none."""
        if self.sliding_start <= index < self.sliding_end:
            return self.sliding_pages[index - self.sliding_start]
        return -1

    def holds_of_tree(self, index: int) -> bool:
        """Say whether its sliding page for a page of its positions is the tree's."""
        return (
            index < len(self.path)
            and self.path[index].sliding_page == self.sliding_page(index) >= 0
        )

    @property
    def tip(self) -> Node:
        """The node that its next page goes below."""
        if self.root is None:
            raise InvariantError(f"request {self.request_id!r} has no place in the tree")
        return self.path[-1] if self.path else self.root

    @property
    def num_keepable_tokens(self) -> int:
        """Ids that are known and computed: what the tree may hold of it."""
        return min(self.num_known_tokens, self.num_computed_tokens)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.prefill_end

    @property
    def scores_prompt(self) -> bool:
        """Whether the next tokens to prefill are to be scored."""
        return (
            self.sampling.num_prompt_logprobs is not None
            and self.num_scored_tokens < len(self.prompt_ids) - 1
            and self.num_computed_tokens < len(self.prompt_ids) - 1
        )

    @property
    def has_tokens_to_sample(self) -> bool:
        """Whether another token may be dispatched: those in flight count against max_tokens."""
        return self.num_sampled_tokens < self.sampling.max_tokens

    @property
    def waits_for_token(self) -> bool:
        """Whether its next token needs a mask, and that the last one be read first."""
        return self.grammar_path == "host" and self.num_sampled_tokens > len(self.output_ids)

    def catch_up(self, guide: Guide) -> None:
        """Let its guide go along with the output ids that it has not seen."""
        for token_id in self.output_ids[self.num_guided_tokens :]:
            guide.advance(token_id)
        self.num_guided_tokens = len(self.output_ids)

    def foretell(self, token_ids: Sequence[int]) -> None:
        """Note output ids that are certain; what is in flight is the first of them."""
        if token_ids and self.num_sampled_tokens > len(self.output_ids):
            self.foreseen_place = len(self.output_ids)
        self.output_ids += token_ids
        self.num_sampled_tokens = max(self.num_sampled_tokens, len(self.output_ids))

    def take(self, token_id: int) -> tuple[int, ...]:
        """Take an id that was read, in order; return those to publish: with those that led to it.

        Where it was known already, it is not asked what was sampled: that id, or the logits were no
        numbers. What follows is computed from what is known.
        """
        start, place = self.num_told_tokens, self.foreseen_place
        if place < 0:
            place = len(self.output_ids)
            self.output_ids.append(token_id)
        self.foreseen_place = -1
        self.num_told_tokens = place + 1
        return tuple(self.output_ids[start : place + 1])

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known ids at positions [start, end)."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        outputs = self.output_ids[max(start - num_prompt, 0) : end - num_prompt]
        return (*self.prompt_ids[start:], *outputs)

    def stats(self, now_s: float) -> RequestStats:
        """Sum the request up, as of its end at `now_s`."""
        return RequestStats(
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_told_tokens,
            queue_s=None if self.admitted_s is None else self.admitted_s - self.arrival_s,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
            total_s=now_s - self.arrival_s,
            grammar_path=self.grammar_path,
            num_forced_tokens=min(self.num_forced_tokens, self.num_told_tokens),
        )

"""What runs in the next step: admission, decode first, prefill in chunks, preemption.

It owns every live request, the slots and the pages. It plans a step on the host's knowledge alone
(ids in flight are counted, not known) and touches no device: a Batch says what to dispatch. It
reads no clock. Device thread only.

Invariants: `_running` and `_waiting` are in order of priority, then of arrival; a slot belongs to
one running request or is free; so does a page.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.cache.pages import PagePool
from jaxserve.cache.radix import Match, RadixTree, common_length
from jaxserve.device.buckets import ExtendBucket, ExtendChunk, smallest_extend
from jaxserve.engine.request import Request, RequestStatus
from jaxserve.engine.runner import RunnerSizes
from jaxserve.engine.step_times import StepTimes
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError, InvariantError
from jaxserve.types import (
    EndedBy,
    FinishReason,
    OutputEvent,
    PromptOutput,
    RequestFinished,
    TokenLogprobs,
    TokenOutput,
)


def _order(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s


class PageGrant(NamedTuple):
    """Entries [start, start + len(pages)) of a slot's page table."""

    slot: int
    start: int
    pages: list[int]


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step, to be dispatched in this order; the scheduler fills all of it, the core only reads.

    Attributes:
        admitted: requests whose slots are to be opened.
        copies: pages to copy before anything else, source to destination.
        chunks: for one extend, which `bucket` is the smallest to fit; None where it is scored.
        prefilled: the requests of those chunks that sample, in their order.
        decoded: the requests of the decode, row by row, with their slots and positions.
        scored: the request of the only chunk, where that is scored.
        num_preempted: requests that lost their pages for the sake of this step.
        num_looked_up: prompt tokens of first admissions that were looked for in the prefix tree.
        num_cached: how many of those it had.
    """

    admitted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    page_grants: list[PageGrant] = field(default_factory=list)
    chunks: list[ExtendChunk] = field(default_factory=list)
    bucket: ExtendBucket | None = None
    prefilled: list[Request] = field(default_factory=list)
    decoded: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    scored: Request | None = None
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


class Scheduler:
    """Plans steps with `schedule` and takes their ids back with `settle`, in the same order."""

    def __init__(
        self,
        sizes: RunnerSizes,
        *,
        prefill_stall_factor: float = 1.5,
        reuses_prefixes: bool = True,
        session_grace_s: float = 60.0,
    ) -> None:
        """Let prefill beside running streams take `prefill_stall_factor` decode steps' time.

        What a request with a session leaves in the prefix tree is kept for `session_grace_s`.

        Raises:
            ConfigError: one sequence of max_model_len does not fit the pages.
        """
        self._page_size = sizes.page_size
        self._max_model_len = sizes.max_model_len
        self._buckets = sizes.extend_buckets
        self._prefill_stall_factor = prefill_stall_factor
        self._reuses_prefixes = reuses_prefixes
        self._session_grace_s = session_grace_s
        self.pool = PagePool(sizes.num_pages)
        self.tree = RadixTree(self.pool, sizes.page_size)
        self.times = StepTimes(sizes.extend_buckets)
        self._num_slots = sizes.num_slots
        self._free_slots = list(range(sizes.num_slots - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._live: dict[str, Request] = {}
        self._num_steps_in_flight = 0
        self._step = 0
        self._now_s = 0.0
        # One sequence alone always fits, so the first in order gets to its end: no deadlock.
        if self._num_pages_for(sizes.max_model_len) > self.pool.num_pages:
            raise ConfigError(
                f"{self.pool.num_pages} pages of {sizes.page_size} tokens do not hold one sequence"
                f" of max_model_len {sizes.max_model_len}"
            )

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def running_slots(self) -> set[int]:
        """Slots that running requests hold."""
        return {request.slot for request in self._running}

    @property
    def num_pages_held(self) -> int:
        """Pages that running requests hold; the others are free, or cached and can be evicted."""
        return self.pool.num_used - self.tree.num_evictable

    @property
    def _num_available(self) -> int:
        return self.pool.num_free + self.tree.num_evictable

    @property
    def has_live(self) -> bool:
        """Whether any request has had no terminal event."""
        return bool(self._live)

    def live_ids(self) -> list[str]:
        """Ids of the requests that have had no terminal event."""
        return list(self._live)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            InvalidRequestError: it could never run; it is not queued.
        """
        num_prompt_tokens, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
        if num_prompt_tokens + max_tokens > self._max_model_len:
            raise ContextLengthError(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens {max_tokens} exceed"
                f" the context of {self._max_model_len} tokens"
            )
        if num_prompt_tokens < 1 or max_tokens < 1:
            raise InvalidRequestError(
                "a sequence needs a prompt token and a max_tokens of at least 1"
            )
        if request.request_id in self._live:
            raise InvariantError(f"request id {request.request_id!r} is live already")
        self._live[request.request_id] = request
        insort_right(self._waiting, request, key=_order)

    def abort(
        self, request_id: str, now_s: float, reason: EndedBy = "abort"
    ) -> RequestFinished | None:
        """End a request at once and return its terminal event; None where it has ended already."""
        request = self._live.get(request_id)
        return None if request is None else self._finish(request, reason, now_s)

    def schedule(self, now_s: float) -> Batch | None:
        """Plan the next step, as if what is in flight had settled.

        None says that there is nothing to dispatch; if requests are live, what is in flight has to
        settle first.
        """
        self._step += 1
        self._now_s = now_s
        for request in self._running:
            request.num_copyable_tokens = request.num_computed_tokens
        batch = Batch()
        rows = self._rows_with_pages(batch)
        if rows is None:
            return None
        for request in rows:
            self._plan_row(batch, request)
        self._plan_prefill(batch, now_s)
        if not (batch.decoded or batch.chunks):
            return None
        self._num_steps_in_flight += 1
        return batch

    def settle(
        self, batch: Batch, results: StepResults, now_s: float, events: list[OutputEvent]
    ) -> int:
        """Take what the oldest unsettled batch gave; append its events.

        A request that ended while the batch was in flight ran one step too far: its id is dropped
        here. Returns how many were not.
        """
        self._num_steps_in_flight -= 1
        num_kept = 0
        if batch.scored is not None:
            self._settle_scores(batch.scored, batch.chunks[0].start, results, events)
        logprobs: Sequence[TokenLogprobs | None]
        logprobs = results.logprobs or [None] * len(results.token_ids)
        for request, token_id, scored in zip(
            (*batch.prefilled, *batch.decoded), results.token_ids, logprobs, strict=True
        ):
            if request.status is RequestStatus.FINISHED:
                continue
            num_kept += 1
            request.output_ids.append(token_id)
            if request.first_token_s is None:
                request.first_token_s = now_s
            num_top = request.sampling.num_logprobs
            told = () if num_top is None or scored is None else (scored.cut(num_top),)
            events.append(TokenOutput(request.request_id, (token_id,), told))
            self._keep_computed(request)
            if token_id in request.sampling.stop_token_ids:
                events.append(self._finish(request, "stop", now_s))
            elif len(request.output_ids) == request.sampling.max_tokens:
                events.append(self._finish(request, "length", now_s))
        return num_kept

    def check_integrity(self) -> None:
        """Raise InvariantError unless slots and pages add up to what the live requests hold."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        own = [page for request in self._running for page in request.own_pages]
        if len(set(own)) != len(own) or len(own) + self.tree.num_nodes != self.pool.num_used:
            raise InvariantError(
                f"{self.pool.num_used} pages are used, {self.tree.num_nodes} of them cached;"
                f" running requests own {sorted(own)}"
            )
        locked = {id(node) for request in self._running for node in request.path}
        if len(locked) + self.tree.num_evictable != self.tree.num_nodes:
            raise InvariantError("cached pages are locked that no running request uses")
        slots = sorted([*self._free_slots, *(request.slot for request in self._running)])
        if slots != list(range(self._num_slots)):
            raise InvariantError(f"free and running slots are {slots}, of {self._num_slots}")
        if len(self._live) != len(self._running) + len(self._waiting):
            raise InvariantError("a live request neither waits nor runs")

    def _settle_scores(
        self, request: Request, start: int, results: StepResults, events: list[OutputEvent]
    ) -> None:
        """Publish a chunk's scores, but for those that were published before a preemption."""
        num_top = request.sampling.num_prompt_logprobs
        if request.status is RequestStatus.FINISHED or num_top is None:
            return
        fresh = results.target_logprobs[request.num_scored_tokens - start :]
        request.num_scored_tokens += len(fresh)
        if fresh:
            scored = tuple(logprobs.cut(num_top) for logprobs in fresh)
            events.append(PromptOutput(request.request_id, scored))

    def check_idle(self) -> None:
        """Raise InvariantError unless every slot and page is free or cached; O(1)."""
        num_held, num_free_slots = self.num_pages_held, len(self._free_slots)
        if self._live or num_held or num_free_slots != self._num_slots:
            raise InvariantError(
                f"idle with {num_held} pages held and {num_free_slots} of {self._num_slots} slots"
            )

    # Planning a step

    def _rows_with_pages(self, batch: Batch) -> list[Request] | None:
        """Return the rows to decode, a page free for each that needs one; None: settle first.

        A page may be short only because a row in flight has ended, and a victim's ids must all be
        on the host before it can be computed anew. So preemption waits until nothing is in flight.
        """
        while True:
            rows = [
                request
                for request in self._running
                if request.num_computed_tokens >= request.prefill_end
                and request.has_tokens_to_sample
                and not request.waits_for_token
            ]
            num_short = sum(
                request.num_computed_tokens == len(request.pages) * self._page_size
                for request in rows
            )
            if num_short <= self._num_available:
                return rows
            if self._num_steps_in_flight:
                return None
            self._preempt_latest(batch)

    def _plan_row(self, batch: Batch, request: Request) -> None:
        position = request.num_computed_tokens
        self._cover(batch, request, position + 1)
        batch.decoded.append(request)
        batch.slots.append(request.slot)
        batch.positions.append(position)
        request.num_computed_tokens = position + 1
        request.num_sampled_tokens += 1

    def _plan_prefill(self, batch: Batch, now_s: float) -> None:
        """Fill one extend in order: running prefills, then the queue."""
        prefilling = [request for request in self._running if request.is_prefilling]
        if not (prefilling or self._waiting):
            return
        num_unstarted = len(prefilling) + len(self._waiting)
        bucket = self._prefill_bucket(len(batch.decoded), num_unstarted)
        num_blocks = bucket.tokens // bucket.block
        for request in prefilling:
            if not request.scores_prompt:
                num_blocks -= self._plan_chunk(batch, request, num_blocks, bucket.block)
            elif not batch.chunks:
                self._plan_scored_chunk(batch, request)
                return
        while num_blocks and self._can_admit():
            if self._waiting[0].scores_prompt:
                # It has an extend of its own, once nothing is before it.
                if not batch.chunks:
                    self._plan_scored_chunk(batch, self._admit(batch, now_s))
                return
            request = self._admit(batch, now_s)
            num_blocks -= self._plan_chunk(batch, request, num_blocks, bucket.block)
        if batch.chunks:
            lengths = [len(chunk.token_ids) for chunk in batch.chunks]
            batch.bucket = smallest_extend(self._buckets, lengths)

    def _prefill_bucket(self, num_rows: int, num_unstarted: int) -> ExtendBucket:
        """Choose how much to prefill in one step beside so many running streams.

        Their gaps come first, unless more streams than those wait for their first token: then small
        chunks would make the many wait for the few.
        """
        if num_unstarted > num_rows:
            return self._buckets[-1]
        decode_s = self.times.decode_s(num_rows)
        limit_s = 0.0 if decode_s is None else self._prefill_stall_factor * decode_s
        return self.times.largest_within(limit_s)

    def _plan_scored_chunk(self, batch: Batch, request: Request) -> None:
        """Plan the only chunk of an extend that scores its tokens, as far as pages go."""
        bucket = self._buckets[0]
        if self._plan_chunk(batch, request, bucket.tokens // bucket.block, bucket.block):
            batch.scored = request

    def _plan_chunk(self, batch: Batch, request: Request, num_blocks: int, block: int) -> int:
        """Plan the next chunk, as far as blocks and pages go; return the blocks taken."""
        start = request.num_computed_tokens
        num_covered = (len(request.pages) + self._num_available) * self._page_size
        end = min(request.prefill_end, start + num_blocks * block, num_covered)
        if end <= start:
            return 0
        self._cover(batch, request, end)
        is_last = end == request.prefill_end
        batch.chunks.append(
            ExtendChunk(
                slot=request.slot,
                token_ids=request.known_ids(start, end),
                start=start,
                sample=is_last,
                targets=request.prompt_ids[start + 1 : end + 1] if request.scores_prompt else (),
            )
        )
        request.num_computed_tokens = end
        self._keep_computed(request)
        if is_last:
            batch.prefilled.append(request)
            request.num_sampled_tokens += 1
        return -(-(end - start) // block)

    def _cover(self, batch: Batch, request: Request, end: int) -> None:
        """Give the request the pages that positions [0, end) still lack."""
        start_page = len(request.pages)
        num_missing = self._num_pages_for(end) - start_page
        if num_missing <= 0:
            return
        pages = self.tree.allocate(num_missing, self._now_s)
        if pages is None:
            raise InvariantError(f"{num_missing} pages were planned, too few can be had")
        batch.page_grants.append(PageGrant(request.slot, start_page, pages))
        request.pages += pages

    # Moving requests between the queue, the slots and their end

    def _can_admit(self) -> bool:
        """Say whether the head of the queue may start.

        Pages are taken chunk by chunk, yet a request starts only when all its known ids would fit
        beside what running prefills still lack and a page for each running row. Else it would take
        the rows' next pages, be preempted for them, and start over: work without progress. So
        prefills alone never run out of pages: rows that outgrow theirs may hold one up, until they
        end or give way.
        """
        if not (self._waiting and self._free_slots):
            return False
        if not self._running:
            return True
        num_owed = sum(
            self._num_pages_for(request.prefill_end) - len(request.pages)
            for request in self._running
            if request.is_prefilling
        )
        head = self._waiting[0]
        match = self._match(head)
        num_matched = len(match.nodes) * self._page_size + match.num_tail
        if self._is_being_computed(head, num_matched):
            return False
        # Once locked, a cached page is nobody else's to evict.
        num_to_lock = sum(node.num_locks == 0 for node in match.nodes)
        num_wanted = self._num_pages_for(head.num_known_tokens) - len(match.nodes) + num_to_lock
        return num_owed + num_wanted + len(self._running) <= self._num_available

    def _admit(self, batch: Batch, now_s: float) -> Request:
        request = self._waiting.popleft()
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.prefill_end = request.num_known_tokens
        self._reuse(batch, request)
        if request.admitted_s is None:
            request.admitted_s = now_s
            request.num_cached_tokens = request.num_computed_tokens
            if self._reuses_prefixes and not request.scores_prompt:
                batch.num_looked_up += request.num_prompt_tokens
                batch.num_cached += request.num_cached_tokens
        insort_right(self._running, request, key=_order)
        batch.admitted.append(request)
        return request

    def _preempt_latest(self, batch: Batch) -> None:
        """Send the last in order of the running back to the queue, to be computed anew.

        Its output ids are kept and prefilled with the prompt. Noise depends on seed and position
        alone, so the ids that follow are those that would have followed.
        """
        request = self._running[-1]
        if request.num_sampled_tokens != len(request.output_ids):
            raise InvariantError(f"request {request.request_id!r} is preempted with ids in flight")
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_copyable_tokens = 0
        insort_left(self._waiting, request, key=_order)
        batch.num_preempted += 1

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> RequestFinished:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._live[request.request_id]
        return RequestFinished(request.request_id, reason, request.stats(now_s))

    def _release(self, request: Request) -> None:
        """Take back the slot of a running request, and leave what it computed in the tree.

        A step in flight may still write one of the pages. The device works in order, and the next
        owner writes each position before it reads it, so the stale write is never seen.
        """
        self._running.remove(request)
        self._free_slots.append(request.slot)
        if self._reuses_prefixes:
            self._leave_computed(request)
        self.pool.release(request.own_pages)
        kept_until_s = self._now_s + self._session_grace_s if request.session else 0.0
        while request.path:
            self.tree.unlock(request.path.pop(), kept_until_s=kept_until_s)
        self.tree.unlock(request.tip)  # its root
        request.root, request.pages, request.is_off_tree = None, [], False

    # The prefix tree

    def _match(self, request: Request) -> Match:
        """Find what of a request's known ids is cached; the last one is never: it gives logits.

        A prompt that is to be scored is computed whole.
        """
        num_usable = request.num_known_tokens - 1
        if not self._reuses_prefixes or request.scores_prompt:
            num_usable = 0
        match = self.tree.match(request.cache_salt, request.known_ids(0, num_usable))
        if match.tail is not None and match.tail.ready_step >= self._step:
            # Not computed yet when this step's copies are made.
            return match._replace(tail=None, num_tail=0)
        return match

    def _is_being_computed(self, request: Request, num_matched: int) -> bool:
        """Say whether to wait for more of the request's prefix, which a running one computes."""
        if not self._reuses_prefixes or request.scores_prompt:
            return False
        num_usable = request.num_known_tokens - 1
        for other in self._running:
            is_prefilling = other.num_copyable_tokens < other.prefill_end
            if not is_prefilling or other.cache_salt != request.cache_salt:
                continue
            num_shared = common_length(
                request.known_ids(0, num_usable), other.known_ids(0, other.prefill_end)
            )
            # Less than a page is sooner computed than waited for.
            if (
                num_shared > other.num_copyable_tokens
                and num_shared - num_matched >= self._page_size
            ):
                return True
        return False

    def _reuse(self, batch: Batch, request: Request) -> None:
        """Give an admitted request what is cached of its ids: whole pages, and a copy of a part."""
        match = self._match(request)
        request.root = match.root
        self.tree.lock(match.root)
        for node in match.nodes:
            self.tree.lock(node)
        request.path = match.nodes
        request.pages = [node.page for node in match.nodes]
        request.num_computed_tokens = len(match.nodes) * self._page_size
        if request.pages:
            batch.page_grants.append(PageGrant(request.slot, 0, list(request.pages)))
        source, num_tail = self._tail_source(request, match)
        if num_tail:
            self._copy_tail(batch, request, source, num_tail)

    def _tail_source(self, request: Request, match: Match) -> tuple[int, int]:
        """Return the page that shares most with the ids after the whole pages, and how many.

        That is a page of the tree, or one that a running request is filling.
        """
        best = (-1, 0) if match.tail is None else (match.tail.page, match.num_tail)
        if not self._reuses_prefixes or request.scores_prompt:
            return best
        start = len(match.nodes) * self._page_size
        ids = request.known_ids(start, min(start + self._page_size, request.num_known_tokens - 1))
        parent = match.nodes[-1] if match.nodes else match.root
        for other in self._running:
            if other.tip is parent:
                end = min(other.num_copyable_tokens, other.num_known_tokens)
                num_tail = common_length(ids, other.known_ids(start, end))
                if num_tail > best[1]:
                    best = other.pages[len(other.path)], num_tail
        return best

    def _copy_tail(self, batch: Batch, request: Request, source: int, num_tail: int) -> None:
        """Continue a copy of a page, where there is a page for it that is not the source."""
        start_page = len(request.pages)
        pages = self.tree.allocate(1, self._now_s)
        if pages is None:
            return
        if pages[0] == source:  # evicted for its own copy: it may be continued as it is
            source = -1
        if source >= 0:
            batch.copies.append((source, pages[0]))
        batch.page_grants.append(PageGrant(request.slot, start_page, pages))
        request.pages += pages
        request.num_computed_tokens += num_tail

    def _keep_computed(self, request: Request) -> None:
        """Enter a running request's full pages in the tree, as far as their ids are known.

        Where the tree has one already, which another request computed, this one stays on pages of
        its own until it ends: on the tree's path it would hold two pages for each, which nobody
        planned for.
        """
        size = self._page_size
        while self._reuses_prefixes and not request.is_off_tree:
            start = len(request.path) * size
            if start + size > request.num_keepable_tokens:
                return
            tokens = request.known_ids(start, start + size)
            if tokens in request.tip.children:
                request.is_off_tree = True
            else:
                page = request.pages[len(request.path)]
                request.path.append(self.tree.insert(request.tip, tokens, page, self._step))

    def _leave_computed(self, request: Request) -> None:
        """Enter all pages of a request that ends; free those that the tree has already."""
        while (start := len(request.path) * self._page_size) < request.num_keepable_tokens:
            end = min(start + self._page_size, request.num_keepable_tokens)
            tokens = request.known_ids(start, end)
            num_held = request.tip.closest_child(tokens)[1]
            if end - start < self._page_size and num_held == len(tokens):
                return  # a page that goes on from there holds all of this one
            page = request.pages[len(request.path)]
            node = self.tree.insert(request.tip, tokens, page, self._step)
            if node.page != page:
                self.pool.release([page])
                request.pages[len(request.path)] = node.page
            request.path.append(node)

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

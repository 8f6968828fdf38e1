"""What runs in the next step: admission, decode first, prefill in chunks, preemption.

It owns every live request, by a roster, and what the requests have of pages. It plans a step on the
host's knowledge alone (ids in flight are counted, not known) and touches no device: a Batch says
what to dispatch. It reads no clock. Device thread only.
"""

from collections.abc import Sequence
from itertools import islice

from jaxserve.device.buckets import ExtendBucket, ExtendChunk, smallest_extend
from jaxserve.engine.batch import Batch, ForcedChunk, StepResults
from jaxserve.engine.forced_runs import ForcedRuns
from jaxserve.engine.pages import Pages
from jaxserve.engine.prefixes import Found, Prefixes
from jaxserve.engine.request import Request, RequestStatus
from jaxserve.engine.roster import Roster
from jaxserve.engine.runner import RunnerSizes
from jaxserve.engine.step_times import StepTimes
from jaxserve.errors import ContextLengthError, InvalidRequestError, InvariantError
from jaxserve.types import (
    EndedBy,
    FinishReason,
    OutputEvent,
    PromptOutput,
    RequestFinished,
    TokenLogprobs,
    TokenOutput,
)


class Scheduler:
    """Plans steps with `schedule` and takes their ids back with `settle`, in the same order."""

    def __init__(
        self,
        sizes: RunnerSizes,
        *,
        prefill_stall_factor: float = 1.5,
        reuses_prefixes: bool = True,
        session_grace_s: float = 60.0,
        forces_runs: bool = True,
    ) -> None:
        """Let prefill beside running streams take `prefill_stall_factor` decode steps' time.

        What a request with a session leaves in the prefix tree is kept for `session_grace_s`.
        `forces_runs`: ids that a grammar leaves no choice about are taken in at once, if that pays.

        Raises:
            ConfigError: one sequence of max_model_len does not fit the pages.
        """
        self._max_model_len = sizes.max_model_len
        self._buckets = sizes.extend_buckets
        self._prefill_stall_factor = prefill_stall_factor
        self.pages = Pages(sizes)
        self._prefixes = Prefixes(
            self.pages, reuses_prefixes=reuses_prefixes, session_grace_s=session_grace_s
        )
        self.times = StepTimes(sizes.extend_buckets)
        self._forced_runs = (
            ForcedRuns(sizes.extend_buckets, self.pages, self.times) if forces_runs else None
        )
        self.roster = Roster(sizes.num_slots)
        self._num_steps_in_flight = 0

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
        self.roster.add(request)
        if self._forced_runs is not None:
            self._forced_runs.begin(request)
        for other in self.roster.running:
            self._prefixes.expect(request, other)

    def abort(
        self, request_id: str, now_s: float, reason: EndedBy = "abort"
    ) -> RequestFinished | None:
        """End a request at once and return its terminal event; None where it has ended already."""
        request = self.roster.find(request_id)
        return None if request is None else self._finish(request, reason, now_s)

    def schedule(self, now_s: float) -> Batch | None:
        """Plan the next step, as if what is in flight had settled.

        None says that there is nothing to dispatch; if requests are live, what is in flight has to
        settle first.
        """
        self._prefixes.begin_step(self.roster.running)
        batch = Batch(now_s=now_s)
        rows = self._rows_with_pages(batch)
        if rows is None:
            return None
        for request in rows:
            self.pages.cover(batch, request, request.num_computed_tokens + 1)
        self._plan_prefill(batch, len(rows))
        for request in self._plan_forced(batch, rows):
            self._plan_row(batch, request)
        if batch.chunks and batch.scored is None:
            lengths = [len(chunk.token_ids) for chunk in batch.chunks]
            batch.bucket = smallest_extend(self._buckets, lengths)
        if not (batch.decoded or batch.chunks):
            return None
        self._num_steps_in_flight += 1
        return batch

    def settle(
        self, batch: Batch, results: StepResults, now_s: float, events: list[OutputEvent]
    ) -> int:
        """Take what the oldest unsettled batch gave; append its events.

        A request that ended while the batch was in flight ran one step too far: its id is dropped
        here. Returns how many ids were published.
        """
        self._num_steps_in_flight -= 1
        num_told = 0
        if batch.scored is not None:
            self._settle_scores(batch.scored, batch.chunks[0].start, results, events)
        logprobs: Sequence[TokenLogprobs | None]
        logprobs = results.logprobs or [None] * len(results.token_ids)
        for request, token_id, scored in zip(
            (*batch.prefilled, *batch.decoded), results.token_ids, logprobs, strict=True
        ):
            if request.status is RequestStatus.FINISHED:
                continue
            token_ids = request.take(token_id)
            num_told += len(token_ids)
            num_cached = None
            if request.first_token_s is None:
                request.first_token_s = now_s
                num_cached = request.num_cached_tokens
            num_top = request.sampling.num_logprobs
            told = () if num_top is None or scored is None else (scored.cut(num_top),)
            events.append(TokenOutput(request.request_id, token_ids, told, num_cached))
            self._prefixes.keep(request)
            if token_ids[-1] in request.sampling.stop_token_ids:
                events.append(self._finish(request, "stop", now_s))
            elif len(request.output_ids) == request.sampling.max_tokens:
                events.append(self._finish(request, "length", now_s))
        return num_told

    def check_integrity(self) -> None:
        """Raise InvariantError unless slots and pages add up to what the live requests hold."""
        self.pages.check_integrity(self.roster.running)
        self.roster.check_integrity()

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
        num_held = self.pages.counts.num_held + self.pages.sliding_counts.num_held
        num_free_slots, num_slots = self.roster.num_free_slots, self.roster.num_slots
        if self.roster.has_live or num_held or num_free_slots != num_slots:
            raise InvariantError(
                f"idle with {num_held} pages held and {num_free_slots} of {num_slots} slots"
            )

    # The cache, as others see it

    def release_session(self, session: str) -> int:
        """Drop what only this session has used and no request uses; return the pages freed."""
        return self.pages.tree.drop_session(session)

    def flush_cache(self) -> int:
        """Drop all that no request uses; return the pages freed, of both kinds."""
        return self.pages.tree.flush()

    def explain(self, salt: str | None, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return how many of the ids are cached, and which ids are cached at the next position.

        Of those, not all need be of use: sliding layers may have to compute some of them anew.
        """
        return self.pages.tree.continuations(salt, ids)

    def keep(self, salt: str | None, ids: tuple[int, ...], now_s: float) -> None:
        """Keep what is cached of these ids as long as what a session leaves."""
        self._prefixes.keep_longer(salt, ids, now_s)

    # Planning a step

    def _rows_with_pages(self, batch: Batch) -> list[Request] | None:
        """Return the rows to decode, pages there for all that need one; None: settle first.

        A page may be short only because a row in flight has ended, and a victim's ids must all be
        on the host before it can be computed anew. So preemption waits until nothing is in flight.
        """
        while True:
            rows = [
                request
                for request in self.roster.running
                if request.num_computed_tokens >= request.prefill_end
                and request.has_tokens_to_sample
                and not request.waits_for_token
            ]
            if self.pages.can_decode(rows):
                return rows
            if self._num_steps_in_flight:
                return None
            self._preempt_latest(batch)

    def _plan_row(self, batch: Batch, request: Request) -> None:
        """Plan a decode, for which it has the page."""
        position = request.num_computed_tokens
        batch.decoded.append(request)
        batch.slots.append(request.slot)
        batch.positions.append(position)
        request.num_computed_tokens = position + 1
        request.num_sampled_tokens += 1

    def _plan_forced(self, batch: Batch, rows: list[Request]) -> list[Request]:
        """Plan chunks of rows whose next ids are certain, where that pays; return the others."""
        if self._forced_runs is None or batch.scored is not None:
            return rows
        for run in self._forced_runs.choose(batch, rows):
            request = run.request
            if self.pages.can_cover(request) < request.num_computed_tokens + run.num_tokens:
                continue  # another one took the page
            request.foretell(run.token_ids)
            request.num_forced_tokens += run.num_saved
            request.prefill_end = request.num_known_tokens
            self._plan_chunk(batch, request, 1, run.num_tokens)
            batch.forced.append(ForcedChunk(request, batch.chunks[-1].token_ids))
        taken = {chunk.request.slot for chunk in batch.forced}
        return [request for request in rows if request.slot not in taken]

    def _plan_prefill(self, batch: Batch, num_rows: int) -> None:
        """Fill one extend in order, beside so many rows: running prefills, then the queue."""
        prefilling = [request for request in self.roster.running if request.is_prefilling]
        found = None if prefilling else self._find_for_head()
        num_left = sum(request.prefill_end - request.num_computed_tokens for request in prefilling)
        startable = islice(self.roster.waiting, self.roster.num_free_slots)
        num_left += sum(request.num_known_tokens for request in startable)
        num_left -= 0 if found is None else found.start
        if not num_left:
            return
        num_unstarted = len(prefilling) + self.roster.num_waiting
        bucket = self._prefill_bucket(num_rows, num_unstarted)
        bucket = self.times.quickest_for(num_left, bucket)
        num_blocks = bucket.tokens // bucket.block
        for request in prefilling:
            if not request.scores_prompt:
                num_blocks -= self._plan_chunk(batch, request, num_blocks, bucket.block)
            elif not batch.chunks:
                self._plan_scored_chunk(batch, request)
                return
        if prefilling and num_blocks:
            found = self._find_for_head()
        while found is not None:
            if self.roster.waiting[0].scores_prompt:
                # It has an extend of its own, once nothing is before it.
                if not batch.chunks:
                    self._plan_scored_chunk(batch, self._admit(batch, found))
                return
            request = self._admit(batch, found)
            num_blocks -= self._plan_chunk(batch, request, num_blocks, bucket.block)
            found = self._find_for_head() if num_blocks else None

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
        end = min(request.prefill_end, start + num_blocks * block, self.pages.can_cover(request))
        if end <= start:
            return 0
        self.pages.cover(batch, request, end)
        is_last = end == request.prefill_end
        batch.chunks.append(
            ExtendChunk(
                slot=request.slot,
                token_ids=request.known_ids(start, end),
                start=start,
                sample=is_last,
                full_start=request.full_start,
                targets=request.prompt_ids[start + 1 : end + 1] if request.scores_prompt else (),
            )
        )
        request.num_computed_tokens = end
        self._prefixes.keep(request)
        if is_last:
            batch.prefilled.append(request)
            request.num_sampled_tokens += 1
        return -(-(end - start) // block)

    # Taking requests in and letting them go

    def _find_for_head(self) -> Found | None:
        """Return what is cached of the head of the queue, if it may start."""
        roster = self.roster
        if not (roster.waiting and roster.num_free_slots):
            return None
        head = roster.waiting[0]
        found = self._prefixes.find(head, roster.running)
        if roster.running and (
            self._prefixes.is_being_computed(head, found, roster.running)
            or not self.pages.can_start(head, found.nodes, roster.running)
        ):
            return None
        return found

    def _admit(self, batch: Batch, found: Found) -> Request:
        request = self.roster.admit()
        request.prefill_end = request.num_known_tokens
        looks_up = self._prefixes.looks_up(request)
        self._prefixes.take(batch, request, found)
        if request.admitted_s is None:
            request.admitted_s = batch.now_s
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if looks_up:
                batch.num_looked_up += request.num_prompt_tokens
                batch.num_cached += request.num_cached_tokens
        batch.admitted.append(request)
        for other in islice(self.roster.waiting, self.roster.num_slots):
            self._prefixes.expect(other, request)
        return request

    def _preempt_latest(self, batch: Batch) -> None:
        """Send the last in order of the running back to the queue, to be computed anew.

        Its output ids are kept and prefilled with the prompt. Noise depends on seed and position
        alone, so the ids that follow are those that would have followed.
        """
        request = self.roster.running[-1]
        if request.num_sampled_tokens != len(request.output_ids):
            raise InvariantError(f"request {request.request_id!r} is preempted with ids in flight")
        self.roster.send_back(request)
        self._prefixes.leave(request, batch.now_s)
        request.num_computed_tokens = request.num_copyable_tokens = 0
        batch.num_preempted += 1

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> RequestFinished:
        was_running = request.status is RequestStatus.RUNNING
        self.roster.end(request)
        if was_running:
            self._prefixes.leave(request, now_s)
        return RequestFinished(request.request_id, reason, request.stats(now_s))

"""Ids that a grammar leaves no choice about, taken in at once instead of sampled one by one.

They are certain before the device samples them, even the one in flight, so they become known ids of
a running sequence and are computed as a prompt is: by an extend, whose last id samples the next.
Whether that is done changes how long it takes, and an id only by rounding, where two logits nearly
tie: extend and decode round in two ways (docs/decisions/0010). Device thread only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.device.buckets import ExtendBucket, smallest_extend
from jaxserve.engine.batch import Batch
from jaxserve.engine.pages import Pages
from jaxserve.engine.request import Request
from jaxserve.engine.step_times import StepTimes


class ForcedRun(NamedTuple):
    """Ids that follow the last one that was read.

    Attributes:
        num_tokens: of the chunk that takes them in: the last sampled id, whose keys and values no
            step has written yet, and those behind it.
        num_saved: steps of the sequence that it saves.
    """

    request: Request
    token_ids: Sequence[int]
    num_tokens: int
    num_saved: int


class ForcedRuns:
    """Finds forced ids, and says which of them to take in at once."""

    def __init__(self, buckets: Sequence[ExtendBucket], pages: Pages, times: StepTimes) -> None:
        self._buckets = buckets
        self._pages = pages
        self._times = times

    def begin(self, request: Request) -> None:
        """Let a new sequence's first forced ids be computed with its prompt."""
        if request.guide is not None and _may_force(request):
            ids = _up_to_end(request, request.guide.forced_ids(request.sampling.max_tokens - 1))
            request.foretell(ids)
            request.num_forced_tokens = len(ids)

    def choose(self, batch: Batch, rows: Sequence[Request]) -> list[ForcedRun]:
        """Choose among the rows of a step whose other chunks are planned.

        Those that fit an extend that runs anyway cost nothing. One for their sake holds all rows
        up: it has to save more time of rows than that takes.
        """
        lengths = [len(chunk.token_ids) for chunk in batch.chunks]
        bucket = smallest_extend(self._buckets, lengths)
        runs = [run for request in rows if (run := self._find(request)) is not None]
        chosen = []
        for run in sorted(runs, key=lambda run: -run.num_saved):
            if bucket.fits([*lengths, run.num_tokens]):
                lengths.append(run.num_tokens)
                chosen.append(run)
        return chosen if batch.chunks or self._pay(chosen, len(rows), bucket) else []

    def _find(self, request: Request) -> ForcedRun | None:
        guide = request.guide
        if guide is None or not _may_force(request):
            return None
        request.catch_up(guide)
        num_known, start = request.num_known_tokens, request.num_computed_tokens
        num_in_flight = request.num_sampled_tokens - len(request.output_ids)
        num_more = request.sampling.max_tokens - 1 - len(request.output_ids)  # one is sampled
        ids = guide.forced_ids(min(num_more, start + self._buckets[0].tokens - num_known))
        if len(ids) <= num_in_flight:
            return None
        num_covered = max(self._pages.can_cover(request) - num_known, 0)
        ids = _up_to_end(request, ids[:num_covered])
        num_saved = len(ids) - num_in_flight
        if num_saved < 1:
            return None
        return ForcedRun(request, ids, num_known + len(ids) - start, num_saved)

    def _pay(self, runs: Sequence[ForcedRun], num_rows: int, bucket: ExtendBucket) -> bool:
        decode_s, extend_s = self._times.decode_s(num_rows), self._times.extend_s(bucket)
        if not runs or decode_s is None or extend_s is None:
            return False
        num_left = num_rows - len(runs)
        left_s = self._times.decode_s(num_left) or 0.0 if num_left else 0.0
        longer_s = extend_s + left_s - decode_s
        return sum(run.num_saved for run in runs) * decode_s > num_rows * longer_s


def _may_force(request: Request) -> bool:
    """Say whether ids may come without log-probabilities, which only sampling tells."""
    return request.sampling.num_logprobs is None


def _up_to_end(request: Request, ids: Sequence[int]) -> Sequence[int]:
    """Return ids in front of the first one that ends the sequence."""
    guidance = request.guidance
    for count, token_id in enumerate(ids):
        if guidance is not None and token_id in guidance.end_ids:
            return ids[:count]
    return ids

"""How long the device takes for a step, learnt from those that ran, to size prefill by.

It keeps medians of the last few durations, for one slow step must not change the plan. Device
thread only.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from jaxserve.device.buckets import ExtendBucket

_NUM_SAMPLES = 5

# A bucket that looks too slow is not run, so its estimate would stay as it is for ever. Once in so
# many choices the limit is looser, so that it is measured anew.
_RETRY_EVERY = 32
_RETRY_FACTOR = 1.25


class StepTimes:
    """Durations by extend bucket and by number of decode rows (to a power of two), in seconds."""

    def __init__(self, buckets: Sequence[ExtendBucket]) -> None:
        self._buckets = buckets
        self._extend: dict[int, deque[float]] = {}
        self._decode: dict[int, deque[float]] = {}
        self._choices = itertools.count(1)

    def learn_extend(self, bucket: ExtendBucket, duration_s: float) -> None:
        """Note that an extend of this bucket took so long; a warm-up may seed it so."""
        self._extend.setdefault(bucket.tokens, deque(maxlen=_NUM_SAMPLES)).append(duration_s)

    def learn_decode(self, num_rows: int, duration_s: float) -> None:
        """Note that a decode of so many rows took so long; a warm-up may seed it so."""
        key = (num_rows - 1).bit_length()
        self._decode.setdefault(key, deque(maxlen=_NUM_SAMPLES)).append(duration_s)

    def decode_s(self, num_rows: int) -> float | None:
        """Estimate a decode of so many rows by the nearest that ran; None where none did."""
        if not self._decode:
            return None
        wanted = (num_rows - 1).bit_length()
        return median(self._decode[min(self._decode, key=lambda key: abs(key - wanted))])

    def extend_s(self, bucket: ExtendBucket) -> float | None:
        """Estimate an extend of this bucket; None where nothing is known of one so small."""
        bucket_s = next(bucket_s for each, bucket_s in self._estimates() if each == bucket)
        return bucket_s if bucket_s < math.inf else None

    def largest_within(self, limit_s: float) -> ExtendBucket:
        """Choose the largest bucket estimated to fit the limit; the smallest where none does."""
        if next(self._choices) % _RETRY_EVERY == 0:
            limit_s *= _RETRY_FACTOR
        chosen = self._buckets[0]
        for bucket, bucket_s in self._estimates():
            if bucket_s > limit_s:
                break
            chosen = bucket
        return chosen

    def quickest_for(self, num_tokens: int, largest: ExtendBucket) -> ExtendBucket:
        """Choose the bucket, up to the largest, estimated to take least time a token.

        So many tokens are left: a bucket that they fill to a small part may take longer than some
        smaller ones together. Where nothing is known it is the largest.
        """
        chosen, best_s = largest, math.inf
        for bucket, bucket_s in self._estimates():
            per_token_s = bucket_s / min(num_tokens, bucket.tokens)
            if bucket.tokens <= largest.tokens and per_token_s <= best_s:
                chosen, best_s = bucket, per_token_s
        return chosen if best_s < math.inf else largest

    def _estimates(self) -> Iterator[tuple[ExtendBucket, float]]:
        """Yield each bucket and its seconds, ascending; infinite where nothing is known."""
        bound_s, tokens = math.inf, 1
        for bucket in self._buckets:
            # Time grows at most with the tokens: a small bucket's fresh figure bounds a stale one.
            bound_s = self._extend_s(bucket, bound_s * bucket.tokens / tokens)
            tokens = bucket.tokens
            yield bucket, bound_s

    def _extend_s(self, bucket: ExtendBucket, bound_s: float) -> float:
        samples = self._extend.get(bucket.tokens)
        return bound_s if samples is None else min(median(samples), bound_s)

"""Who goes first when room is needed: the least recently used, what is kept last of all."""

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    """What can be evicted.

    Attributes:
        used_at: when it was used last, by a clock without ties; -1 or less: gone, or to go first.
        kept_until_s: it goes before that only where everything is kept.
    """

    used_at: int
    kept_until_s: float


T = TypeVar("T", bound=Candidate)


class EvictionQueue(Generic[T]):
    """Candidates in order; using one again is offering it again."""

    def __init__(self, is_candidate: Callable[[T], bool]) -> None:
        """Skip what is no candidate any more by the time that its turn comes."""
        self._is_candidate = is_candidate
        # Entries whose candidate was used since are stale.
        self._queue: list[tuple[int, T]] = []
        self._kept: list[tuple[float, int, T]] = []

    def offer(self, candidate: T, num_candidates: int) -> None:
        """Take in a candidate as of its `used_at`; `num_candidates` is how many there are."""
        heapq.heappush(self._queue, (candidate.used_at, candidate))
        if len(self._queue) + len(self._kept) > 2 * num_candidates + 64:
            self._queue = [entry for entry in self._queue if self._is_valid(*entry)]
            self._kept = [entry for entry in self._kept if self._is_valid(*entry[1:])]
            heapq.heapify(self._queue)
            heapq.heapify(self._kept)

    def pop(self, now_s: float) -> T | None:
        """Return the candidate to evict; None: there is none."""
        while self._kept and self._kept[0][0] <= now_s:
            _, used_at, candidate = heapq.heappop(self._kept)
            heapq.heappush(self._queue, (used_at, candidate))
        while self._queue:
            used_at, candidate = heapq.heappop(self._queue)
            if not self._is_valid(used_at, candidate):
                continue
            if candidate.kept_until_s <= now_s:
                return candidate
            heapq.heappush(self._kept, (candidate.kept_until_s, used_at, candidate))
        while self._kept:
            _, used_at, candidate = heapq.heappop(self._kept)
            if self._is_valid(used_at, candidate):
                return candidate
        return None

    def _is_valid(self, used_at: int, candidate: T) -> bool:
        return candidate.used_at == used_at and self._is_candidate(candidate)

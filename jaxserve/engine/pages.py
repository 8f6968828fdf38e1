"""Both kinds of page as running requests draw on them: what is there, what they take and give back.

A running request has full-attention pages for all its positions and sliding pages for its window
and a little before it. It knows nothing of slots or of what is computed when. Device thread only.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxserve.cache.node import Node
from jaxserve.cache.pages import PagePool
from jaxserve.cache.radix import RadixTree
from jaxserve.engine.batch import Batch, PageGrant
from jaxserve.engine.request import Request
from jaxserve.engine.runner import RunnerSizes
from jaxserve.errors import ConfigError, InvariantError
from jaxserve.models.windows import Windows


class PageCounts(NamedTuple):
    """The pages of a kind: free, held by running requests, cached and to be evicted when needed."""

    num_free: int
    num_held: int
    num_cached: int


class Pages:
    """The two pools and the tree over them."""

    def __init__(self, sizes: RunnerSizes) -> None:
        """Set up empty pools.

        Raises:
            ConfigError: one sequence of max_model_len does not fit the pages.
        """
        self.windows = Windows(page_size=sizes.page_size, window=sizes.window)
        self.pool = PagePool(sizes.num_pages)
        self.sliding_pool = PagePool(sizes.num_sliding_pages)
        self.tree = RadixTree(self.pool, self.sliding_pool, self.windows)
        # One sequence alone always fits, so the first in order gets to its end: no deadlock.
        num_needed = self.windows.pages_for(sizes.max_model_len)
        num_sliding_needed = self._num_sliding_for(sizes.max_model_len)
        if num_needed > self.pool.num_pages or num_sliding_needed > self.sliding_pool.num_pages:
            raise ConfigError(
                f"{self.pool.num_pages} pages of {sizes.page_size} tokens and"
                f" {self.sliding_pool.num_pages} for sliding layers do not hold one sequence"
                f" of max_model_len {sizes.max_model_len}"
            )

    @property
    def num_available(self) -> int:
        """Full-attention pages that can be had."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_sliding_available(self) -> int:
        """Sliding pages that can be had."""
        return self.sliding_pool.num_free + self.tree.sliding.num_evictable

    @property
    def counts(self) -> PageCounts:
        """Count full-attention pages."""
        num_cached = self.tree.num_evictable
        return PageCounts(self.pool.num_free, self.pool.num_used - num_cached, num_cached)

    @property
    def sliding_counts(self) -> PageCounts:
        """Count sliding pages."""
        pool, num_cached = self.sliding_pool, self.tree.sliding.num_evictable
        return PageCounts(pool.num_free, pool.num_used - num_cached, num_cached)

    def can_cover(self, request: Request) -> int:
        """Return how many positions from 0 on a request could have pages for."""
        return self.windows.page_size * min(
            len(request.pages) + self.num_available,
            request.sliding_end + self.num_sliding_available,
        )

    def can_decode(self, rows: Iterable[Request]) -> bool:
        """Say whether each of these requests can have pages for one more position."""
        size = self.windows.page_size
        num_short = num_sliding_short = 0
        for request in rows:
            num_short += request.num_computed_tokens == len(request.pages) * size
            num_sliding_short += request.num_computed_tokens == request.sliding_end * size
        return num_short <= self.num_available and num_sliding_short <= self.num_sliding_available

    def can_start(self, request: Request, shared: Sequence[Node], running: list[Request]) -> bool:
        """Say whether a request that shares these nodes may start beside those that run.

        Pages are taken chunk by chunk, yet a request starts only when all its known ids would fit
        beside what running prefills still lack and a page for each running row. Else it would take
        the rows' next pages, be preempted for them, and start over: work without progress. So
        prefills alone never run out of pages: rows that outgrow theirs may hold one up, until they
        end or give way.
        """
        num_owed = num_sliding_owed = len(running)
        for other in running:
            if other.is_prefilling:
                num_owed += self.windows.pages_for(other.prefill_end) - len(other.pages)
                num_sliding = self._num_sliding_for(other.prefill_end)
                num_sliding_owed += max(num_sliding - len(other.sliding_pages), 0)
        # Once locked, a cached page is nobody else's to evict.
        num_wanted = self.windows.pages_for(request.num_known_tokens) - len(shared)
        num_wanted += sum(node.num_locks == 0 for node in shared)
        num_sliding_wanted = self._num_sliding_for(request.num_known_tokens)
        return (
            num_owed + num_wanted <= self.num_available
            and num_sliding_owed + num_sliding_wanted <= self.num_sliding_available
        )

    def cover(self, batch: Batch, request: Request, end: int) -> None:
        """Give a request the pages that positions [0, end) still lack."""
        end_page = self.windows.pages_for(end)
        start, num_missing = len(request.pages), end_page - len(request.pages)
        if num_missing > 0:
            pages = self.allocate(num_missing, batch.now_s)
            batch.page_grants.append(PageGrant(request.slot, start, pages, "full"))
            request.pages += pages
        start, num_missing = request.sliding_end, end_page - request.sliding_end
        if num_missing > 0:
            pages = self.allocate_sliding(num_missing, batch.now_s)
            batch.page_grants.append(PageGrant(request.slot, start, pages, "sliding"))
            request.sliding_pages += pages

    def allocate(self, count: int, now_s: float) -> list[int]:
        """Take full-attention pages that a plan has made sure of."""
        pages = self.tree.allocate(count, now_s)
        if pages is None:
            raise InvariantError(f"{count} pages were planned, too few can be had")
        return pages

    def allocate_sliding(self, count: int, now_s: float) -> list[int]:
        """Take sliding pages that a plan has made sure of."""
        pages = self.tree.sliding.allocate(count, now_s)
        if pages is None:
            raise InvariantError(f"{count} sliding pages were planned, too few can be had")
        return pages

    def trim(self, request: Request) -> None:
        """Give back sliding pages that nothing to come reads.

        Steps in flight may read them: the device works in order, and their next owner's step is
        queued after those. So it must not be called once a step's pages are being planned.
        """
        first = self.windows.first_kept_page(request.num_computed_tokens)
        while request.sliding_pages and request.sliding_start < first:
            self._drop_first(request)

    def release(self, request: Request) -> None:
        """Take back all pages of a request, and its locks on the tree.

        A step in flight may still write one of the pages. The device works in order, and the next
        owner writes each position before it reads it, so the stale write is never seen.
        """
        while request.sliding_pages:
            self._drop_first(request)
        self.pool.release(request.own_pages)
        if request.root is not None:
            self.tree.unlock_path(request.root, request.path)
        request.root, request.pages, request.path = None, [], []

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise InvariantError unless the pages add up to what running requests hold; O(pages)."""
        self.pool.check_integrity()
        self.sliding_pool.check_integrity()
        self.tree.check_integrity()
        own: list[int] = []
        own_sliding: list[int] = []
        num_holds: dict[Node, int] = {}
        locked: set[Node] = set()
        for request in running:
            own += request.own_pages
            locked.update(request.path)
            for index, page in enumerate(request.sliding_pages, request.sliding_start):
                if request.holds_of_tree(index):
                    node = request.path[index]
                    num_holds[node] = num_holds.get(node, 0) + 1
                else:
                    own_sliding.append(page)
        if len(set(own)) != len(own) or len(own) + self.tree.num_nodes != self.pool.num_used:
            raise InvariantError(
                f"{self.pool.num_used} pages are used, {self.tree.num_nodes} of them cached;"
                f" running requests own {sorted(own)}"
            )
        if len(locked) + self.tree.num_evictable != self.tree.num_nodes:
            raise InvariantError("cached pages are locked that no running request uses")
        num_sliding = len(own_sliding) + len(num_holds) + self.tree.sliding.num_evictable
        if len(set(own_sliding)) != len(own_sliding) or num_sliding != self.sliding_pool.num_used:
            raise InvariantError(
                f"{self.sliding_pool.num_used} sliding pages are used, {num_sliding} accounted for;"
                f" running requests own {sorted(own_sliding)}"
            )
        if any(node.num_holds != num for node, num in num_holds.items()):
            raise InvariantError("a cached sliding page is held by others than running requests")

    def _num_sliding_for(self, num_tokens: int) -> int:
        """Return the sliding pages that a sequence of known length needs to go on."""
        return min(self.windows.row_pages, self.windows.pages_for(num_tokens))

    def _drop_first(self, request: Request) -> None:
        if request.holds_of_tree(request.sliding_start):
            self.tree.sliding.release(request.path[request.sliding_start])
        else:
            self.sliding_pool.release([request.sliding_pages[0]])
        request.sliding_pages.popleft()
        request.sliding_start += 1

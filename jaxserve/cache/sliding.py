"""The sliding half of the tree: which nodes keep what sliding layers computed, and for whom.

A sliding layer reads the window before a position alone. So a node's sliding page stays only while
a running request has it in its window (it holds the page), or a resume point does (it claims it):
then a later request can go on from there. Pages that nobody holds can be evicted, by dropping the
points that claim them. Every sliding page of the pool is free, or a node's, or that of whoever
allocated it:

    free + evictable + held by requests = pool
"""

import itertools
from collections.abc import Sequence

from jaxserve.cache.eviction import EvictionQueue
from jaxserve.cache.node import Node, ResumePoint
from jaxserve.cache.pages import PagePool
from jaxserve.errors import InvariantError
from jaxserve.models.windows import Windows


class SlidingPages:
    """Resume points, and the sliding pages of the tree's nodes."""

    def __init__(self, pool: PagePool, windows: Windows) -> None:
        self._pool = pool
        self._windows = windows
        self._clock = itertools.count(1)
        # Spare points go before all others, the oldest of them first.
        self._spare_clock = itertools.count(-(1 << 62))
        self._queue: EvictionQueue[ResumePoint] = EvictionQueue(
            lambda point: point.node.point is point
        )
        self.num_points = 0
        self.num_evictable = 0
        self.num_points_evicted = 0

    def resume_position(self, nodes: Sequence[Node], num_tail: int) -> int:
        """Return the last position that sliding layers can go on from.

        The nodes are the beginning of a sequence; `num_tail` ids of a further page, whose sliding
        page is there, follow them. 0: only from the start.
        """
        size = self._windows.page_size
        length = len(nodes) * size + num_tail
        end = len(nodes) + (num_tail > 0)  # pages of which the last is to be there
        while end:
            position = min(end * size, length)
            first, start = self._windows.first_page(position), end
            while start > first and (start > len(nodes) or nodes[start - 1].sliding_page >= 0):
                start -= 1
            if start <= first:
                return position
            # The page before `start` is lost, and so is every position that reads it.
            end = start - 1
        return 0

    def adopt(self, node: Node, page: int) -> None:
        """Make a caller's page that of a node that has none; the caller holds it from now on."""
        if node.sliding_page >= 0:
            raise InvariantError("a node is given a second sliding page")
        node.sliding_page = page
        node.num_holds = 1

    def hold(self, node: Node) -> int:
        """Keep a node's sliding page while a request has it in its window; return the page."""
        if node.sliding_page < 0:
            raise InvariantError("a sliding page is held that is gone")
        self.num_evictable -= node.num_holds == 0
        node.num_holds += 1
        return node.sliding_page

    def release(self, node: Node) -> None:
        """Undo one hold."""
        if node.num_holds < 1:
            raise InvariantError("a sliding page is released that nobody holds")
        node.num_holds -= 1
        self.num_evictable += node.num_holds == 0
        self._free_if_unused(node)

    def make_point(self, node: Node, num_needed: int, *, is_spare: bool = False) -> bool:
        """Keep what it takes to resume in a node's page, or note that it is used again.

        Returns whether there is a point: not where fewer than `num_needed` sliding pages are left
        of this node and those before it. A spare point is the first to be evicted.
        """
        window = self._window(node)
        if len(window) < num_needed:
            return False
        point = node.point
        if point is None:
            point = node.point = ResumePoint(node)
            self.num_points += 1
            self._use(point, is_spare=is_spare)
        elif not is_spare:
            self._use(point)
        self._claim(point, window)
        return True

    def move_point(self, node: Node, target: Node) -> None:
        """Let another node have a node's point, if it has none and what it takes is there."""
        point, window = node.point, self._window(target)
        if point is None or target.point is not None or len(window) < point.num_pages:
            return
        for claimed in window:
            claimed.num_claims += 1
        self._unclaim(point)
        node.point, target.point = None, point
        point.node, point.num_pages = target, len(window)

    def use_point(self, point: ResumePoint) -> None:
        """Note that a point is used: it is evicted after those that were not since."""
        self._use(point)

    def drop_point(self, node: Node) -> None:
        """Remove a node's point, if it has one; pages that nobody else wants are free."""
        point = node.point
        if point is None:
            return
        self._unclaim(point)
        node.point = None
        self.num_points -= 1

    def allocate(self, count: int, now_s: float) -> list[int] | None:
        """Take free pages, evicting points as it needs; None, and nothing done, if too few."""
        if count > self._pool.num_free + self.num_evictable:
            return None
        while self._pool.num_free < count:
            self._evict_point(now_s)
            self.num_points_evicted += 1
        return self._pool.allocate(count)

    def flush(self) -> None:
        """Drop all points; pages in the windows of running requests stay with them."""
        while self.num_points:
            self._evict_point(0.0)

    def check_integrity(self, nodes: Sequence[Node]) -> None:
        """Raise InvariantError unless these nodes' points, claims and counts add up."""
        num_claims: dict[Node, int] = dict.fromkeys(nodes, 0)
        for node in nodes:
            each: Node | None = node
            for _ in range(0 if node.point is None else node.point.num_pages):
                if each is None or each not in num_claims:
                    raise InvariantError("a resume point claims pages that are not the tree's")
                num_claims[each] += 1
                each = each.parent
        for node, num in num_claims.items():
            if num != node.num_claims or not 0 <= node.num_holds <= node.num_locks:
                raise InvariantError("a sliding page's claims or holds do not add up")
            if (node.sliding_page >= 0) != (num + node.num_holds > 0):
                raise InvariantError("a sliding page is kept for nobody, or lost")
        if self.num_points != sum(node.point is not None for node in nodes):
            raise InvariantError(f"{self.num_points} resume points are counted, there are others")
        num_evictable = sum(node.sliding_page >= 0 and node.num_holds == 0 for node in nodes)
        if num_evictable != self.num_evictable:
            raise InvariantError(
                f"{num_evictable} sliding pages can be evicted, {self.num_evictable} are counted"
            )

    # Inside

    def _window(self, node: Node) -> list[Node]:
        """Return the node and those before it that a point claims, as far as they have pages."""
        window: list[Node] = []
        each: Node | None = node
        while each is not None and each.sliding_page >= 0:
            window.append(each)
            each = each.parent if len(window) < self._windows.point_pages else None
        return window

    def _claim(self, point: ResumePoint, window: Sequence[Node]) -> None:
        for node in window[point.num_pages :]:
            node.num_claims += 1
        point.num_pages = max(point.num_pages, len(window))

    def _unclaim(self, point: ResumePoint) -> None:
        each: Node | None = point.node
        for _ in range(point.num_pages):
            if each is None:
                raise InvariantError("a resume point claims more pages than there are")
            each.num_claims -= 1
            self._free_if_unused(each)
            each = each.parent

    def _use(self, point: ResumePoint, *, is_spare: bool = False) -> None:
        point.used_at = next(self._spare_clock if is_spare else self._clock)
        self._queue.offer(point, self.num_points)

    def _evict_point(self, now_s: float) -> None:
        point = self._queue.pop(now_s)
        if point is None:
            raise InvariantError("no resume point is left, although pages are counted as evictable")
        self.drop_point(point.node)

    def _free_if_unused(self, node: Node) -> None:
        if node.num_holds == 0 and node.num_claims == 0:
            self._pool.release([node.sliding_page])
            node.sliding_page = -1
            self.num_evictable -= 1

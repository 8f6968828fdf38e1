"""The tree of cached prefixes: which token ids have keys and values in which pages.

A node is one page: an edge of `page_size` token ids, fewer only at a leaf, where a sequence ended.
So a path from a root spells the beginning of a sequence, and sequences share the nodes of what they
share. Matching goes on within a page: the first ids of a page may be all that fits, and then the
page is to be copied. Keys are token ids, compared one by one, below a root for each salt.

A node that a running request uses is locked; a request locks all of its path, so that everything
below an unlocked node is unlocked as well and can be evicted, leaves first, the least recently used
before others. It owns the pages of its nodes and knows nothing of arrays or requests. Device thread
only. Every full-attention page of the pool is free, or owned by a node, or by whoever allocated it:

    free + evictable + locked + held outside of the tree = pool

Sliding layers' pages come and go on their own (cache/sliding.py).
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxserve.cache.eviction import EvictionQueue
from jaxserve.cache.node import Node, Root, Salt, Tokens
from jaxserve.cache.pages import PagePool
from jaxserve.cache.sliding import SlidingPages
from jaxserve.errors import InvariantError
from jaxserve.models.windows import Windows


class Match(NamedTuple):
    """The longest cached beginning of some ids.

    Attributes:
        root: where the ids' path begins.
        nodes: whole pages, in order.
        tail: a node below them whose first `num_tail` ids fit as well.
    """

    root: Root
    nodes: list[Node]
    tail: Node | None
    num_tail: int


class RadixTree:
    """All cached prefixes, over a pool of pages for each kind of attention."""

    def __init__(self, pool: PagePool, sliding_pool: PagePool, windows: Windows) -> None:
        self._pool = pool
        self._sliding_pool = sliding_pool
        self._page_size = windows.page_size
        self._roots: dict[Salt, Root] = {}  # those that are locked or have children
        self._clock = itertools.count(1)
        self._leaves: EvictionQueue[Node] = EvictionQueue(
            lambda node: not node.num_locks and not node.children
        )
        self.sliding = SlidingPages(sliding_pool, windows)
        self.num_nodes = 0
        self.num_evictable = 0
        self.num_evicted = 0

    def match(self, salt: Salt, ids: Tokens) -> Match:
        """Find the longest cached beginning; locks nothing."""
        size = self._page_size
        root = self._roots.get(salt) or Root(salt)
        node: Node = root
        nodes: list[Node] = []
        for start in range(0, len(ids) - size + 1, size):
            child = node.children.get(ids[start : start + size])
            if child is None:
                break
            nodes.append(child)
            node = child
        start = len(nodes) * size
        tail, num_tail = node.closest_child(ids[start : start + size])
        return Match(root, nodes, tail, num_tail)

    def continuations(self, salt: Salt, ids: Tokens) -> tuple[int, tuple[int, ...]]:
        """Return how many ids are cached from the first on, and which ids are cached after those.

        The latter ascend; there are none where a cached sequence ends.
        """
        match = self.match(salt, ids)
        start = len(match.nodes) * self._page_size
        shared = ids[start : start + match.num_tail]
        parent = match.nodes[-1] if match.nodes else match.root
        following: dict[int, None] = {}
        for tokens in parent.order[bisect_left(parent.order, shared) :]:
            if tokens[: len(shared)] != shared:
                break
            if len(tokens) > len(shared):
                following[tokens[len(shared)]] = None
        return start + match.num_tail, tuple(following)

    def keep(self, salt: Salt, ids: Tokens, kept_until_s: float) -> None:
        """Keep what is cached of these ids, and the last two points in it, at least so long.

        Two, for whoever goes on does so from an answer's end, or from where it began: a template
        may write the answer otherwise.
        """
        _, nodes, tail, num_tail = self.match(salt, ids)
        # A tail of which only a part fits is somebody else's.
        if tail is not None and num_tail == len(tail.tokens):
            nodes = [*nodes, tail]
        for node in nodes:
            node.kept_until_s = max(node.kept_until_s, kept_until_s)
        for point in [node.point for node in nodes if node.point is not None][-2:]:
            point.kept_until_s = max(point.kept_until_s, kept_until_s)

    def lock(self, node: Node, session: str | None = None) -> None:
        """Keep a node, whose parent must be locked, from being evicted, for a session's request."""
        if isinstance(node, Root):
            self._roots[node.salt] = node
        elif node.num_locks == 0:
            self.num_evictable -= 1
        if node.session != session:
            node.session = None
        node.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one lock; the nodes below must be unlocked first."""
        if node.num_locks < 1:
            raise InvariantError("a node is unlocked that nobody locked")
        node.num_locks -= 1
        if node.num_locks:
            return
        if isinstance(node, Root):
            self._drop_if_empty(node)
            return
        self.num_evictable += 1
        node.used_at = next(self._clock)
        if not node.children:
            self._leaves.offer(node, self.num_evictable)

    def unlock_path(self, root: Root, path: Sequence[Node]) -> None:
        """Undo a lock of each node from a root on.

        Points before a branch serve all its branches, and count as used with each of them.
        """
        is_shared = False
        for node in reversed(path):
            is_shared = is_shared or len(node.children) > 1
            if is_shared and node.point is not None:
                self.sliding.use_point(node.point)
            self.unlock(node)
        self.unlock(root)

    def insert(
        self,
        parent: Node,
        tokens: Tokens,
        page: int,
        sliding_page: int,
        ready_step: int,
        session: str | None = None,
    ) -> Node:
        """Return the node of these ids below a locked one, and lock it.

        Where it is new, the page is the tree's from now on; else it stays the caller's, and the
        node's own page is another. The sliding page, unless it is -1, becomes the node's if that
        has none, held by the caller; else it stays the caller's as well.
        """
        known = parent.children.get(tokens)
        if known is not None:
            self.lock(known, session)
            if sliding_page >= 0 > known.sliding_page:
                self.adopt(known, sliding_page, ready_step)
            return known
        if parent.num_locks < 1 or not 0 < len(tokens) <= self._page_size:
            raise InvariantError(f"{len(tokens)} ids cannot be inserted here")
        if not parent.is_root and len(parent.tokens) < self._page_size:
            raise InvariantError("a page that is not full has a page after it")
        node = Node(parent, tokens, page, ready_step, session)
        node.num_locks = 1
        at = bisect_left(parent.order, tokens)
        parent.order.insert(at, tokens)
        parent.children[tokens] = node
        self.num_nodes += 1
        if sliding_page >= 0:
            self.sliding.adopt(node, sliding_page)
        if at:
            self._remove_if_outgrown(parent.children[parent.order[at - 1]], node)
        return node

    def adopt(self, node: Node, sliding_page: int, ready_step: int) -> None:
        """Give a node a sliding page again, which a step computes; the caller holds it."""
        self.sliding.adopt(node, sliding_page)
        node.ready_step = ready_step

    def allocate(self, count: int, now_s: float) -> list[int] | None:
        """Take free pages, evicting as many as it needs; None, and nothing done, if too few."""
        if count > self._pool.num_free + self.num_evictable:
            return None
        for _ in range(count - self._pool.num_free):
            self._evict(now_s)
            self.num_evicted += 1
        return self._pool.allocate(count)

    def flush(self) -> int:
        """Evict all that no request uses; return how many pages that were, of both kinds."""
        num_free = self._pool.num_free + self._sliding_pool.num_free
        while self.num_evictable:
            self._evict(0.0)
        self.sliding.flush()
        return self._pool.num_free + self._sliding_pool.num_free - num_free

    def drop_session(self, session: str) -> int:
        """Evict what no other session has used and no request uses; O(nodes).

        Returns how many pages that were, of both kinds.
        """
        num_free = self._pool.num_free + self._sliding_pool.num_free
        for node in reversed([node for node in self._walk() if node.session == session]):
            if not node.num_locks and not node.children:
                self._remove(node)
        return self._pool.num_free + self._sliding_pool.num_free - num_free

    def check_integrity(self) -> None:
        """Raise InvariantError unless locks, counts and owners add up; O(nodes)."""
        nodes = list(self._walk())
        for node in nodes:
            if node.parent is None or node.parent.num_locks < node.num_locks:
                raise InvariantError("a node has more locks than its parent")
            if sorted(node.children) != node.order:
                raise InvariantError("a node's children are out of order")
        if len({node.page for node in nodes}) != len(nodes) or len(nodes) != self.num_nodes:
            raise InvariantError(f"{self.num_nodes} nodes are counted, or two own one page")
        sliding = [node.sliding_page for node in nodes if node.sliding_page >= 0]
        if len(set(sliding)) != len(sliding):
            raise InvariantError("two nodes own one sliding page")
        num_evictable = sum(node.num_locks == 0 for node in nodes)
        if num_evictable != self.num_evictable:
            raise InvariantError(
                f"{num_evictable} nodes can be evicted, {self.num_evictable} are counted"
            )
        self.sliding.check_integrity(nodes)

    # Inside

    def _remove_if_outgrown(self, leaf: Node, node: Node) -> None:
        """Remove an unused leaf that a node goes on from: the node's page holds all of its ids."""
        is_unused = not (leaf.num_locks or leaf.children)
        if is_unused and node.tokens[: len(leaf.tokens)] == leaf.tokens:
            self.sliding.move_point(leaf, node)
            self._remove(leaf)

    def _drop_if_empty(self, root: Root) -> None:
        if not root.children and not root.num_locks:
            del self._roots[root.salt]

    def _evict(self, now_s: float) -> None:
        leaf = self._leaves.pop(now_s)
        if leaf is None:
            raise InvariantError("nothing can be evicted, although nodes are counted as evictable")
        self._remove(leaf)

    def _remove(self, node: Node) -> None:
        """Take an unlocked leaf out and free its pages."""
        parent = node.parent
        if parent is None or node.num_locks or node.children:
            raise InvariantError("only an unlocked leaf can be removed")
        # Points before it claim nothing here, and there is nothing behind it.
        self.sliding.drop_point(node)
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        node.used_at = -1
        self.num_nodes -= 1
        self.num_evictable -= 1
        self._pool.release([node.page])
        if isinstance(parent, Root):
            self._drop_if_empty(parent)
        elif not parent.num_locks and not parent.children:
            self._leaves.offer(parent, self.num_evictable)

    def _walk(self) -> Iterator[Node]:
        level = [child for root in self._roots.values() for child in root.children.values()]
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

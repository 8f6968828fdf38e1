"""The tree of cached prefixes: which token ids have keys and values in which page.

A node is one page: an edge of `page_size` token ids, fewer only at a leaf, where a sequence ended.
So a path from a root spells the beginning of a sequence, and sequences share the nodes of what they
share. Matching goes on within a page: the first ids of a page may be all that fits, and then the
page is to be copied. Keys are token ids, compared one by one, below a root for each salt.

A node that a running request uses is locked; a request locks all of its path, so that everything
below an unlocked node is unlocked as well and can be evicted, leaves first, the least recently used
before others. It owns the pages of its nodes and knows nothing of arrays or requests. Device thread
only. Every page of the pool is free, or owned by a node, or by whoever allocated it:

    free + evictable + locked + held outside of the tree = pool
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxserve.cache.pages import PagePool
from jaxserve.errors import InvariantError

Tokens = tuple[int, ...]
Salt = str | None
"""What else two requests must agree on to share; None is a salt like any other."""


class Node:
    """One page of the tree.

    Attributes:
        tokens: ids of the page's positions, in order; a root has none.
        page: where their keys and values are; of a root: -1.
        num_locks: requests that use it.
        ready_step: the step that computes it; it may be copied in later ones.
        kept_until_s: it is evicted before that only where nothing else can be.
        session: the only one whose requests have used it; None: they had none, or several.
    """

    __slots__ = (
        "children",
        "kept_until_s",
        "num_locks",
        "order",
        "page",
        "parent",
        "ready_step",
        "session",
        "tokens",
        "used_at",
    )

    def __init__(
        self,
        parent: "Node | None",
        tokens: Tokens,
        page: int,
        ready_step: int,
        session: str | None = None,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.ready_step = ready_step
        self.session = session
        self.children: dict[Tokens, Node] = {}
        # The children's tokens, sorted: the one that shares most with given ids is next to them.
        self.order: list[Tokens] = []
        self.num_locks = 0
        self.used_at = 0
        self.kept_until_s = 0.0

    @property
    def is_root(self) -> bool:
        """Whether it is no page but the beginning of all sequences of a salt."""
        return self.parent is None

    def closest_child(self, ids: Tokens) -> tuple["Node | None", int]:
        """Return the child that shares the longest beginning with the ids, and its length."""
        at = bisect_left(self.order, ids)
        best, best_length = None, 0
        for tokens in self.order[max(at - 1, 0) : at + 1]:
            length = common_length(tokens, ids)
            if length > best_length:
                best, best_length = self.children[tokens], length
        return best, best_length


class Root(Node):
    """The beginning of all sequences of a salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: Salt) -> None:
        super().__init__(None, (), -1, 0)
        self.salt = salt


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
    """All cached prefixes, over a pool of pages."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Salt, Root] = {}  # those that are locked or have children
        self._clock = itertools.count(1)
        # Leaves that may be evicted, by last use; entries whose node was used since are stale.
        self._leaves: list[tuple[int, Node]] = []
        self._kept_leaves: list[tuple[float, int, Node]] = []
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

    def lock(self, node: Node, session: str | None = None) -> None:
        """Keep a node, whose parent must be locked, from being evicted, for a session's request."""
        if isinstance(node, Root):
            self._roots[node.salt] = node
        elif node.num_locks == 0:
            self.num_evictable -= 1
        if node.session != session:
            node.session = None
        node.num_locks += 1

    def unlock(self, node: Node, *, kept_until_s: float = 0.0) -> None:
        """Undo one lock; the nodes below must be unlocked first."""
        if node.num_locks < 1:
            raise InvariantError("a node is unlocked that nobody locked")
        node.num_locks -= 1
        node.kept_until_s = max(node.kept_until_s, kept_until_s)
        if node.num_locks:
            return
        if isinstance(node, Root):
            self._drop_if_empty(node)
            return
        self.num_evictable += 1
        node.used_at = next(self._clock)
        if not node.children:
            heapq.heappush(self._leaves, (node.used_at, node))
            if len(self._leaves) > 2 * self.num_evictable + 64:
                self._leaves = [each for each in self._leaves if self._is_offered(each[1], each[0])]
                heapq.heapify(self._leaves)

    def insert(
        self,
        parent: Node,
        tokens: Tokens,
        page: int,
        ready_step: int,
        session: str | None = None,
    ) -> Node:
        """Return the node of these ids below a locked one, and lock it.

        Where it is new, the page is the tree's from now on; else it stays the caller's, and the
        node's own page is another.
        """
        if tokens in parent.children:
            self.lock(parent.children[tokens], session)
            return parent.children[tokens]
        if parent.num_locks < 1 or not 0 < len(tokens) <= self._page_size:
            raise InvariantError(f"{len(tokens)} ids cannot be inserted here")
        if not parent.is_root and len(parent.tokens) < self._page_size:
            raise InvariantError("a page that is not full has a page after it")
        at = bisect_left(parent.order, tokens)
        before = parent.children[parent.order[at - 1]] if at else None
        node = Node(parent, tokens, page, ready_step, session)
        node.num_locks = 1
        parent.children[tokens] = node
        insort(parent.order, tokens)
        self.num_nodes += 1
        if (
            before is not None
            and not (before.num_locks or before.children)
            and tokens[: len(before.tokens)] == before.tokens
        ):
            # A sequence went on from where another ended: its page holds all of the other's.
            self._remove(before)
        return node

    def allocate(self, count: int, now_s: float) -> list[int] | None:
        """Take free pages, evicting as many as it needs; None, and nothing done, if too few."""
        if count > self._pool.num_free + self.num_evictable:
            return None
        for _ in range(count - self._pool.num_free):
            self._remove(self._next_victim(now_s))
            self.num_evicted += 1
        return self._pool.allocate(count)

    def flush(self) -> int:
        """Evict all that is unlocked; return how many pages that were."""
        count = self.num_evictable
        for _ in range(count):
            self._remove(self._next_victim(0.0))
        return count

    def drop_session(self, session: str) -> int:
        """Evict what only this session has used and no request uses; O(nodes).

        Returns how many pages that were.
        """
        num_free = self._pool.num_free
        for node in reversed([node for node in self._walk() if node.session == session]):
            if not node.num_locks and not node.children:
                self._remove(node)
        return self._pool.num_free - num_free

    def check_integrity(self) -> None:
        """Raise InvariantError unless locks, counts and owners add up; O(nodes)."""
        num_evictable, pages = 0, []
        for node in self._walk():
            pages.append(node.page)
            num_evictable += node.num_locks == 0
            if node.parent is None or node.parent.num_locks < node.num_locks:
                raise InvariantError("a node has more locks than its parent")
            if sorted(node.children) != node.order:
                raise InvariantError("a node's children are out of order")
        if len(set(pages)) != len(pages) or len(pages) != self.num_nodes:
            raise InvariantError(f"{len(pages)} nodes own {len(set(pages))} pages")
        if num_evictable != self.num_evictable:
            raise InvariantError(
                f"{num_evictable} nodes can be evicted, {self.num_evictable} are counted"
            )

    # Inside

    def _drop_if_empty(self, root: Root) -> None:
        if not root.children and not root.num_locks:
            del self._roots[root.salt]

    def _next_victim(self, now_s: float) -> Node:
        """Return the leaf to evict: the least recently used, kept ones only if all are."""
        while self._kept_leaves and self._kept_leaves[0][0] <= now_s:
            _, used_at, node = heapq.heappop(self._kept_leaves)
            heapq.heappush(self._leaves, (used_at, node))
        while self._leaves:
            used_at, node = heapq.heappop(self._leaves)
            if not self._is_offered(node, used_at):
                continue
            if node.kept_until_s <= now_s:
                return node
            heapq.heappush(self._kept_leaves, (node.kept_until_s, used_at, node))
        while self._kept_leaves:
            _, used_at, node = heapq.heappop(self._kept_leaves)
            if self._is_offered(node, used_at):
                return node
        raise InvariantError("nothing can be evicted, although nodes are counted as evictable")

    def _is_offered(self, node: Node, used_at: int) -> bool:
        return node.used_at == used_at and not node.num_locks and not node.children

    def _remove(self, node: Node) -> None:
        """Take an unlocked leaf out and free its page."""
        parent = node.parent
        if parent is None or node.num_locks or node.children:
            raise InvariantError("only an unlocked leaf can be removed")
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        node.used_at = -1
        self.num_nodes -= 1
        self.num_evictable -= 1
        self._pool.release([node.page])
        if isinstance(parent, Root):
            self._drop_if_empty(parent)
        elif not parent.num_locks and not parent.children:
            heapq.heappush(self._leaves, (parent.used_at, parent))

    def _walk(self) -> Iterator[Node]:
        level = [child for root in self._roots.values() for child in root.children.values()]
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two sequences share at their beginnings."""
    low, high = 0, min(len(a), len(b))
    # Slices compare far faster than a loop over ids.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

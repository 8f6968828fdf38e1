"""What a request has in common with others: found in the tree, taken from it, and left in it.

A request that starts takes over full-attention pages of the longest cached beginning of its ids,
and goes on from the last position in it that sliding layers can go on from as well. In between it
computes for the sliding layers alone. What it computes enters the tree page by page, and resume
points are made where somebody may want to go on. Device thread only.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.cache.node import Node, common_length
from jaxserve.cache.radix import Match
from jaxserve.engine.batch import Batch, PageCopy, PageGrant
from jaxserve.engine.pages import Pages
from jaxserve.engine.request import Request
from jaxserve.engine.resume_points import ResumePoints


class Found(NamedTuple):
    """What there is of a request's ids.

    Attributes:
        nodes: whole pages, shared by reference.
        start: the first position to compute. Beyond the nodes' end it lies in the page to copy.
        num_matched: ids that are cached, though not all of them need be of use.
        parts: whether others go on with other ids from there.
        source: the page to copy and its sliding page.
    """

    match: Match
    start: int
    num_matched: int
    parts: bool
    source: tuple[int, int]

    @property
    def nodes(self) -> list[Node]:
        return self.match.nodes


class _Tail(NamedTuple):
    """A page whose first `num_tail` ids fit, of the `num_ids` that it has; -1: no sliding page."""

    num_tail: int
    num_ids: int
    page: int
    sliding_page: int


class Prefixes:
    """The running requests' side of the tree."""

    def __init__(self, pages: Pages, *, reuses_prefixes: bool, session_grace_s: float) -> None:
        """Keep what a request with a session leaves for `session_grace_s` seconds longer."""
        self._pages = pages
        self._tree = pages.tree
        self._points = ResumePoints(pages)
        self._windows = pages.windows
        self._page_size = pages.windows.page_size
        self._reuses_prefixes = reuses_prefixes
        self._session_grace_s = session_grace_s
        self._step = 0

    def begin_step(self, running: Sequence[Request]) -> None:
        """Note that a step is about to be planned: what those before it compute may be copied."""
        self._step += 1
        for request in running:
            request.num_copyable_tokens = request.num_computed_tokens
            self._pages.trim(request)

    def looks_up(self, request: Request) -> bool:
        """Say whether a request takes what is cached; a prompt to be scored is computed whole."""
        return self._reuses_prefixes and not request.scores_prompt

    def find(self, request: Request, running: Sequence[Request]) -> Found:
        """Find what of a request's known ids is cached; the last one is never: it gives logits."""
        size = self._page_size
        num_usable = request.num_known_tokens - 1 if self.looks_up(request) else 0
        match = self._tree.match(request.cache_salt, request.known_ids(0, num_usable))
        whole = len(match.nodes) * size
        tails = self._tails(request, match, num_usable, running) if num_usable else []
        longest = max((tail.num_tail for tail in tails), default=0)
        copied = max(
            (tail for tail in tails if tail.sliding_page >= 0),
            key=lambda tail: tail.num_tail,
            default=_Tail(0, 0, -1, -1),
        )
        tip = match.nodes[-1] if match.nodes else match.root
        goes_on = any(tail.num_tail == longest < tail.num_ids for tail in tails)
        return Found(
            match=match,
            start=self._tree.sliding.resume_position(match.nodes, copied.num_tail),
            num_matched=whole + longest,
            parts=(goes_on or (not longest and bool(tip.children)))
            and whole + longest < num_usable,
            source=(copied.page, copied.sliding_page),
        )

    def is_being_computed(self, request: Request, found: Found, running: Sequence[Request]) -> bool:
        """Say whether to wait for more of the request's prefix, which a running one computes."""
        for other in running:
            num_shared = self._num_shared(request, other)
            # Less than a page is sooner computed than waited for.
            if num_shared > other.num_copyable_tokens and (
                num_shared - found.start >= self._page_size
            ):
                return True
        return False

    def expect(self, request: Request, running: Request) -> None:
        """Let a running request that computes a waiting one's prefix leave a point at its end."""
        num_shared = self._num_shared(request, running)
        if num_shared >= self._page_size:
            self._points.want_branch(running, num_shared)
            self._points.make(running)

    def take(self, batch: Batch, request: Request, found: Found) -> None:
        """Give an admitted request what was found: whole pages, and a copy of a part of one."""
        size, nodes, start = self._page_size, found.nodes, found.start
        self._tree.lock(found.match.root)
        for node in nodes:
            self._tree.lock(node, request.session)
        request.root, request.path = found.match.root, nodes
        request.pages = [node.page for node in nodes]
        request.sliding_start = self._windows.first_page(start) if start else 0
        held = nodes[request.sliding_start : -(-start // size)]
        request.sliding_pages = deque(self._tree.sliding.hold(node) for node in held)
        if nodes:
            batch.page_grants.append(PageGrant(request.slot, 0, list(request.pages), "full"))
        if held:
            sliding = PageGrant(
                request.slot, request.sliding_start, list(request.sliding_pages), "sliding"
            )
            batch.page_grants.append(sliding)
        request.num_computed_tokens = start
        # A page that is copied whole, from a request that has not entered it, is not in the tree.
        request.num_kept_pages = min(start // size, len(nodes))
        request.full_start = len(nodes) * size
        request.is_off_tree = False
        if start > len(nodes) * size:
            self._pages.cover(batch, request, start)
            copy = PageCopy(
                found.source[0], request.pages[-1], found.source[1], request.sliding_pages[-1]
            )
            batch.copies.append(copy)
        if self._reuses_prefixes:
            self._points.want(request)
            if found.parts:
                self._points.want_branch(request, found.num_matched)
            self._points.make(request)

    def keep(self, request: Request) -> None:
        """Enter a running request's full pages in the tree, as far as their ids are known.

        Where the tree has one already, which another request computed, this one stays on pages of
        its own until it ends: on the tree's path it would hold two pages for each, which nobody
        planned for.
        """
        size = self._page_size
        while self._reuses_prefixes and not request.is_off_tree:
            index = request.num_kept_pages
            start, end = index * size, (index + 1) * size
            if end > request.num_keepable_tokens:
                break
            if index < len(request.path):
                self._adopt(request, index)
            else:
                tokens = request.known_ids(start, end)
                if tokens in request.tip.children:
                    request.is_off_tree = True
                    break
                self._insert(request, tokens)
            request.num_kept_pages = index + 1
        self._points.make(request)

    def leave(self, request: Request, now_s: float) -> None:
        """Enter all pages of a request that ends, make its last points, and give all back."""
        if self._reuses_prefixes:
            beyond = self._leave_pages(request)
            if beyond is not None:  # used by this one as well, and by its session
                self._tree.lock(beyond, request.session)
                self._tree.unlock(beyond)
            self._points.make(request)
            self._points.make_last(request, beyond)
        self._pages.release(request)
        if request.session is not None:
            ids = request.known_ids(0, request.num_keepable_tokens)
            self.keep_longer(request.cache_salt, ids, now_s)

    def keep_longer(self, salt: str | None, ids: tuple[int, ...], now_s: float) -> None:
        """Keep what is cached of these ids for the sessions' grace."""
        self._tree.keep(salt, ids, now_s + self._session_grace_s)

    # Inside

    def _num_shared(self, request: Request, other: Request) -> int:
        """Return how many ids a waiting request shares with one that is prefilling."""
        is_prefilling = other.num_copyable_tokens < other.prefill_end
        if not (is_prefilling and self.looks_up(request)):
            return 0
        if request.cache_salt != other.cache_salt:
            return 0
        num_usable = request.num_known_tokens - 1
        return common_length(
            request.known_ids(0, num_usable), other.known_ids(0, other.prefill_end)
        )

    def _tails(
        self, request: Request, match: Match, num_usable: int, running: Sequence[Request]
    ) -> list[_Tail]:
        """List pages that share ids with the request's after the whole pages.

        They are the tree's, or those that running requests are filling. What this step computes
        cannot be copied: copies are made before it.
        """
        start = len(match.nodes) * self._page_size
        ids = request.known_ids(start, min(start + self._page_size, num_usable))
        tails = []
        if match.tail is not None and match.tail.ready_step < self._step:
            node = match.tail
            tails.append(_Tail(match.num_tail, len(node.tokens), node.page, node.sliding_page))
        parent = match.nodes[-1] if match.nodes else match.root
        for other in running:
            if other.tip is parent:
                index = len(other.path)
                # Ids of a page that it has all of, though the tree has them from another.
                end = min(other.num_copyable_tokens, other.num_known_tokens)
                filled = other.known_ids(start, min(end, start + self._page_size))
                num_tail = common_length(ids, filled)
                if num_tail:
                    page, sliding_page = other.pages[index], other.sliding_page(index)
                    tails.append(_Tail(num_tail, len(filled), page, sliding_page))
        return tails

    def _insert(self, request: Request, tokens: tuple[int, ...]) -> Node:
        index = len(request.path)
        node = self._tree.insert(
            request.tip,
            tokens,
            request.pages[index],
            request.sliding_page(index),
            self._step,
            request.session,
        )
        request.path.append(node)
        return node

    def _adopt(self, request: Request, index: int) -> None:
        """Let a shared page have the sliding page that was computed anew for it."""
        node, sliding_page = request.path[index], request.sliding_page(index)
        if sliding_page >= 0 > node.sliding_page:
            self._tree.adopt(node, sliding_page, self._step)

    def _leave_pages(self, request: Request) -> Node | None:
        """Enter what is computed; return the node that has the last ids, if it is not entered."""
        size = self._page_size
        while (start := request.num_kept_pages * size) < request.num_keepable_tokens:
            end = min(start + size, request.num_keepable_tokens)
            index = request.num_kept_pages
            if index < len(request.path):
                if end - start < size:
                    break  # the node's page would not be whole
                self._adopt(request, index)
            else:
                tokens = request.known_ids(start, end)
                child, num_held = request.tip.closest_child(tokens)
                if end - start < size and num_held == len(tokens):
                    return child  # a page that goes on from there holds all of this one
                page = request.pages[index]
                node = self._insert(request, tokens)
                if node.page != page:
                    self._pages.pool.release([page])
                    request.pages[index] = node.page
            request.num_kept_pages += 1
        return None

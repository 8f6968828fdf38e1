"""Where a running request leaves resume points, and when: as soon as what they take is in the tree.

They are wanted by position and made at the page that holds the position before. Device thread only.
"""

from bisect import insort

from jaxserve.cache.node import Node
from jaxserve.engine.pages import Pages
from jaxserve.engine.request import Request


class ResumePoints:
    """Notes wanted points in a request, and makes them."""

    def __init__(self, pages: Pages) -> None:
        self._sliding = pages.tree.sliding
        self._windows = pages.windows
        self._page_size = pages.windows.page_size

    def want(self, request: Request) -> None:
        """Want points in what a request is to compute of its prompt: where it says, and at its end.

        Those that it names are spare ones: all but the last few are seldom of use, and they must
        not drive out what other sessions go on from.
        """
        start, end = request.num_computed_tokens, request.num_prompt_tokens
        named = {position for position in request.named_points if start < position < end}
        request.pending_points = sorted((position, True) for position in named)
        if start < end:
            insort(request.pending_points, (end, False))

    def want_branch(self, request: Request, position: int) -> None:
        """Want what others need that part from a request at a position.

        Whoever parts there in the middle of a page has a page of its own for the rest. So the point
        that all of them use is at the end of the page before.
        """
        whole = position // self._page_size * self._page_size
        for wanted in {(whole, False), (position, position > whole)}:
            if wanted[0] and wanted not in request.pending_points:
                insort(request.pending_points, wanted)

    def make(self, request: Request) -> None:
        """Make those wanted points whose pages are in the tree."""
        while request.pending_points:
            position, is_spare = request.pending_points[0]
            index = (position - 1) // self._page_size
            if index >= request.num_kept_pages:
                return
            del request.pending_points[0]
            needed = self._num_needed(index, position)
            self._sliding.make_point(request.path[index], needed, is_spare=is_spare)

    def make_last(self, request: Request, beyond: Node | None) -> None:
        """Make a point where a request ends, or else at the end of its last whole page.

        `beyond` is another's node that has its last ids.
        """
        num_kept, end = request.num_kept_pages, request.num_keepable_tokens
        if beyond is not None and self._sliding.make_point(beyond, self._num_needed(num_kept, end)):
            return
        position = min(end, num_kept * self._page_size)
        if position:
            index = (position - 1) // self._page_size
            needed = self._num_needed(index, position)
            self._sliding.make_point(request.path[index], needed)

    def _num_needed(self, index: int, position: int) -> int:
        """Return the sliding pages that computing `position` reads, up to page `index`."""
        return index + 1 - self._windows.first_page(position)

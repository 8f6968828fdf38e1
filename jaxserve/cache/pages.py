"""The pool of KV pages: which are free.

It owns page numbers; it knows nothing of arrays, tokens or requests. Page 0 is the scratch page
where padding rows write: it is never handed out. Device thread only.

    [0, 1)            scratch, nobody's
    [1, num_pages)    free, or held by one owner
"""

from collections.abc import Iterable

from jaxserve.errors import ConfigError, InvariantError


class PagePool:
    """Hands out pages [1, num_pages), O(1) a page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"num_pages is {num_pages}: a pool needs the scratch page and one more"
            )
        self._is_held = [False] * num_pages
        # A stack: the page that was freed last is handed out first. Low numbers first at the start.
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out: all but the scratch page."""
        return len(self._is_held) - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages; None, and nothing taken, where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_held[page] = True
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Free held pages."""
        for page in pages:
            if not self._is_held[page]:
                raise InvariantError(f"page {page} is released but nobody holds it")
            self._is_held[page] = False
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise InvariantError unless every page is either free once or held; O(num_pages)."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a page is on the free list twice")
        for page, is_held in enumerate(self._is_held):
            if (page != 0 and not is_held) != (page in free):
                raise InvariantError(
                    f"page {page} is held: {is_held}, on the free list: {page in free}"
                )

"""Which pages sliding layers need: arithmetic on positions, without arrays.

A query at position p of a sliding layer sees the keys of positions [p - window + 1, p].
"""

from dataclasses import dataclass

SLACK_PAGES = 2
"""Pages that a running sequence keeps before its window.

A page is known to the cache only when it is full and its ids are read, up to a page and two steps
later; what a resume point in it needs must still be there then.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A window of `window` keys, at least 1, over pages of `page_size` tokens."""

    page_size: int
    window: int

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def first_page(self, position: int) -> int:
        """Return the first page that computing `position` reads."""
        return max(position - self.window + 1, 0) // self.page_size

    def first_kept_page(self, position: int) -> int:
        """Return the first page that a sequence keeps which computes `position` next."""
        return max(self.first_page(position) - SLACK_PAGES, 0)

    @property
    def row_pages(self) -> int:
        """Most pages that a running sequence holds to compute its next token, that one's included.

        Unless it is to take in many tokens at once: those need pages of their own.
        """
        return self.pages_for(self.window - 1) + 1 + SLACK_PAGES

    @property
    def point_pages(self) -> int:
        """Pages that a resume point keeps, so that any position in its last page can be next."""
        return self.pages_for(max(self.window - 2, 0)) + 1

"""What the tree of cached prefixes is made of: pages of ids, roots, and resume points."""

from bisect import bisect_left
from collections.abc import Sequence

Tokens = tuple[int, ...]
Salt = str | None
"""What else two requests must agree on to share; None is a salt like any other."""


class Node:
    """One page of the tree.

    Attributes:
        tokens: ids of the page's positions, in order; a root has none.
        page: where full-attention layers have their keys and values; of a root: -1.
        sliding_page: where sliding layers have theirs; -1: nowhere any more.
        num_locks: requests that use it.
        num_holds: requests that have its sliding page in their windows; they lock it as well.
        num_claims: resume points that keep its sliding page.
        ready_step: the step that computes it; it may be copied in later ones.
        kept_until_s: it is evicted before that only where nothing else can be.
        session: the only session that has used it; None: anybody may have.
    """

    __slots__ = (
        "children",
        "kept_until_s",
        "num_claims",
        "num_holds",
        "num_locks",
        "order",
        "page",
        "parent",
        "point",
        "ready_step",
        "session",
        "sliding_page",
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
        self.sliding_page = -1
        self.ready_step = ready_step
        self.session = session
        self.children: dict[Tokens, Node] = {}
        # The children's tokens, sorted: the one that shares most with given ids is next to them.
        self.order: list[Tokens] = []
        self.point: ResumePoint | None = None
        self.num_locks = 0
        self.num_holds = 0
        self.num_claims = 0
        self.used_at = 0
        self.kept_until_s = 0.0

    @property
    def is_root(self) -> bool:
        """Whether it is no page but the beginning of all sequences of a salt."""
        return self.parent is None

    def closest_child(self, ids: Tokens) -> tuple["Node | None", int]:
        """Return the child that shares the longest beginning with the ids, and its length.

        Of two that share as much, one that has its sliding page is returned.
        """
        at = bisect_left(self.order, ids)
        best, best_length = None, 0
        for tokens in self.order[max(at - 1, 0) : at + 1]:
            child, length = self.children[tokens], common_length(tokens, ids)
            is_better_kept = best is not None and best.sliding_page < 0 <= child.sliding_page
            if length > best_length or (length == best_length and is_better_kept):
                best, best_length = child, length
        return best, best_length


class Root(Node):
    """The beginning of all sequences of a salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: Salt) -> None:
        super().__init__(None, (), -1, 0)
        self.salt = salt


class ResumePoint:
    """Keeps what sliding layers need to go on from any position of a node's page.

    Attributes:
        num_pages: nodes whose sliding pages it claims: this one and those before it.
        kept_until_s: as a node's.
    """

    __slots__ = ("kept_until_s", "node", "num_pages", "used_at")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.num_pages = 0
        self.used_at = 0
        self.kept_until_s = 0.0


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

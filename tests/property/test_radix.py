"""RadixTree against a list of the sequences that are in it: the oracle is all their beginnings.

The machine plays sequences as the scheduler does: match, lock, copy a part, insert page by page,
end with a page that is not full, all on a pool so small that most steps evict.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.cache.pages import PagePool
from jaxserve.cache.radix import Match, Node, RadixTree, Root, Salt, common_length

NUM_PAGES = 40
SIZE = 4
MAX_TOKENS = 10 * SIZE

# Two ids, so that sequences share beginnings, nest and part in the middle of pages.
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS).map(tuple)
SALTS = st.sampled_from([None, "", "a"])

Key = tuple[Salt, tuple[int, ...]]


@dataclass
class Running:
    """A sequence that holds pages; content says what ids each of its pages has."""

    salt: Salt
    ids: tuple[int, ...]
    root: Root
    path: list[Node]
    pages: list[int]
    num_computed: int
    own: set[int] = field(default_factory=set)


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES + 1)
        self.tree = RadixTree(self.pool, SIZE)
        self.running: list[Running] = []
        self.content: dict[int, tuple[int, ...]] = {}  # by page, the ids whose keys it holds
        self.now_s = 0.0

    def take(self, count: int) -> list[int] | None:
        held = {page for sequence in self.running for page in sequence.pages}
        pages = self.tree.allocate(count, self.now_s)
        assert not held & set(pages or ()), "a page in use was evicted"
        return pages

    def cached(self) -> set[Key]:
        """All beginnings of all cached sequences, by a walk of the tree's nodes."""
        found: set[Key] = set()
        for salt, root in self.tree._roots.items():
            level: list[tuple[tuple[int, ...], Node]] = [((), root)]
            while level:
                prefix, node = level.pop()
                ids = prefix + node.tokens
                found.update((salt, ids[:end]) for end in range(len(prefix) + 1, len(ids) + 1))
                level += [(ids, child) for child in node.children.values()]
        return found

    @rule(salt=SALTS, ids=IDS)
    def match(self, salt: Salt, ids: tuple[int, ...]) -> None:
        match = self.tree.match(salt, ids)
        cached = self.cached()
        longest = max((n for n in range(1, len(ids) + 1) if (salt, ids[:n]) in cached), default=0)
        assert len(match.nodes) * SIZE + match.num_tail == longest
        self.check_content(match, ids)

    def check_content(self, match: Match, ids: tuple[int, ...]) -> None:
        for i, node in enumerate(match.nodes):
            assert self.content[node.page] == ids[i * SIZE : (i + 1) * SIZE]
        if match.tail is not None:
            start = len(match.nodes) * SIZE
            assert common_length(self.content[match.tail.page], ids[start:]) == match.num_tail

    @rule(salt=SALTS, ids=IDS)
    def begin(self, salt: Salt, ids: tuple[int, ...]) -> None:
        """Start a sequence on what is cached of it, the last id left out."""
        match = self.tree.match(salt, ids[:-1])
        self.tree.lock(match.root)
        for node in match.nodes:
            self.tree.lock(node)
        pages = [node.page for node in match.nodes]
        sequence = Running(salt, ids, match.root, match.nodes, pages, len(pages) * SIZE)
        self.running.append(sequence)
        if match.tail is not None:
            copied = self.content[match.tail.page][: match.num_tail]
            page = self.take(1)
            if page is not None:
                self.content[page[0]] = copied
                sequence.pages += page
                sequence.own |= set(page)
                sequence.num_computed += match.num_tail

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 3 * SIZE))
    def compute(self, choice: int, count: int) -> None:
        """Compute some more ids of a sequence, as far as pages go."""
        sequence = self.running[choice % len(self.running)]
        end = min(len(sequence.ids), sequence.num_computed + count)
        missing = -(-end // SIZE) - len(sequence.pages)
        pages = self.take(max(missing, 0))
        if pages is None:
            return
        sequence.pages += pages
        sequence.own |= set(pages)
        for position in range(sequence.num_computed, end):
            page = sequence.pages[position // SIZE]
            assert page in sequence.own, "a shared page is written"
            before = self.content.get(page, ())[: position % SIZE]
            self.content[page] = (*before, sequence.ids[position])
        sequence.num_computed = end
        for index in range(len(sequence.path), end // SIZE):
            self.insert(sequence, index, (index + 1) * SIZE)

    def insert(self, sequence: Running, index: int, end: int) -> None:
        parent = sequence.path[-1] if sequence.path else sequence.root
        page = sequence.pages[index]
        node = self.tree.insert(parent, sequence.ids[index * SIZE : end], page, 0)
        sequence.path.append(node)
        if node.page == page:
            sequence.own.discard(page)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), kept_s=st.sampled_from([0.0, 5.0]))
    def end(self, choice: int, kept_s: float) -> None:
        """End a sequence, anywhere: a preemption or an abort is the same to the tree."""
        sequence = self.running.pop(choice % len(self.running))
        if sequence.num_computed > len(sequence.path) * SIZE:
            self.insert(sequence, len(sequence.path), sequence.num_computed)
        self.pool.release(sequence.own)
        for node in reversed(sequence.path):
            self.tree.unlock(node, kept_until_s=self.now_s + kept_s)
        self.tree.unlock(sequence.root)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: len(self.running) < 3)
    @rule()
    def flush(self) -> None:
        self.tree.flush()
        assert self.tree.num_evictable == 0
        locked = {id(node) for sequence in self.running for node in sequence.path}
        assert self.tree.num_nodes == len(locked)

    @invariant()
    def everything_adds_up(self) -> None:
        self.tree.check_integrity()
        self.pool.check_integrity()
        num_locked = self.tree.num_nodes - self.tree.num_evictable
        num_own = sum(len(sequence.own) for sequence in self.running)
        assert self.pool.num_free + self.tree.num_evictable + num_locked + num_own == NUM_PAGES
        locked = {id(node) for sequence in self.running for node in sequence.path}
        assert num_locked == len(locked)
        if not self.running:
            assert num_locked == num_own == 0
            assert set(self.tree._roots) == {salt for salt, _ in self.cached()}


RadixMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=350, deadline=None)
TestRadixTree = RadixMachine.TestCase

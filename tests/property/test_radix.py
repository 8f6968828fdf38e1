"""The tree of cached prefixes against a dict of them: the oracle is all their beginnings.

The machine plays sequences as the engine does: match, lock, hold a window, copy a part of a page,
compute and insert page by page, give back what is before the window, make resume points, end with a
page that is not full; all on pools so small that most steps evict.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxserve.cache.node import Node, Root, Salt, common_length
from jaxserve.cache.pages import PagePool
from jaxserve.cache.radix import Match, RadixTree
from jaxserve.models.windows import Windows

NUM_PAGES = 40
NUM_SLIDING_PAGES = 24
SIZE = 4
WINDOWS = Windows(page_size=SIZE, window=7)
MAX_TOKENS = 10 * SIZE

# Two ids, so that sequences share beginnings, nest and part in the middle of pages.
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS).map(tuple)
SALTS = st.sampled_from([None, "", "a"])
SESSIONS = st.sampled_from([None, None, "x", "y"])

Ids = tuple[int, ...]
Key = tuple[Salt, Ids]


@dataclass
class Running:
    """A sequence that holds pages of both kinds, by page of its positions."""

    salt: Salt
    session: str | None
    ids: Ids
    root: Root
    path: list[Node]
    pages: list[int]
    num_computed: int
    own: set[int] = field(default_factory=set)
    window: dict[int, int] = field(default_factory=dict)
    num_kept: int = 0  # pages that are in the tree and have adopted what was computed for them

    def holds_of_tree(self, index: int) -> bool:
        return index < len(self.path) and self.path[index].sliding_page == self.window[index]


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES + 1)
        self.sliding_pool = PagePool(NUM_SLIDING_PAGES + 1)
        self.tree = RadixTree(self.pool, self.sliding_pool, WINDOWS)
        self.running: list[Running] = []
        # By page, the ids whose keys it holds.
        self.content: dict[int, Ids] = {}
        self.sliding_content: dict[int, Ids] = {}
        self.now_s = 0.0

    # The oracle

    def cached(self) -> dict[Key, Node]:
        """All beginnings of all cached sequences, and the nodes that they end in."""
        found: dict[Key, Node] = {}
        for salt, root in self.tree._roots.items():
            level: list[tuple[Ids, Node]] = [((), root)]
            while level:
                prefix, node = level.pop()
                ids = prefix + node.tokens
                for end in range(len(prefix) + 1, len(ids) + 1):
                    found[salt, ids[:end]] = node
                level += [(ids, child) for child in node.children.values()]
        return found

    def resumable(self, match: Match, length: int) -> int:
        """Try every position for one whose window is all there."""
        nodes = [*match.nodes, match.tail]
        for position in range(length, 0, -1):
            needed = range(WINDOWS.first_page(position), -(-position // SIZE))
            there = [node is not None and node.sliding_page >= 0 for node in nodes]
            if all(there[index] for index in needed):
                return position
        return 0

    def check_content(self, match: Match, ids: Ids) -> None:
        for index, node in enumerate(match.nodes):
            own = ids[index * SIZE : (index + 1) * SIZE]
            assert self.content[node.page] == own
            assert node.sliding_page < 0 or self.sliding_content[node.sliding_page] == own
        if match.tail is not None:
            rest = ids[len(match.nodes) * SIZE :]
            assert common_length(self.content[match.tail.page], rest) == match.num_tail
            if match.tail.sliding_page >= 0:
                kept = self.sliding_content[match.tail.sliding_page]
                assert common_length(kept, rest) == match.num_tail

    # What the engine does

    def take(self, count: int, num_sliding: int) -> tuple[list[int], list[int]] | None:
        """Take pages of both kinds, or none; nobody's may be among them."""
        tree, sliding = self.tree, self.tree.sliding
        if (
            count > self.pool.num_free + tree.num_evictable
            or num_sliding > self.sliding_pool.num_free + sliding.num_evictable
        ):
            return None
        pages = tree.allocate(count, self.now_s)
        sliding_pages = sliding.allocate(num_sliding, self.now_s)
        assert pages is not None
        assert sliding_pages is not None
        held = {page for sequence in self.running for page in sequence.pages}
        assert not held & set(pages), "a page in use was evicted"
        held = {page for sequence in self.running for page in sequence.window.values()}
        assert not held & set(sliding_pages), "a sliding page in use was evicted"
        return pages, sliding_pages

    @rule(salt=SALTS, ids=IDS)
    def match(self, salt: Salt, ids: Ids) -> None:
        match = self.tree.match(salt, ids)
        cached = self.cached()
        longest = max((n for n in range(1, len(ids) + 1) if (salt, ids[:n]) in cached), default=0)
        assert len(match.nodes) * SIZE + match.num_tail == longest
        following = {
            key[1][longest]
            for key in cached
            if key[0] == salt and len(key[1]) > longest and key[1][:longest] == ids[:longest]
        }
        assert self.tree.continuations(salt, ids) == (longest, tuple(sorted(following)))
        self.check_content(match, ids)

    @rule(salt=SALTS, ids=IDS, session=SESSIONS)
    def begin(self, salt: Salt, ids: Ids, session: str | None) -> None:
        """Start a sequence on what is cached of it, the last id left out."""
        match = self.tree.match(salt, ids[:-1])
        tail = match.tail if match.tail is not None and match.tail.sliding_page >= 0 else None
        num_tail = 0 if tail is None else match.num_tail
        start = self.tree.sliding.resume_position(match.nodes, num_tail)
        assert start == self.resumable(match, len(match.nodes) * SIZE + num_tail)
        self.tree.lock(match.root)
        for node in match.nodes:
            self.tree.lock(node, session)
        pages = [node.page for node in match.nodes]
        sequence = Running(salt, session, ids, match.root, match.nodes, pages, start)
        for index in range(WINDOWS.first_page(start) if start else 0, -(-start // SIZE)):
            if index < len(match.nodes):
                sequence.window[index] = self.tree.sliding.hold(match.nodes[index])
        sequence.num_kept = start // SIZE
        self.running.append(sequence)
        if tail is not None and start > len(match.nodes) * SIZE:
            copied = self.content[tail.page][:num_tail]
            sliding_copied = self.sliding_content[tail.sliding_page][:num_tail]
            taken = self.take(1, 1)
            if taken is None:
                self.running.remove(sequence)
                sequence.num_computed = len(match.nodes) * SIZE
                self.leave(sequence, 0.0)
                return
            ([page], [sliding_page]) = taken
            self.content[page], self.sliding_content[sliding_page] = copied, sliding_copied
            sequence.pages.append(page)
            sequence.own.add(page)
            sequence.window[start // SIZE] = sliding_page

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 3 * SIZE))
    def compute(self, choice: int, count: int) -> None:
        """Compute some more ids of a sequence, as far as pages go."""
        sequence = self.running[choice % len(self.running)]
        end = min(len(sequence.ids), sequence.num_computed + count)
        num_pages = -(-end // SIZE)
        wanted = [
            index
            for index in range(sequence.num_computed // SIZE, num_pages)
            if index not in sequence.window
        ]
        taken = self.take(max(num_pages - len(sequence.pages), 0), len(wanted))
        if taken is None:
            return
        pages, sliding_pages = taken
        sequence.pages += pages
        sequence.own |= set(pages)
        sequence.window |= dict(zip(wanted, sliding_pages, strict=True))
        for position in range(sequence.num_computed, end):
            index, offset = divmod(position, SIZE)
            # Nothing that a sliding layer reads is lost.
            for before in range(WINDOWS.first_page(position), index):
                kept = self.sliding_content[sequence.window[before]]
                assert kept == sequence.ids[before * SIZE : (before + 1) * SIZE]
            token_id, page = sequence.ids[position], sequence.window[index]
            assert not sequence.holds_of_tree(index), "a shared sliding page is written"
            before_it = self.sliding_content.get(page, ())[:offset]
            self.sliding_content[page] = (*before_it, token_id)
            if index >= len(sequence.path):
                page = sequence.pages[index]
                assert page in sequence.own, "a shared page is written"
                self.content[page] = (*self.content.get(page, ())[:offset], token_id)
            elif offset == SIZE - 1:
                assert self.sliding_content[page] == sequence.path[index].tokens
        sequence.num_computed = end
        self.keep(sequence, end // SIZE)

    def keep(self, sequence: Running, num_pages: int) -> None:
        for index in range(sequence.num_kept, num_pages):
            if index >= len(sequence.path):
                self.insert(sequence, index, (index + 1) * SIZE)
            elif sequence.path[index].sliding_page < 0:
                self.tree.adopt(sequence.path[index], sequence.window[index], 0)
        sequence.num_kept = max(sequence.num_kept, num_pages)

    def insert(self, sequence: Running, index: int, end: int) -> None:
        parent = sequence.path[-1] if sequence.path else sequence.root
        page, sliding_page = sequence.pages[index], sequence.window.get(index, -1)
        ids = sequence.ids[index * SIZE : end]
        node = self.tree.insert(parent, ids, page, sliding_page, 0, sequence.session)
        sequence.path.append(node)
        if node.page == page:
            sequence.own.discard(page)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99))
    def trim(self, choice: int) -> None:
        """Give back what is before a sequence's window."""
        sequence = self.running[choice % len(self.running)]
        for index in sorted(sequence.window):
            if index < WINDOWS.first_kept_page(sequence.num_computed):
                self.drop(sequence, index)

    def drop(self, sequence: Running, index: int) -> None:
        if sequence.holds_of_tree(index):
            self.tree.sliding.release(sequence.path[index])
        else:
            self.sliding_pool.release([sequence.window[index]])
        del sequence.window[index]

    @precondition(lambda self: any(sequence.path for sequence in self.running))
    @rule(choice=st.integers(0, 99), where=st.integers(0, 99), is_spare=st.booleans())
    def make_point(self, choice: int, where: int, is_spare: bool) -> None:
        sequence = self.running[choice % len(self.running)]
        if not sequence.path:
            return
        index = where % len(sequence.path)
        position = index * SIZE + 1 + where % len(sequence.path[index].tokens)
        first = WINDOWS.first_page(position)
        there = all(node.sliding_page >= 0 for node in sequence.path[first : index + 1])
        made = self.tree.sliding.make_point(
            sequence.path[index], index + 1 - first, is_spare=is_spare
        )
        assert made == there

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), kept_s=st.sampled_from([0.0, 5.0]))
    def end(self, choice: int, kept_s: float) -> None:
        """End a sequence, anywhere: a preemption or an abort is the same to the tree."""
        self.leave(self.running.pop(choice % len(self.running)), self.now_s + kept_s)

    def leave(self, sequence: Running, kept_until_s: float) -> None:
        end = sequence.num_computed
        self.keep(sequence, end // SIZE)
        if end > len(sequence.path) * SIZE:
            self.insert(sequence, len(sequence.path), end)
        if sequence.path and end >= len(sequence.path) * SIZE:
            last = sequence.path[-1]
            self.tree.sliding.make_point(last, 1)
        for index in sorted(sequence.window):
            self.drop(sequence, index)
        self.pool.release(sequence.own)
        self.tree.unlock_path(sequence.root, sequence.path)
        self.tree.keep(sequence.salt, tuple(sequence.ids[:end]), kept_until_s)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: len(self.running) < 3)
    @rule()
    def flush(self) -> None:
        num_used = self.pool.num_used + self.sliding_pool.num_used
        num_freed = self.tree.flush()
        assert num_freed == num_used - self.pool.num_used - self.sliding_pool.num_used
        assert self.tree.num_evictable == self.tree.sliding.num_evictable == 0
        locked = {node for sequence in self.running for node in sequence.path}
        assert self.tree.num_nodes == len(locked)

    @rule(session=st.sampled_from(["x", "y"]))
    def drop_session(self, session: str) -> None:
        others = {node for node in self.cached().values() if node.session != session}
        self.tree.drop_session(session)
        left = set(self.cached().values())
        assert others <= left
        assert all(node.num_locks or node.session != session or node.children for node in left)

    @invariant()
    def everything_adds_up(self) -> None:
        self.tree.check_integrity()
        self.pool.check_integrity()
        self.sliding_pool.check_integrity()
        num_locked = self.tree.num_nodes - self.tree.num_evictable
        num_own = sum(len(sequence.own) for sequence in self.running)
        assert self.pool.num_free + self.tree.num_evictable + num_locked + num_own == NUM_PAGES
        locked = {node for sequence in self.running for node in sequence.path}
        assert num_locked == len(locked)
        windows = [page for sequence in self.running for page in sequence.window.values()]
        num_sliding = self.sliding_pool.num_free + self.tree.sliding.num_evictable
        assert num_sliding + len(set(windows)) == NUM_SLIDING_PAGES
        if not self.running:
            assert num_locked == num_own == 0
            assert set(self.tree._roots) == {salt for salt, _ in self.cached()}


def run(num_examples: int) -> None:
    run_state_machine_as_test(
        RadixMachine,
        settings=settings(max_examples=num_examples, stateful_step_count=350, deadline=None),
    )


def test_the_tree_is_a_dict_of_prefixes() -> None:
    run(20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tree_is_a_dict_of_prefixes_for_a_hundred_thousand_operations() -> None:
    run(300)

"""PagePool against a dict of holders: nothing is lost, nothing is handed out twice."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxserve.cache.pages import PagePool

NUM_PAGES = 12


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders: dict[int, int] = {}

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        num_free = NUM_PAGES - 1 - len(self.holders)
        pages = self.pool.allocate(count)
        if count > num_free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & (self.holders.keys() | {0})
        self.holders.update(dict.fromkeys(pages, 1))

    @rule(choice=st.integers(0, NUM_PAGES))
    def share(self, choice: int) -> None:
        if not self.holders:
            return
        page = sorted(self.holders)[choice % len(self.holders)]
        self.pool.share([page])
        self.holders[page] += 1

    @rule(choice=st.integers(0, NUM_PAGES))
    def release(self, choice: int) -> None:
        if not self.holders:
            return
        page = sorted(self.holders)[choice % len(self.holders)]
        self.pool.release([page])
        self.holders[page] -= 1
        if self.holders[page] == 0:
            del self.holders[page]

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.holders)
        assert self.pool.num_free + self.pool.num_used == NUM_PAGES - 1


TestPagePool = PagePoolMachine.TestCase

"""PagePool against a set of held pages: nothing is lost, nothing is handed out twice."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxserve.cache.pages import PagePool

NUM_PAGES = 12


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: set[int] = set()

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        num_free = NUM_PAGES - 1 - len(self.held)
        pages = self.pool.allocate(count)
        if count > num_free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & (self.held | {0})
        self.held.update(pages)

    @rule(choice=st.integers(0, NUM_PAGES))
    def release(self, choice: int) -> None:
        if not self.held:
            return
        page = sorted(self.held)[choice % len(self.held)]
        self.pool.release([page])
        self.held.remove(page)

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_free + self.pool.num_used == NUM_PAGES - 1


TestPagePool = PagePoolMachine.TestCase

import pytest

from jaxserve.cache.pages import PagePool
from jaxserve.errors import ConfigError, InvariantError


def test_hands_out_every_page_but_the_scratch_page() -> None:
    pool = PagePool(5)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_takes_nothing_when_too_few_are_free() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_allocating_no_pages_works_on_an_empty_pool() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    assert pool.allocate(0) == []


@pytest.mark.parametrize("page", [0, 1])
def test_release_of_an_unheld_page_is_a_bug(page: int) -> None:
    with pytest.raises(InvariantError):
        PagePool(3).release([page])


def test_needs_a_page_beside_the_scratch_page() -> None:
    with pytest.raises(ConfigError):
        PagePool(1)


def test_integrity_check_passes_and_finds_each_kind_of_damage() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2) or []
    pool.check_integrity()
    pool._is_held[pages[0]] = False
    with pytest.raises(InvariantError, match=f"page {pages[0]}"):
        pool.check_integrity()
    pool._is_held[pages[0]] = True
    pool._free.append(pool._free[0])
    with pytest.raises(InvariantError, match="twice"):
        pool.check_integrity()

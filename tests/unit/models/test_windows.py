"""Which pages sliding layers need, against counting them position by position."""

import pytest

from jaxserve.models.windows import SLACK_PAGES, Windows

WINDOWS = [
    Windows(page_size=size, window=window)
    for size, window in [
        (1, 1),
        (1, 3),
        (4, 2),
        (4, 3),
        (4, 4),
        (4, 5),
        (8, 16),
        (32, 512),
        (32, 513),
    ]
]


def pages_read(windows: Windows, position: int) -> set[int]:
    """Pages that computing a position reads, its own included."""
    first = max(position - windows.window + 1, 0)
    return {key // windows.page_size for key in range(first, position + 1)}


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_the_first_page_is_that_of_the_first_key_in_the_window(windows: Windows) -> None:
    for position in range(3 * windows.window + 2 * windows.page_size):
        assert windows.first_page(position) == min(pages_read(windows, position))


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_row_never_holds_more_than_it_is_said_to(windows: Windows) -> None:
    most = 0
    for position in range(3 * windows.window + 9 * windows.page_size):
        kept = range(windows.first_kept_page(position), position // windows.page_size + 1)
        assert pages_read(windows, position) <= set(kept)
        most = max(most, len(kept))
    assert windows.row_pages - 1 <= most <= windows.row_pages


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_point_keeps_what_any_position_of_its_page_reads(windows: Windows) -> None:
    size = windows.page_size
    for page in range(windows.window // size, windows.window // size + 5):
        read = set()
        for position in range(page * size + 1, (page + 1) * size + 1):
            read |= {p for p in pages_read(windows, position) if p <= page}
        assert windows.point_pages - 1 <= len(read) <= windows.point_pages


def test_a_window_before_the_start_ends_there() -> None:
    windows = Windows(page_size=32, window=512)
    assert [windows.first_page(p) for p in (0, 511, 542, 543)] == [0, 0, 0, 1]
    assert windows.first_kept_page(543 + SLACK_PAGES * 32) == 1
    assert (windows.row_pages, windows.point_pages, windows.pages_for(33)) == (19, 17, 2)

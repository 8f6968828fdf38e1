"""Which chunks fit one call, by hand."""

import pytest

from jaxserve.device.buckets import ExtendBucket, smallest_fitting

BUCKET = ExtendBucket(tokens=64, block=16)


@pytest.mark.parametrize("lengths", [[64], [1, 1, 1, 1], [17, 32], [16, 16, 16, 16], []])
def test_chunks_that_fit(lengths: list[int]) -> None:
    assert BUCKET.fits(lengths)


@pytest.mark.parametrize("lengths", [[65], [1, 1, 1, 1, 1], [17, 33], [49, 1]])
def test_chunks_that_do_not_fit_since_each_takes_whole_blocks(lengths: list[int]) -> None:
    assert not BUCKET.fits(lengths)


@pytest.mark.parametrize(("needed", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6)])
def test_the_smallest_fitting_size(needed: int, size: int) -> None:
    assert smallest_fitting((1, 2, 4, 6), needed) == size

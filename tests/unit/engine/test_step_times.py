import pytest

from jaxserve.device.buckets import ExtendBucket
from jaxserve.engine.step_times import StepTimes

SMALL, MIDDLE, LARGE = (ExtendBucket(tokens=tokens, block=8) for tokens in (8, 16, 32))


@pytest.fixture
def times() -> StepTimes:
    return StepTimes((SMALL, MIDDLE, LARGE))


def test_decode_is_unknown_until_one_ran(times: StepTimes) -> None:
    assert times.decode_s(4) is None


def test_decode_is_the_median_of_the_last_five(times: StepTimes) -> None:
    for duration_s in (9.0, 0.1, 0.2, 0.3, 7.0, 0.2):
        times.learn_decode(4, duration_s)
    assert times.decode_s(4) == 0.2


def test_decode_of_another_size_is_estimated_by_the_nearest(times: StepTimes) -> None:
    times.learn_decode(1, 0.1)
    times.learn_decode(8, 0.8)
    assert times.decode_s(7) == 0.8
    assert times.decode_s(64) == 0.8
    assert times.decode_s(2) == 0.1


def test_the_smallest_bucket_when_nothing_is_known(times: StepTimes) -> None:
    assert times.largest_within(1.0) is SMALL


def test_the_smallest_bucket_when_even_that_is_too_slow(times: StepTimes) -> None:
    times.learn_extend(SMALL, 5.0)
    assert times.largest_within(1.0) is SMALL


def test_the_largest_bucket_within_the_limit(times: StepTimes) -> None:
    for bucket, duration_s in ((SMALL, 0.5), (MIDDLE, 0.8), (LARGE, 1.4)):
        times.learn_extend(bucket, duration_s)
    assert times.largest_within(1.0) is MIDDLE
    assert times.largest_within(1.4) is LARGE


def test_an_unmeasured_bucket_is_taken_to_grow_with_its_tokens(times: StepTimes) -> None:
    times.learn_extend(SMALL, 0.4)
    assert times.largest_within(0.8) is MIDDLE


def test_a_fresh_small_bucket_bounds_a_stale_larger_one(times: StepTimes) -> None:
    times.learn_extend(MIDDLE, 50.0)
    times.learn_extend(SMALL, 0.4)
    assert times.largest_within(0.8) is MIDDLE


def test_a_bucket_a_little_too_slow_is_tried_again_now_and_then(times: StepTimes) -> None:
    times.learn_extend(SMALL, 0.8)
    times.learn_extend(MIDDLE, 1.2)
    chosen = [times.largest_within(1.0) for _ in range(64)]
    assert chosen.count(MIDDLE) == 2
    assert chosen.count(SMALL) == 62


def test_a_bucket_that_would_be_filled_to_a_small_part_is_not_the_quickest(
    times: StepTimes,
) -> None:
    for bucket, duration_s in ((SMALL, 0.3), (MIDDLE, 0.4), (LARGE, 0.7)):
        times.learn_extend(bucket, duration_s)
    assert times.quickest_for(100, LARGE) is LARGE
    assert times.quickest_for(32, LARGE) is LARGE
    assert times.quickest_for(17, LARGE) is MIDDLE  # 0.4 / 16 before 0.7 / 17 and 0.3 / 8
    assert times.quickest_for(8, LARGE) is SMALL
    assert times.quickest_for(100, MIDDLE) is MIDDLE


def test_the_largest_bucket_is_the_quickest_where_nothing_is_known(times: StepTimes) -> None:
    assert times.quickest_for(1, MIDDLE) is MIDDLE

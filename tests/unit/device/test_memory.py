"""The page pool sized from bytes, and what is refused."""

import pytest

from jaxserve.device.memory import GIB, MemoryBudget
from jaxserve.device.plan import PAGE_SIZE
from jaxserve.errors import ConfigError


def budget(*, limit_bytes: int | None = None, kv_bytes: int = 10_500) -> MemoryBudget:
    return MemoryBudget(
        limit_bytes=limit_bytes,
        weight_bytes=3 * GIB,
        int4_bytes=GIB,
        state_bytes=0,
        temp_bytes=GIB,
        kv_bytes=kv_bytes,
        bytes_per_page=1_000,
    )


def test_the_pool_is_whole_pages_and_the_scratch_page_keeps_no_tokens() -> None:
    assert budget().num_pages == 10
    assert budget().num_tokens == 9 * PAGE_SIZE


@pytest.mark.parametrize("kv_bytes", [-5_000, 0, 999])
def test_no_room_is_no_tokens(kv_bytes: int) -> None:
    assert budget(kv_bytes=kv_bytes).num_tokens == 0
    message = "does not fit" if kv_bytes > 0 else "leave the device no room"
    with pytest.raises(ConfigError, match=message):
        budget(kv_bytes=kv_bytes).check(1)


def test_a_sequence_that_just_fits_is_served() -> None:
    budget().check(9 * PAGE_SIZE)
    with pytest.raises(ConfigError, match=f"max-model-len {9 * PAGE_SIZE + 1} does not fit"):
        budget().check(9 * PAGE_SIZE + 1)


def test_more_than_the_device_has_is_refused_with_the_table() -> None:
    fits = budget(limit_bytes=4 * GIB + 10_500)
    fits.check(PAGE_SIZE)

    with pytest.raises(ConfigError, match="exceed the device") as refusal:
        budget(limit_bytes=4 * GIB + 10_499).check(PAGE_SIZE)
    assert "weights                 3.00 GiB, of them int4 1.00 GiB" in str(refusal.value)


def test_the_table_names_every_share() -> None:
    table = budget(limit_bytes=8 * GIB).table(100)

    lines = [line.split(maxsplit=2) for line in table.splitlines()]
    assert [line[0] for line in lines] == [
        "device",
        "weights",
        "slots",
        "program",
        "KV",
        "KV",
        "streams",
    ]
    assert "8.00 GiB" in table
    assert "10 pages of 32 tokens" in table
    # A sequence of 100 tokens takes 4 of the 9 pages.
    assert "2 of 100 tokens" in table
    assert "none set" in budget().table(100)

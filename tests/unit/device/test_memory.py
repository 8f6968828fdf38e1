"""The page pools sized from bytes, and what is refused."""

from dataclasses import replace

import pytest

from jaxserve.device.choices import DEVICE_FRACTION
from jaxserve.device.memory import GIB, MemoryBudget, PageMix
from jaxserve.device.plan import PAGE_SIZE
from jaxserve.device.state import state_num_bytes
from jaxserve.device.targets import V6E_BYTES
from jaxserve.errors import ConfigError
from jaxserve.models.kv_cache import KVDtype
from scripts.tpu_report import model_config

# No page of the sliding kind costs anything.
FULL_ONLY = PageMix(
    kv_dtype="bfloat16",
    bytes_per_page=1_000,
    bytes_per_sliding_page=0,
    num_working_pages=3,
    pages_per_point=2,
    tokens_per_point=4 * PAGE_SIZE,
    least_points=1,
)


def budget(
    *, limit_bytes: int | None = None, kv_bytes: int = 10_500, mix: PageMix = FULL_ONLY
) -> MemoryBudget:
    return MemoryBudget(
        limit_bytes=limit_bytes,
        weight_bytes=3 * GIB,
        packed_bytes={"int4": GIB, "int8": GIB // 2},
        state_bytes=0,
        temp_bytes=GIB,
        kv_bytes=kv_bytes,
        mix=mix,
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
    assert "weights                 3.00 GiB, of them int4 1.00 GiB, int8 0.50 GiB" in str(
        refusal.value
    )


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
        "KV",
        "resume",
        "streams",
    ]
    assert "8.00 GiB" in table
    assert "10 pages of 32 tokens, bfloat16" in table
    # A sequence of 100 tokens takes 4 of the 9 pages.
    assert "2 of 100 tokens" in table
    assert "none set" in budget().table(100)


def test_sliding_pages_are_those_of_running_rows_and_of_a_stated_number_of_points() -> None:
    mix = replace(FULL_ONLY, bytes_per_sliding_page=100)
    # 3 pages for what runs; a point of 2 pages for each 4 pages of tokens begun; the scratch page.
    assert [mix.num_sliding_pages(n) for n in (9, 10, 13, 14, 101)] == [8, 10, 10, 12, 54]
    assert [replace(mix, least_points=3).num_sliding_pages(n) for n in (11, 13, 14)] == [10, 10, 12]
    # There is nothing to keep more of them for than one beside each page of tokens.
    assert [mix.num_sliding_pages(n) for n in (0, 1, 2, 6)] == [0, 1, 2, 6]


@pytest.mark.parametrize("kv_bytes", [0, 999, 1_099, 1_100, 5_000, 12_345, 1_234_567])
def test_the_pools_together_are_the_most_that_fit(kv_bytes: int) -> None:
    mix = replace(FULL_ONLY, bytes_per_sliding_page=100)

    def num_bytes(num_pages: int) -> int:
        return 1_000 * num_pages + 100 * mix.num_sliding_pages(num_pages)

    num_pages = mix.num_pages(kv_bytes)
    assert num_bytes(num_pages) <= kv_bytes < num_bytes(num_pages + 1)


@pytest.mark.parametrize(
    ("kv_dtype", "tokens", "kib_per_page"),
    # int8 has half the bytes, and 128 scales of 4 bytes a page in 3 full and in 12 sliding layers.
    [("bfloat16", 3_300_000, (192, 384)), ("int8", 6_500_000, (96 + 1.5, 192 + 6))],
)
def test_a_chip_of_32_gb_holds_the_tokens_that_are_promised_for_e2b(
    kv_dtype: KVDtype, tokens: int, kib_per_page: tuple[float, float]
) -> None:
    """The table of docs/performance.md: estimated, for nothing here was measured on a chip."""
    config = model_config("e2b")
    max_batch = 16
    mix = PageMix.of_model(
        config, kv_dtype, max_batch=max_batch, chunk_tokens=2048, tokens_per_point=8192
    )
    limit_bytes = int(V6E_BYTES * DEVICE_FRACTION)
    weight_bytes, temp_bytes = 6_560_000_000, 700_000_000
    state_bytes = state_num_bytes(max_batch, config.vocab_size)
    made = MemoryBudget(
        limit_bytes=limit_bytes,
        weight_bytes=weight_bytes,
        packed_bytes={},
        state_bytes=state_bytes,
        temp_bytes=temp_bytes,
        kv_bytes=limit_bytes - weight_bytes - state_bytes - temp_bytes,
        mix=mix,
    )

    made.check(8192)
    assert (mix.bytes_per_page / 1024, mix.bytes_per_sliding_page / 1024) == kib_per_page
    assert made.num_tokens >= tokens
    assert made.num_resume_points >= made.num_tokens // 8192
    # Every token in every layer would cost a page of both kinds for each 32.
    assert made.num_tokens > 2.4 * made.kv_bytes / (sum(kib_per_page) * 1024 / 32)

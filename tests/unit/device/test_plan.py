"""The sizes that programs are compiled for."""

import pytest

from jaxserve.device.plan import AttentionKernel, DevicePlan, make_plan, pages_for
from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.kv_cache import bytes_per_page


def plan(
    *,
    max_batch: int = 8,
    max_model_len: int = 4096,
    is_accelerator: bool = False,
    attention: AttentionKernel = "xla",
) -> DevicePlan:
    return make_plan(
        dtype="float32",
        kv_dtype="float32",
        num_pages=100,
        num_sliding_pages=50,
        max_batch=max_batch,
        max_model_len=max_model_len,
        is_accelerator=is_accelerator,
        attention=attention,
    )


@pytest.mark.parametrize(
    ("max_batch", "rows"),
    [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (6, (1, 2, 4, 6)), (9, (1, 2, 4, 8, 9))],
)
def test_row_buckets_are_powers_of_two_up_to_the_batch(
    max_batch: int, rows: tuple[int, ...]
) -> None:
    assert plan(max_batch=max_batch).row_buckets == rows
    assert plan(max_batch=max_batch).num_slots == max_batch


@pytest.mark.parametrize("is_accelerator", [False, True])
@pytest.mark.parametrize("max_model_len", [2, 16, 17, 256, 1025, 4096, 131072])
def test_every_length_has_a_table_and_the_largest_chunk_a_whole_number_of_blocks(
    max_model_len: int, is_accelerator: bool
) -> None:
    made = plan(max_model_len=max_model_len, is_accelerator=is_accelerator)

    assert made.table_sizes[-1] == pages_for(max_model_len)
    assert list(made.table_sizes) == sorted(set(made.table_sizes))
    tokens = [bucket.tokens for bucket in made.extend_buckets]
    assert tokens == sorted(set(tokens))
    assert all(bucket.tokens % bucket.block == 0 for bucket in made.extend_buckets)


@pytest.mark.parametrize(("is_accelerator", "chunk_pages"), [(False, (4, 8)), (True, (256, 256))])
def test_extend_reads_more_keys_at_a_time_on_a_cpu(
    is_accelerator: bool, chunk_pages: tuple[int, int]
) -> None:
    made = plan(is_accelerator=is_accelerator)
    assert (made.decode_chunk_pages, made.extend_chunk_pages) == chunk_pages


def test_kernels_choose_their_own_chunks() -> None:
    made = plan(is_accelerator=True, attention="pallas")

    assert made.attention == "pallas"
    assert (made.decode_chunk_pages, made.extend_chunk_pages) == (None, None)
    assert plan(is_accelerator=True).attention == "xla"


def test_a_short_context_needs_no_large_chunks() -> None:
    assert [bucket.tokens for bucket in plan(max_model_len=64).extend_buckets] == [64]
    assert [bucket.tokens for bucket in plan(max_model_len=65).extend_buckets] == [64, 128]


def test_a_cpu_has_one_table_size_and_an_accelerator_a_few() -> None:
    assert len(plan(max_model_len=40_000).table_sizes) == 1
    assert plan(max_model_len=40_000, is_accelerator=True).table_sizes == (256, 1250)


def test_rows_are_powers_of_two_on_a_cpu_and_fewer_sizes_on_an_accelerator() -> None:
    assert plan(max_batch=12).row_buckets == (1, 2, 4, 8, 12)
    assert plan(max_batch=32, is_accelerator=True).row_buckets == (1, 8, 16, 32)
    assert plan(max_batch=1, is_accelerator=True).row_buckets == (1,)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_pages_for_tokens(num_tokens: int, pages: int) -> None:
    assert pages_for(num_tokens) == pages


def test_bytes_of_a_page_are_those_of_the_kinds_layers_that_own_a_cache() -> None:
    rope = RopeConfig(theta=1e4, num_pairs=8)

    def layer(kind: AttentionKind, head_dim: int, kv_source: int) -> LayerConfig:
        return LayerConfig(
            kind=kind,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            mlp_dim=8,
            kv_source=kv_source,
            has_v_proj=True,
            rope=rope,
        )

    config = ModelConfig(
        model_type="gemma4_text",
        vocab_size=8,
        model_dim=8,
        layers=(
            *(layer("full", 16, 0), layer("sliding", 64, 1), layer("full", 32, 2)),
            *(layer("full", 16, 0), layer("full", 32, 2), layer("sliding", 64, 1)),
        ),
        window=4,
        norm_eps=1e-6,
        attention_scale=1.0,
        has_v_norm=True,
        has_layer_scalar=False,
        logit_softcap=None,
        ple_dim=0,
        ple_vocab_size=0,
        max_position=64,
    )

    # Keys and values of two heads, of 16 and of 32 channels in the two full-attention owners.
    full, sliding = 2 * 2 * (16 + 32), 2 * 2 * 64
    assert bytes_per_page(config, "full", 32, "bfloat16") == 2 * 32 * full
    assert bytes_per_page(config, "sliding", 32, "bfloat16") == 2 * 32 * sliding
    assert bytes_per_page(config, "full", 32, "float32") == 4 * 32 * full
    # Two owners, 2 · 2 · 32 scales a page; of fewer positions, whole lanes all the same.
    assert bytes_per_page(config, "full", 32, "int8") == 32 * full + 2 * 4 * 128
    assert bytes_per_page(config, "full", 8, "int8") == 8 * full + 2 * 4 * 128

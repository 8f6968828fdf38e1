"""The sizes that everything on the device is compiled for, chosen once at start-up.

Buckets are few, for every one is a program to compile. On a CPU one page-table size serves every
context, since attention walks it in small chunks; on an accelerator contexts up to a chunk are read
in one piece, so there is a bucket for them (docs/decisions/0010).
"""

from dataclasses import dataclass
from typing import Literal

from jaxserve.device.buckets import ExtendBucket
from jaxserve.models.kv_cache import KVDtype

AttentionKernel = Literal["pallas", "xla"]
"""Attention by a kernel of the TPU's own, which reads pages in place, or in plain JAX."""

PAGE_SIZE = 32
"""Tokens a page: 16 KiB of a one-head layer's bfloat16 keys, a fair size for one DMA."""

CPU_DECODE_CHUNK_TOKENS = 128
CPU_EXTEND_CHUNK_TOKENS = 256
"""Keys that attention in plain JAX reads at a time. In extend every chunk rescales and adds to an
output of as many rows as there are queries, three fifths of its time at 128 keys; decode has few
queries, and at 16 rows was quickest at 128 (docs/experiments.md)."""

ACCELERATOR_CHUNK_TOKENS = 8192
ACCELERATOR_CONTEXTS = (8192,)

ACCELERATOR_ROWS = (1, 8, 16, 32, 64)
"""A step of 2 or 4 rows takes a chip as long as one of 8, and every bucket a minute to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Static sizes of the runner and its programs.

    Attributes:
        dtype: of matrices and their operands, "bfloat16" or "float32".
        kv_dtype: of cached keys and values.
        is_accelerator: whether the device is anything but a CPU.
        num_pages: full-attention pages, the scratch page 0 included.
        num_sliding_pages: the same of sliding layers.
        num_slots: most rows of a decode.
        row_buckets: rows that decode is compiled for, ascending; the last is num_slots.
        table_sizes: entries of a page table that programs are compiled for, ascending; the last
            holds max_model_len.
        decode_chunk_pages: pages that decode's attention in plain JAX reads at a time; None: a
            kernel reads them, in extend as well.
        extend_chunk_pages: the same of extend.
        arena_rows: rows of grammars, beside those that slots own.
    """

    dtype: str
    kv_dtype: KVDtype
    is_accelerator: bool
    page_size: int
    num_pages: int
    num_sliding_pages: int
    num_slots: int
    max_model_len: int
    row_buckets: tuple[int, ...]
    table_sizes: tuple[int, ...]
    extend_buckets: tuple[ExtendBucket, ...]
    decode_chunk_pages: int | None
    extend_chunk_pages: int | None
    arena_rows: int = 0

    @property
    def attention(self) -> AttentionKernel:
        return "pallas" if self.decode_chunk_pages is None else "xla"


def pages_for(num_tokens: int) -> int:
    """Return the pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)


def make_plan(
    *,
    dtype: str,
    kv_dtype: KVDtype,
    num_pages: int,
    num_sliding_pages: int,
    max_batch: int,
    max_model_len: int,
    is_accelerator: bool,
    attention: AttentionKernel,
    arena_rows: int = 0,
) -> DevicePlan:
    """Choose the buckets for two pools and their limits."""
    contexts = [n for n in ACCELERATOR_CONTEXTS if n < max_model_len] if is_accelerator else []
    if is_accelerator:
        decode_tokens = extend_tokens = ACCELERATOR_CHUNK_TOKENS
    else:
        decode_tokens, extend_tokens = CPU_DECODE_CHUNK_TOKENS, CPU_EXTEND_CHUNK_TOKENS
    is_plain = attention == "xla"
    powers = ACCELERATOR_ROWS if is_accelerator else [2**i for i in range(max_batch.bit_length())]
    return DevicePlan(
        dtype=dtype,
        kv_dtype=kv_dtype,
        is_accelerator=is_accelerator,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_sliding_pages=num_sliding_pages,
        num_slots=max_batch,
        max_model_len=max_model_len,
        row_buckets=(*(rows for rows in powers if rows < max_batch), max_batch),
        table_sizes=tuple(pages_for(n) for n in (*contexts, max_model_len)),
        extend_buckets=extend_buckets(max_model_len, is_accelerator=is_accelerator),
        decode_chunk_pages=decode_tokens // PAGE_SIZE if is_plain else None,
        extend_chunk_pages=extend_tokens // PAGE_SIZE if is_plain else None,
        arena_rows=arena_rows,
    )


def extend_buckets(max_model_len: int, *, is_accelerator: bool) -> tuple[ExtendBucket, ...]:
    """Return chunk sizes up to the first that holds a whole prompt."""
    sizes = [(64, 16), (256, 32), (2048, 128)]
    if not is_accelerator:
        sizes = [(64, 16), (128, 32), (256, 32), (1024, 128)]
    needed = sum(tokens < max_model_len for tokens, _ in sizes) + 1
    return tuple(ExtendBucket(tokens=tokens, block=block) for tokens, block in sizes[:needed])

"""TPU kernel: brings prefill blocks' projected keys and values to their form, and into their pages.

It norms and turns keys, norms values, rounds both where pages are int8, and writes whole pages in
place. A scatter of so many tokens goes one by one, and for the small arrays of scales the compiler
would move all of them to VMEM and back. models/attention.py has the same in plain JAX, its oracle
and the path of other devices.

A block is a run of T consecutive positions of one sequence. R blocks, K kv heads, E head dim,
X = K·E, P pages, Z page size, W pages that a block can touch, its window of W·Z positions, J lanes
of a page's scales.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.attention_layer import COMPILER_PARAMS, AttentionLayer, prepare, to_levels
from jaxserve.kernels.int4_kernels import rms_norm
from jaxserve.kernels.page_reader import bytes_read, operands

OFFSET, FIRST, END, IS_CONTINUED = range(4)
"""What the kernel is told of a block, in positions of its window: where its tokens begin, where
those to be written begin and end, and whether its first page is the last one of the block before.
"""


def window_pages(block: int, page_size: int) -> int:
    """Return W: the pages that a block of T positions can touch."""
    return (block + page_size - 2) // page_size + 1


def write_blocks(
    qkv_NO: jax.Array,
    k_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    first_written_R: jax.Array,
    *,
    layer: AttentionLayer,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the pages, the same arrays, with the blocks' keys and values in their places.

    Blocks are in the order of their positions; what they write nobody else reads or writes.

    Args:
        qkv_NO: projected queries, keys, and values if the layer has any; float32 [≥ R·T, O].
        k_norm_E: factors of keys.
        rope: cosines and sines of each token's position, float32 [≥ R·T, E/2].
        pages: as in extend_attention.
        table_RM: pages of positions [m·Z, (m + 1)·Z).
        start_R: position of each block's first token.
        num_valid_R: int32 in [0, T]; tokens beyond are not written.
        first_written_R: first position that is written.
        layer: the rest.
        block: T, a multiple of 8.
    """
    page_size = pages[0].shape[1]
    first_page_R = start_R // page_size
    window_start_R = first_page_R * page_size
    end_R = start_R + num_valid_R - window_start_R
    first_R = jnp.minimum(jnp.maximum(first_written_R, start_R) - window_start_R, end_R)
    index_RW = first_page_R[:, None] + jnp.arange(window_pages(block, page_size))
    page_RW = jnp.take_along_axis(table_RM, index_RW, axis=1, mode="clip")
    writes_R = first_R < end_R
    ends = jnp.stack([first_R, jnp.maximum(end_R - 1, 0)], axis=1) // page_size
    first_page_R, last_page_R = jnp.take_along_axis(page_RW, ends, axis=1, mode="clip").T
    is_continued_R = writes_R[1:] & writes_R[:-1] & (first_page_R[1:] == last_page_R[:-1])
    is_continued_R = jnp.pad(is_continued_R.astype(jnp.int32), (1, 1))
    columns = (start_R - window_start_R, first_R, end_R)
    about_FR = jnp.stack([*(jnp.append(x, 0) for x in columns), is_continued_R])
    written: tuple[jax.Array, jax.Array] = write_windows(
        qkv_NO, k_norm_E, rope, pages, page_RW, about_FR, layer=layer, block=block
    )
    return written


@partial(jax.jit, static_argnames=("layer", "block"))
def write_windows(
    qkv_NO: jax.Array,
    k_norm_E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    page_RW: jax.Array,
    about_FR: jax.Array,
    *,
    layer: AttentionLayer,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Do so, told each block's pages [R, W] and facts [4, R + 1]."""
    num_rows, num_slots = page_RW.shape
    is_int8, width = pages[0].dtype == jnp.int16, pages[0].shape[2]
    arrays = operands(pages)

    def tokens(width: int, column: int = 0) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda r, *_: (r, column))

    parts = [tokens(width, layer.group + i) for i in range(1 + layer.has_v)]
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    first, second = pl.pallas_call(
        partial(_write, layer=layer, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_rows,),
            in_specs=[
                *parts,
                pl.BlockSpec((1, layer.head_dim), lambda r, *_: (0, 0)),
                *[tokens(layer.head_dim // 2)] * 2,
                *[in_hbm] * 2,
            ],
            out_specs=[in_hbm] * 2,
            scratch_shapes=[
                [pltpu.VMEM((num_rows, num_slots, *x.shape[1:]), x.dtype) for x in arrays],
                pltpu.SemaphoreType.DMA((num_rows,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        input_output_aliases={5 + len(parts): 0, 6 + len(parts): 1},
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=num_rows * block * 4 * (width * len(parts) + layer.head_dim)
            + bytes_read(pages, num_rows, num_slots + 2),
            transcendentals=0,
        ),
        compiler_params=COMPILER_PARAMS,
        name=f"extend_writer_{block}_{layer.name}",
    )(page_RW, about_FR, *[qkv_NO] * len(parts), k_norm_E[None], *rope, *arrays)
    return first, second[:, 0] if is_int8 else second


def _write(page_ref: Any, about_ref: Any, *refs: Any, layer: AttentionLayer, block: int) -> None:
    """Write one block; the first step of the grid asks for all pages that are written in part."""
    *inputs, _, _, first, second, staged, read, written = refs
    writer = _Writer((page_ref, about_ref), (first, second), (staged, read, written))
    pl.when(writer.row == 0)(writer.begin)
    pl.when(writer.row > 0)(partial(writer.wait_written, writer.row - 1))

    @pl.when(writer.last_slot(writer.row) >= 0)
    def put() -> None:
        *kv_refs, norm_ref, cos_ref, sin_ref = inputs
        keys, values = [], []
        for head in range(layer.num_kv_heads):
            columns = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            k_TE, v_TE = kv_refs[0][:, columns], kv_refs[-1][:, columns]
            keys.append(prepare(k_TE, norm_ref[...], cos_ref[...], sin_ref[...], layer.eps))
            if layer.norms_v:
                v_TE = rms_norm(v_TE, jnp.ones((1, layer.head_dim)), layer.head_dim, layer.eps)
            values.append(v_TE)
        writer.put(keys, values)

    pl.when(writer.row == writer.num_rows - 1)(partial(writer.wait_written, writer.row))


class _Writer:
    """Puts a block's tokens into copies of its pages, and those into HBM.

    A page that two blocks share is written with the second one, into the first one's copy of it.
    """

    def __init__(self, scalar_refs: Any, page_refs: Any, scratch_refs: Any) -> None:
        self._page, self._about = scalar_refs
        self._pages = page_refs
        self._staged, self._read, self._written = scratch_refs
        self._num_slots, self._page_size = self._staged[0].shape[1:3]
        self.row, self.num_rows = pl.program_id(0), self._staged[0].shape[0]

    def last_slot(self, row: Any) -> Any:
        """Return the last page of its window that a block writes; below 0: it writes none."""
        is_written = self._about[FIRST, row] < self._about[END, row]
        return jnp.where(is_written, lax.div(self._about[END, row] - 1, self._page_size), -1)

    def begin(self) -> None:
        """Ask for the pages that blocks write in part."""
        for row in range(self.num_rows):
            self._each_kept(row, lambda copy: copy.start())

    def wait_written(self, row: Any) -> None:
        """Wait until a block's pages are written."""
        self._each_written(row, lambda copy: copy.wait())

    def put(self, keys: list[jax.Array], values: list[jax.Array]) -> None:
        """Write this block, of float32 keys and values [T, E] of each kv head."""
        row, page_size = self.row, self._page_size
        self._each_kept(row, lambda copy: copy.wait())
        first_slot = lax.div(self._about[FIRST, row], page_size)

        @pl.when(self._about[IS_CONTINUED, row] != 0)
        def _() -> None:
            for staged in self._staged:
                staged[row, first_slot] = staged[row - 1, self.last_slot(row - 1)]

        if self._pages[0].dtype == jnp.int16:
            self._put_levels(keys, values)
        else:
            for i, heads in enumerate((keys, values)):
                self._put(i, jnp.concatenate(heads, axis=1))
        self._each_written(row, lambda copy: copy.start())

    def _put_levels(self, keys: list[jax.Array], values: list[jax.Array]) -> None:
        page_size = self._page_size
        levels, scales = zip(*map(to_levels, (*keys, *values)), strict=True)
        k_TX, v_TX = (
            jnp.concatenate(x, axis=1) for x in (levels[: len(keys)], levels[len(keys) :])
        )
        self._put(0, (k_TX & 0xFF) | (v_TX << 8))

        scale_TJ = jnp.zeros((k_TX.shape[0], self._staged[1].shape[-1]))
        lane_TJ = lax.broadcasted_iota(jnp.int32, scale_TJ.shape, 1)
        for part, scale_T1 in enumerate(scales):
            scale_TJ = jnp.where(lax.div(lane_TJ, page_size) == part, scale_T1, scale_TJ)
        placed = self._placed(scale_TJ)
        lane = lax.broadcasted_iota(jnp.int32, (page_size, placed.shape[1]), 1)
        position = lax.broadcasted_iota(jnp.int32, lane.shape, 0)
        is_own = lax.rem(lane, page_size) == position
        for slot in range(self._num_slots):
            own = jnp.where(is_own, placed[slot * page_size : (slot + 1) * page_size], 0.0)
            new_1J = own.sum(axis=0, keepdims=True)
            is_new = self._is_new(slot, lax.rem(lane[:1], page_size))
            old_1J = self._staged[1][self.row, slot]
            self._staged[1][self.row, slot] = jnp.where(is_new, new_1J, old_1J)

    def _put(self, i: int, new_TX: jax.Array) -> None:
        """Put tokens, float32 or int32, into the copies of their pages."""
        staged, page_size = self._staged[i], self._page_size
        placed = self._placed(new_TX)
        position = lax.broadcasted_iota(jnp.int32, (page_size, placed.shape[1]), 0)
        for slot in range(self._num_slots):
            new_ZX = placed[slot * page_size : (slot + 1) * page_size]
            old_ZX = staged[self.row, slot].astype(placed.dtype)
            changed = jnp.where(self._is_new(slot, position), new_ZX, old_ZX)
            staged[self.row, slot] = changed.astype(staged.dtype)

    def _placed(self, x_TN: jax.Array) -> jax.Array:
        """Return the block's window, [W·Z, N], with the tokens in their places."""
        shape = (self._num_slots * self._page_size - x_TN.shape[0], x_TN.shape[1])
        padded = jnp.concatenate([x_TN, jnp.zeros(shape, x_TN.dtype)])
        placed: jax.Array = pltpu.roll(padded, self._about[OFFSET, self.row], 0)
        return placed

    def _is_new(self, slot: int, position: jax.Array) -> jax.Array:
        position = slot * self._page_size + position
        about, row = self._about, self.row
        is_new: jax.Array = (position >= about[FIRST, row]) & (position < about[END, row])
        return is_new

    def _each_kept(self, row: Any, do: Callable[[Any], None]) -> None:
        """Do something to the transfer of each page that is not written as a whole."""
        first, end, last_slot = self._about[FIRST, row], self._about[END, row], self.last_slot(row)
        first_slot = lax.div(first, self._page_size)
        begins, ends = (lax.rem(x, self._page_size) == 0 for x in (first, end))
        keeps_first = (
            (last_slot >= 0)
            & (self._about[IS_CONTINUED, row] == 0)
            & ~(begins & (ends | (last_slot > first_slot)))
        )
        keeps_last = (last_slot > first_slot) & ~ends
        for is_kept, slot in ((keeps_first, first_slot), (keeps_last, last_slot)):

            @pl.when(is_kept)
            def _(slot: Any = slot) -> None:
                for i in range(2):
                    source, target = self._pages[i].at[self._page[row, slot]], self._staged[i]
                    do(pltpu.make_async_copy(source, target.at[row, slot], self._read.at[row]))

    def _each_written(self, row: Any, do: Callable[[Any], None]) -> None:
        """Do something to the transfer of each page that a block writes."""
        first_slot, last_slot = (
            lax.div(self._about[FIRST, row], self._page_size),
            self.last_slot(row),
        )
        # The next block writes the last one.
        end_slot = last_slot - self._about[IS_CONTINUED, row + 1]
        for slot in range(self._num_slots):

            @pl.when((slot >= first_slot) & (slot <= end_slot))
            def _(slot: int = slot) -> None:
                for i in range(2):
                    source, target = self._staged[i].at[row, slot], self._pages[i]
                    do(
                        pltpu.make_async_copy(
                            source, target.at[self._page[row, slot]], self._written
                        )
                    )

"""TPU kernel: all that a decode step does between two products of a layer's attention.

It norms and turns queries and keys, writes the new keys and values to their pages in place, and
attends to them and to all before them, read by page table. On a TPU an operation of its own takes a
microsecond however little it does; this is some twenty of them. models/transformer.py has the same
in plain JAX, its oracle and the path of other devices.

R rows of one position each, N ≥ R rows of the stream, H query heads, K kv heads, G = H/K, E head
dim, X = K·E, P pages, Z page size, M entries of a row's table, J lanes of a page's scales.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.attention_layer import COMPILER_PARAMS, AttentionLayer, prepare, to_levels
from jaxserve.kernels.constants import LANES
from jaxserve.kernels.int4_kernels import rms_norm
from jaxserve.kernels.page_reader import (
    FIRST_PAGE,
    NUM_WRITTEN,
    START,
    PageReader,
    bytes_read,
    operands,
    row_parts,
    scalars,
    scratch,
)
from jaxserve.kernels.running_softmax import RunningSoftmax

ROW_MULTIPLE = 8


def decode_attention(
    qkv_NO: jax.Array,
    head_norms_2E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    first_page_R: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    *,
    layer: AttentionLayer,
    writes: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return attention [N, H·E], of `layer.dtype`, and the pages, the same arrays if not written.

    Args:
        qkv_NO: projected queries, and keys and values if the layer has any; float32.
        head_norms_2E: factors of queries and keys, in the first E columns: to take those out would
            be an operation of its own.
        rope: cosines and sines of each row's position, float32 [N, E/2].
        pages: as in extend_attention; a row writes its position's page, which no other row reads.
        table_RM: pages of positions [(first_page + m)·Z, (first_page + m + 1)·Z).
        first_page_R: int32.
        start_R: position of each row.
        num_valid_R: 0 or 1; a row of 0 writes nothing and gets zeros.
        layer: the rest.
        writes: whether the layer has keys and values of its own; else it reads another's.
    """
    parts = []
    num_rows, table_size = table_RM.shape
    for part in row_parts(num_rows, table_size, ROW_MULTIPLE):
        padded = slice(part.start, -(-part.stop // ROW_MULTIPLE) * ROW_MULTIPLE)
        out_NQ, pages = _call(
            qkv_NO[padded],
            head_norms_2E,
            (rope[0][padded], rope[1][padded]),
            pages,
            *(x[part] for x in (table_RM, first_page_R, start_R, num_valid_R)),
            layer=layer,
            writes=writes,
        )
        parts.append(out_NQ)
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)), pages


@partial(jax.jit, static_argnames=("layer", "writes"))
def _call(
    qkv_NO: jax.Array,
    head_norms_2E: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    table_RM: jax.Array,
    first_page_R: jax.Array,
    start_R: jax.Array,
    num_valid_R: jax.Array,
    *,
    layer: AttentionLayer,
    writes: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    num_rows, table_size = table_RM.shape
    page_size, is_int8 = pages[0].shape[1], pages[0].dtype == jnp.int16
    num_padded, heads, head_dim = qkv_NO.shape[0], layer.num_heads, layer.head_dim
    out = jax.ShapeDtypeStruct((num_padded, heads * head_dim), layer.dtype)
    arrays = operands(pages)
    whole = [qkv_NO, head_norms_2E, *rope]
    scratch_shapes = [
        scratch(arrays, table_size),
        RunningSoftmax.scratch(layer.num_kv_heads, layer.group, head_dim),
        pltpu.VMEM((num_padded, heads, head_dim), jnp.float32),
        pltpu.VMEM(out.shape, jnp.float32),
    ]
    if writes:
        scratch_shapes.append(_Writer.scratch(arrays, num_rows, num_padded, layer))
    page_bytes = bytes_read(pages, num_rows, 1) if writes else 0
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    results = [(out, pl.BlockSpec(out.shape, lambda r, *_: (0, 0)))]
    if writes:
        results += [(jax.ShapeDtypeStruct(x.shape, x.dtype), in_hbm) for x in arrays]
    out_NQ, *written = pl.pallas_call(
        partial(_decode, layer=layer, writes=writes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows,),
            in_specs=[*(pl.BlockSpec(x.shape, lambda r, *_: (0, 0)) for x in whole), *[in_hbm] * 2],
            out_specs=[spec for _, spec in results],
            scratch_shapes=scratch_shapes,
        ),
        out_shape=[shape for shape, _ in results],
        input_output_aliases={7: 1, 8: 2} if writes else {},
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=bytes_read(pages, num_rows, table_size)
            + page_bytes
            + sum(x.nbytes for x in whole)
            + out.size * jnp.dtype(out.dtype).itemsize,
            transcendentals=0,
        ),
        compiler_params=COMPILER_PARAMS,
        name=f"decode_attention_{'writes' if writes else 'reads'}_{layer.name}",
    )(
        *scalars(table_RM, first_page_R, start_R, num_valid_R, page_size),
        *whole,
        *arrays,
    )
    if not writes:
        return out_NQ, pages
    first, second = written
    return out_NQ, (first, second[:, 0] if is_int8 else second)


def _decode(*refs: Any, layer: AttentionLayer, writes: bool) -> None:
    """Compute one row; the first step of the grid prepares all rows, the last one ends them."""
    kernel = _Decode(refs, layer, writes=writes)
    pl.when(kernel.reader.row == 0)(kernel.begin)
    pl.when(kernel.reader.num_pages > 0)(kernel.attend)
    pl.when(kernel.reader.row == kernel.reader.num_rows - 1)(kernel.end)


class _Decode:
    """The parts of a step of the grid."""

    def __init__(self, refs: tuple[Any, ...], layer: AttentionLayer, *, writes: bool) -> None:
        scalar_refs, self._inputs, refs = refs[:3], refs[3:7], refs[7:]
        page_refs, self._out, refs = refs[:2], refs[2], refs[3:]
        if writes:  # the same memory as what was read in
            page_refs, refs = refs[:2], refs[2:]
        reader_refs, softmax_refs, self._queries, self._results, *writer_refs = refs
        self._layer = layer
        self.reader = PageReader(scalar_refs, page_refs, reader_refs)
        self._softmax = RunningSoftmax(self.reader, softmax_refs, block=1, window=layer.window)
        self._writer = _Writer(self.reader, page_refs, writer_refs[0], layer) if writes else None

    def begin(self) -> None:
        """Ask for pages; meanwhile norm and turn all rows' queries and keys."""
        layer, qkv_ref = self._layer, self._inputs[0]
        head_dim = layer.head_dim
        self.reader.begin()
        self._results[...] = jnp.zeros_like(self._results)
        for head in range(layer.num_heads):
            self._queries[:, head] = self._prepared(head * head_dim, 0) * layer.scale
        if self._writer is None:
            return
        self._writer.begin()
        keys = layer.num_heads * head_dim
        values = keys + (layer.num_kv_heads * head_dim if layer.has_v else 0)
        for head in range(layer.num_kv_heads):
            v_NE = qkv_ref[:, values + head * head_dim : values + (head + 1) * head_dim]
            if layer.norms_v:
                v_NE = rms_norm(v_NE, jnp.ones((1, head_dim)), head_dim, layer.eps)
            self._writer.keep(head, self._prepared(keys + head * head_dim, 1), v_NE)

    def attend(self) -> None:
        """Attend from this row."""
        layer, reader = self._layer, self.reader
        self._softmax.begin()

        def compute(chunk: Any, slot: Any) -> None:
            if self._writer is not None:
                write = partial(self._writer.write, chunk, slot)
                pl.when(chunk == reader.num_chunks - 1)(write)
            queries = [
                self._queries[reader.row, pl.ds(head * layer.group, layer.group)]
                for head in range(layer.num_kv_heads)
            ]
            self._softmax.add([q_GE.astype(layer.dtype) for q_GE in queries], chunk, slot)

        reader.each_chunk(compute)
        for kv_head in range(layer.num_kv_heads):
            self._softmax.finish(kv_head)
        for head in range(layer.num_heads):
            columns = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            kv_head, i = divmod(head, layer.group)
            self._results[pl.ds(reader.row, 1), columns] = self._softmax.acc[kv_head, i : i + 1]

    def end(self) -> None:
        """Hand all rows over."""
        self._out[...] = self._results[...].astype(self._out.dtype)
        if self._writer is not None:
            self._writer.end()

    def _prepared(self, first: int, norm: int) -> jax.Array:
        """Norm and turn the head of all rows that begins at a column, [N, E]."""
        qkv_ref, norms_ref, cos_ref, sin_ref = self._inputs
        x_NE = qkv_ref[:, first : first + self._layer.head_dim]
        factors_1E = norms_ref[norm : norm + 1, : self._layer.head_dim]
        return prepare(x_NE, factors_1E, cos_ref[...], sin_ref[...], self._layer.eps)


class _Writer:
    """Puts each row's new key and value into the last page of its last chunk, and that into HBM.

    Whole pages are written: a position's values share words with its neighbours'. What is written
    is copied aside first, for the chunk's buffer is soon fetched into again.
    """

    def __init__(
        self, reader: PageReader, page_refs: tuple[Any, Any], refs: Any, layer: AttentionLayer
    ) -> None:
        self._reader, self._pages, self._layer = reader, page_refs, layer
        self._new, self._scales, self._staged, self._semaphores = refs
        self._is_int8 = page_refs[0].dtype == jnp.int16

    @staticmethod
    def scratch(
        pages: tuple[jax.Array, jax.Array], num_rows: int, num_padded: int, layer: AttentionLayer
    ) -> list[Any]:
        """Return `refs`: new keys and values or words, new scales, pages, semaphores."""
        width = layer.num_kv_heads * layer.head_dim
        dtype = jnp.int32 if pages[0].dtype == jnp.int16 else jnp.float32
        return [
            pltpu.VMEM((2, num_padded, width), dtype),
            pltpu.VMEM((2 * layer.num_kv_heads, num_padded, LANES), jnp.float32),
            [pltpu.VMEM((num_rows, *x.shape[1:]), x.dtype) for x in pages],
            pltpu.SemaphoreType.DMA((2,)),
        ]

    def begin(self) -> None:
        self._reader.counters[NUM_WRITTEN] = 0

    def keep(self, head: int, k_NE: jax.Array, v_NE: jax.Array) -> None:
        """Take a head's keys and values of all rows."""
        columns = slice(head * k_NE.shape[1], (head + 1) * k_NE.shape[1])
        if not self._is_int8:
            self._new[0, :, columns], self._new[1, :, columns] = k_NE, v_NE
            return
        words = []
        for i, x_NE in enumerate((k_NE, v_NE)):
            levels_NE, scale_N1 = to_levels(x_NE)
            words.append(levels_NE)
            part = i * self._layer.num_kv_heads + head
            self._scales[part] = jnp.broadcast_to(scale_N1, self._scales.shape[1:])
        self._new[0, :, columns] = (words[0] & 0xFF) | (words[1] << 8)

    def write(self, chunk: Any, slot: Any) -> None:
        """Put this row's into the page and begin to write that."""
        reader = self._reader
        row, page_size = reader.row, reader.page_size
        last = reader.num_pages - 1
        first_position = (reader.about[FIRST_PAGE, row] + last) * page_size
        offset = reader.about[START, row] - first_position
        j = last - chunk * reader.chunk_pages
        for i, buffer in enumerate(reader.buffers):
            if i == 1 and self._is_int8:
                page = self._with_scales(buffer[slot, j], row, offset)
            else:
                page = _with_position(buffer[slot, j], self._new[i, pl.ds(row, 1)], offset)
            buffer[slot, j] = page
            self._staged[i][row] = page
            self._copy(i, row, reader.table[row, last]).start()
        reader.counters[NUM_WRITTEN] += 1

    def end(self) -> None:
        """Wait until all is written."""

        def wait(_: Any, __: None) -> None:
            for i in range(2):
                self._copy(i, 0, 0).wait()

        lax.fori_loop(0, self._reader.counters[NUM_WRITTEN], wait, None)

    def _with_scales(self, scale_1J: jax.Array, row: Any, offset: Any) -> jax.Array:
        lane = lax.broadcasted_iota(jnp.int32, scale_1J.shape, 1)
        for part in range(2 * self._layer.num_kv_heads):
            new_1L = self._scales[part, pl.ds(row, 1)]
            new_1J = jnp.concatenate([new_1L] * (scale_1J.shape[1] // LANES), axis=1)
            scale_1J = jnp.where(lane == part * self._reader.page_size + offset, new_1J, scale_1J)
        return scale_1J

    def _copy(self, i: int, row: Any, page: Any) -> Any:
        return pltpu.make_async_copy(
            self._staged[i].at[row], self._pages[i].at[page], self._semaphores.at[i]
        )


def _with_position(page_ZX: jax.Array, new_1X: jax.Array, offset: Any) -> jax.Array:
    """Return a page with a position's values, float32 or int32 words, in their place."""
    if page_ZX.dtype.itemsize == 4:
        position = lax.broadcasted_iota(jnp.int32, page_ZX.shape, 0)
        return jnp.where(position == offset, new_1X, page_ZX)
    # Two positions share an int32: the lower half is the even one's.
    if page_ZX.dtype == jnp.bfloat16:
        rounded_1X = new_1X.astype(jnp.bfloat16).astype(jnp.float32)
        new_1X = lax.shift_right_logical(pltpu.bitcast(rounded_1X, jnp.int32), 16)
    pairs = pltpu.bitcast(page_ZX, jnp.int32)
    low = (pairs & ~0xFFFF) | (new_1X & 0xFFFF)
    high = (pairs & 0xFFFF) | (new_1X << 16)
    pair = lax.broadcasted_iota(jnp.int32, pairs.shape, 0)
    changed = jnp.where(lax.rem(offset, 2) == 0, low, high)
    return pltpu.bitcast(jnp.where(pair == lax.div(offset, 2), changed, pairs), page_ZX.dtype)

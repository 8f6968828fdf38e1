"""The two step programs: `decode` gives every row one token, `extend` takes in known tokens.

Pure functions of (params, cache, state, staged data); cache and state are donated. They share the
model's layers and know nothing of requests. B decode rows; extend: N flat tokens in R blocks of n
sequences.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.device.buckets import ExtendBucket
from jaxserve.device.sampling import sample
from jaxserve.device.state import Column, DecodeState, read_sampling
from jaxserve.models.attention import PagedRows
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.params import Params
from jaxserve.models.transformer import logits, run_reading_layers, run_writing_layers

BLOCK_FIELDS = 3
"""Staged numbers of an extend block: its sequence, its first position, its number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendShape:
    """The static sizes of one extend program."""

    bucket: ExtendBucket
    num_sequences: int
    table_size: int
    chunk_pages: int

    @property
    def num_blocks(self) -> int:
        return self.bucket.tokens // self.bucket.block

    @property
    def row_size(self) -> int:
        return Column.TABLE + self.table_size

    @property
    def staged_size(self) -> int:
        return (
            self.bucket.tokens + self.num_blocks * BLOCK_FIELDS + self.num_sequences * self.row_size
        )


def decode(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    staged_BF: jax.Array,
    *,
    config: ModelConfig,
    chunk_pages: int,
) -> tuple[KVCache, DecodeState, jax.Array]:
    """Run each row's last sampled token and sample the next; returns the ids, int32 [B]."""
    slot_B = staged_BF[:, Column.SLOT]
    rows = _single_tokens(staged_BF)
    ids_B = state.last_token_S[slot_B]
    stream, cache = run_writing_layers(params, config, ids_B, cache, rows, chunk_pages=chunk_pages)
    x_BD = run_reading_layers(params, config, stream, cache, rows, chunk_pages=chunk_pages)
    ids_B = sample(logits(params, config, x_BD), read_sampling(staged_BF))
    return cache, _store_tokens(state, slot_B, ids_B), ids_B


def extend(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    staged: jax.Array,
    *,
    config: ModelConfig,
    shape: ExtendShape,
    scratch_slot: int,
) -> tuple[KVCache, DecodeState, jax.Array]:
    """Write the sequences' new tokens; sample for those whose slot is not the scratch slot.

    Layers that own no cache, and the head, run for the sampled positions alone, and only if there
    are any. Returns int32 ids [n], meaningless where nothing was sampled.
    """
    ids_N, rows, rows_nF = unpack_extend(staged, shape)
    stream, cache = run_writing_layers(
        params, config, ids_N, cache, rows, chunk_pages=shape.chunk_pages
    )
    slot_n = rows_nF[:, Column.SLOT]

    def sampled() -> jax.Array:
        x_nD = run_reading_layers(
            params,
            config,
            stream.select(rows_nF[:, Column.TOKEN_INDEX]),
            cache,
            _single_tokens(rows_nF),
            chunk_pages=shape.chunk_pages,
        )
        return sample(logits(params, config, x_nD), read_sampling(rows_nF))

    ids_n = lax.cond(jnp.any(slot_n != scratch_slot), sampled, lambda: jnp.zeros_like(slot_n))
    return cache, _store_tokens(state, slot_n, ids_n), ids_n


def unpack_extend(staged: jax.Array, shape: ExtendShape) -> tuple[jax.Array, PagedRows, jax.Array]:
    """Take an extend's staged data apart: ids [N], blocks as rows, sequences' rows [n, F]."""
    tokens, blocks = shape.bucket.tokens, shape.num_blocks
    end = tokens + blocks * BLOCK_FIELDS
    sequence_R, start_R, num_valid_R = staged[tokens:end].reshape(blocks, BLOCK_FIELDS).T
    rows_nF = staged[end:].reshape(shape.num_sequences, shape.row_size)
    rows = PagedRows(
        start_R=start_R,
        num_valid_R=num_valid_R,
        table_RM=rows_nF[sequence_R, Column.TABLE :],
        block=shape.bucket.block,
    )
    return staged[:tokens], rows, rows_nF


def _single_tokens(rows_BF: jax.Array) -> PagedRows:
    """Return the rows' last known tokens as rows of one position."""
    position_B = rows_BF[:, Column.POSITION]
    return PagedRows(
        start_R=position_B,
        num_valid_R=jnp.ones_like(position_B),
        table_RM=rows_BF[:, Column.TABLE :],
        block=1,
    )


def _store_tokens(state: DecodeState, slot_B: jax.Array, ids_B: jax.Array) -> DecodeState:
    return replace(state, last_token_S=state.last_token_S.at[slot_B].set(ids_B))

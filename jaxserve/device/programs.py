"""The two step programs: `decode` gives every row one token, `extend` takes in known tokens.

Pure functions of (params, cache, state, staged data); cache and state are donated. They share the
model's layers and know nothing of requests. B decode rows; extend: N flat tokens in R blocks of n
sequences. What they return of each row is a result of device/logprobs.py.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.device import logprobs
from jaxserve.device.adjustments import adjust, count_tokens
from jaxserve.device.buckets import ExtendBucket
from jaxserve.device.grammar import GrammarRows, allowed_words, next_states
from jaxserve.device.sampling import sample
from jaxserve.device.state import (
    Column,
    DecodeState,
    read_adjustments,
    read_grammars,
    read_sampling,
    read_tables,
    row_size,
)
from jaxserve.models.attention import PagedRows
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.params import Params
from jaxserve.models.transformer import logits, run_reading_layers, run_writing_layers

BLOCK_FIELDS = 3
"""Staged numbers of an extend block: its sequence, its first position, its number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendShape:
    """The static sizes of one extend program.

    Attributes:
        scores: whether each token is scored as well, for a prompt's log-probabilities.
    """

    bucket: ExtendBucket
    num_sequences: int
    table_size: int
    chunk_pages: int | None
    scores: bool = False

    @property
    def num_blocks(self) -> int:
        return self.bucket.tokens // self.bucket.block

    @property
    def row_size(self) -> int:
        return row_size(self.table_size)

    @property
    def rows_start(self) -> int:
        """Where the sequences' rows begin, behind the tokens and the blocks."""
        return self.bucket.tokens + self.num_blocks * BLOCK_FIELDS

    @property
    def targets_start(self) -> int:
        """Where the scored ids begin, behind the rows."""
        return self.rows_start + self.num_sequences * self.row_size

    @property
    def staged_size(self) -> int:
        return self.targets_start + (self.bucket.tokens if self.scores else 0)


def decode(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    staged_BF: jax.Array,
    *,
    config: ModelConfig,
    chunk_pages: int | None,
) -> tuple[KVCache, DecodeState, jax.Array]:
    """Run each row's last sampled token and sample the next; returns results [B, RESULT_SIZE]."""
    slot_B = staged_BF[:, Column.SLOT]
    rows = _single_tokens(staged_BF, state)
    ids_B = state.last_token_S[slot_B]
    tables = count_tokens(state.adjustments, read_adjustments(staged_BF), ids_B)
    stream, cache = run_writing_layers(params, config, ids_B, cache, rows, chunk_pages=chunk_pages)
    x_BD = run_reading_layers(params, config, stream, cache, rows, chunk_pages=chunk_pages)
    state = replace(state, adjustments=tables)
    grammars = read_grammars(staged_BF, state.grammar_state_S[slot_B])
    result_BC, state_B = _sample(logits(params, config, x_BD), staged_BF, state, grammars)
    return cache, _store_sampled(state, slot_B, result_BC, state_B), result_BC


def extend(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    staged: jax.Array,
    *,
    config: ModelConfig,
    shape: ExtendShape,
    scratch_slot: int,
) -> tuple[KVCache, DecodeState, jax.Array, jax.Array | None]:
    """Write the sequences' new tokens; sample for those whose slot is not the scratch slot.

    Layers that own no cache, and the head, run for the sampled positions alone, and only if there
    are any; where the shape scores, for all positions. Returns results [n, RESULT_SIZE],
    meaningless where nothing was sampled, and scores [N, RESULT_SIZE] of the target ids.
    """
    ids_N, rows, rows_nF = unpack_extend(staged, shape)
    stream, cache = run_writing_layers(
        params, config, ids_N, cache, rows, chunk_pages=shape.chunk_pages
    )
    slot_n = rows_nF[:, Column.SLOT]

    def sampled() -> tuple[jax.Array, jax.Array]:
        x_nD = run_reading_layers(
            params,
            config,
            stream.select(rows_nF[:, Column.TOKEN_INDEX]),
            cache,
            _single_tokens(rows_nF, state),
            chunk_pages=shape.chunk_pages,
        )
        return _sample(logits(params, config, x_nD), rows_nF, state, read_grammars(rows_nF))

    def nothing() -> tuple[jax.Array, jax.Array]:
        result_nC = jnp.zeros((shape.num_sequences, logprobs.RESULT_SIZE), jnp.int32)
        return result_nC, jnp.zeros_like(slot_n)

    result_nC, state_n = lax.cond(jnp.any(slot_n != scratch_slot), sampled, nothing)
    scores_NC = None
    if shape.scores:
        x_ND = run_reading_layers(
            params, config, stream, cache, rows, chunk_pages=shape.chunk_pages
        )
        scores_NC = logprobs.score(logits(params, config, x_ND), staged[shape.targets_start :])
    return cache, _store_sampled(state, slot_n, result_nC, state_n), result_nC, scores_NC


def unpack_extend(staged: jax.Array, shape: ExtendShape) -> tuple[jax.Array, PagedRows, jax.Array]:
    """Take an extend's staged data apart: ids [N], blocks as rows, sequences' rows [n, F]."""
    tokens, blocks = shape.bucket.tokens, shape.num_blocks
    blocks_R3 = staged[tokens : shape.rows_start].reshape(blocks, BLOCK_FIELDS)
    sequence_R, start_R, num_valid_R = blocks_R3.T
    rows_nF = staged[shape.rows_start : shape.targets_start].reshape(-1, shape.row_size)
    table_nM, sliding_table_nM = read_tables(rows_nF)
    rows = PagedRows(
        start_R=start_R,
        num_valid_R=num_valid_R,
        table_RM=table_nM[sequence_R],
        sliding_table_RM=sliding_table_nM[sequence_R],
        full_start_R=rows_nF[sequence_R, Column.FULL_START],
        is_one_run=jnp.all((sequence_R == sequence_R[0]) | (num_valid_R == 0)),
        block=shape.bucket.block,
    )
    return staged[:tokens], rows, rows_nF


def _single_tokens(rows_BF: jax.Array, state: DecodeState) -> PagedRows:
    """Return the rows' last known tokens as rows of one position; of scratch slots, of none."""
    position_B = rows_BF[:, Column.POSITION]
    scratch_slot = state.last_token_S.shape[0] - 1
    table_BM, sliding_table_BM = read_tables(rows_BF)
    return PagedRows(
        start_R=position_B,
        num_valid_R=(rows_BF[:, Column.SLOT] != scratch_slot).astype(jnp.int32),
        table_RM=table_BM,
        sliding_table_RM=sliding_table_BM,
        full_start_R=rows_BF[:, Column.FULL_START],
        block=1,
    )


def _sample(
    logits_VB: jax.Array, rows_BF: jax.Array, state: DecodeState, grammars: GrammarRows
) -> tuple[jax.Array, jax.Array]:
    """Sample for each row; returns results [B, RESULT_SIZE] and the grammars' next states [B]."""
    sampling, adjusting = read_sampling(rows_BF), read_adjustments(rows_BF)
    vocab_size = logits_VB.shape[0]
    ids_B = sample(
        logits_VB,
        sampling,
        adjusting.is_used,
        lambda logits_BV: adjust(logits_BV, state.adjustments, adjusting, sampling.position),
        grammars.header != 0,
        allowed_words(state.arena_NR, grammars, vocab_size),
    )
    result_BC = logprobs.results(logits_VB, ids_B, rows_BF[:, Column.WANTS_LOGPROBS] != 0)
    return result_BC, next_states(state.arena_NR, grammars, ids_B, vocab_size)


def _store_sampled(
    state: DecodeState, slot_B: jax.Array, result_BC: jax.Array, grammar_state_B: jax.Array
) -> DecodeState:
    ids_B = result_BC[:, logprobs.ID]
    return replace(
        state,
        last_token_S=state.last_token_S.at[slot_B].set(ids_B),
        grammar_state_S=state.grammar_state_S.at[slot_B].set(grammar_state_B),
    )

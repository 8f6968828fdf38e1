"""The device's side of a step: owns every live array, stages host data, runs compiled programs.

Device thread only. Calls return once the work is queued; the device runs it in order.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled, Lowered
from jax.typing import DTypeLike

from jaxserve.device import logprobs, programs
from jaxserve.device.adjustments import (
    PIECE_SIZE,
    counting_pieces,
    padding_piece,
    table_pieces,
    write_piece,
)
from jaxserve.device.arena import Arena, Words, Write, row_words, strided
from jaxserve.device.buckets import (
    DecodeBucket,
    ExtendBucket,
    ExtendChunk,
    smallest_extend,
    smallest_fitting,
)
from jaxserve.device.grammar import write_rows
from jaxserve.device.plan import DevicePlan
from jaxserve.device.programs import BLOCK_FIELDS, ExtendShape
from jaxserve.device.state import Column, DecodeState, HostRows, Int32Array, make_state, row_size
from jaxserve.errors import InvariantError
from jaxserve.models.config import AttentionKind, ModelConfig
from jaxserve.models.kv_cache import COPY_FIELDS, KVCache, copy_pages, make_cache, stored_dtype
from jaxserve.models.params import Params
from jaxserve.types import Guidance, SamplingParams, TokenLogprobs

StepProgram = DecodeBucket | ExtendShape
"""What a step's program is compiled for."""

OtherProgram = Literal["allocate", "write_table", "write_arena", "copy_pages"]

Program = StepProgram | OtherProgram
"""What a program is compiled for: `allocate` makes the cache and the slots' state, `write_table`
and `write_arena` write parts of slots' adjustments, and of grammars."""

ARENA_PIECE_ROWS = 16
"""Rows that `write_arena` writes at once: 0.5 MiB at a vocabulary of 262,144."""


class PendingResults:
    """What a queued program will sample.

    Args:
        result_BC: a result of device/logprobs.py for each of the program's rows.
        rows: those that were asked for.
        scores_NC: results of the target ids, where there are any.
        num_targets: how many.
    """

    def __init__(
        self,
        result_BC: jax.Array,
        rows: Sequence[int],
        scores_NC: jax.Array | None = None,
        num_targets: int = 0,
    ) -> None:
        self._result_BC = result_BC
        self._rows = rows
        self._scores_NC = scores_NC
        self._num_targets = num_targets

    def token_ids(self) -> list[int]:
        """Wait for the program; return the ids in the order they were asked for."""
        ids: list[int] = np.asarray(self._result_BC)[:, logprobs.ID].tolist()
        return [ids[row] for row in self._rows]

    def logprobs(self) -> list[TokenLogprobs]:
        """Return those ids' log-probabilities; meaningless for rows that did not want them."""
        result_BC = np.asarray(self._result_BC)
        return [logprobs.read_result(result_BC[row]) for row in self._rows]

    def target_logprobs(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of the chunk's targets."""
        scores_NC = np.asarray(self._scores_NC)[: self._num_targets]
        return [logprobs.read_result(score_C) for score_C in scores_NC]


def step_programs(plan: DevicePlan) -> list[StepProgram]:
    """List every step program that serving can need, of each kind the largest first."""
    decodes = [
        DecodeBucket(rows=rows, table_size=table_size)
        for rows in plan.row_buckets
        for table_size in plan.table_sizes
    ]
    extends = [
        _extend_shape(plan, bucket, table_size)
        for bucket in plan.extend_buckets
        for table_size in plan.table_sizes
    ]
    scoring = [
        replace(_extend_shape(plan, plan.extend_buckets[0], table_size), scores=True)
        for table_size in plan.table_sizes
    ]
    return [*reversed(extends), *reversed(scoring), *reversed(decodes)]


def lowerings(
    plan: DevicePlan,
    config: ModelConfig,
    params: Params,
    sharding: SingleDeviceSharding | None = None,
) -> dict[Program, Callable[[], Lowered]]:
    """Return what to call to lower each program; `params` may be arrays or their shapes.

    `sharding`: of a device that is not at hand, which the shapes of `params` name as well.
    """

    def shape(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    allocate = partial(_allocate, plan, config)
    cache, state = jax.tree.map(
        lambda leaf: shape(leaf.shape, leaf.dtype), jax.eval_shape(allocate)
    )

    def lower(program: Program) -> Lowered:
        if program == "allocate":
            return jax.jit(allocate, out_shardings=sharding).lower()
        if program == "write_table":
            piece = shape((PIECE_SIZE,), jnp.int32)
            return jax.jit(_write_piece, donate_argnums=0).lower(state, piece)
        if program == "write_arena":
            piece = shape((ARENA_PIECE_ROWS * (1 + row_words(config.vocab_size)),), jnp.uint32)
            return jax.jit(_write_rows, donate_argnums=0).lower(state, piece)
        if program == "copy_pages":
            copies = shape((plan.num_slots, COPY_FIELDS), jnp.int32)
            copy = jax.jit(copy_pages, static_argnums=1, donate_argnums=0)
            return copy.lower(cache, config, copies)
        function, staged_shape = step_function(program, plan, config)
        staged = shape(staged_shape, jnp.int32)
        return jax.jit(function, donate_argnums=(1, 2)).lower(params, cache, state, staged)

    all_programs: list[Program] = [*step_programs(plan), *get_args(OtherProgram)]
    return {program: partial(lower, program) for program in all_programs}


def name_of(program: Program) -> str:
    """Name a program, such as decode-8x256 of 8 rows and page tables of 256 entries."""
    if isinstance(program, DecodeBucket):
        return f"decode-{program.rows}x{program.table_size}"
    if isinstance(program, ExtendShape):
        kind = "score" if program.scores else "extend"
        return f"{kind}-{program.bucket.tokens}x{program.table_size}"
    return program


def _allocate(plan: DevicePlan, config: ModelConfig) -> tuple[KVCache, DecodeState]:
    """Make empty pages and slots."""
    return empty_cache(plan, config), empty_state(plan, config)


def _write_piece(state: DecodeState, piece: jax.Array) -> DecodeState:
    return replace(state, adjustments=write_piece(state.adjustments, piece))


def _write_rows(state: DecodeState, piece: jax.Array) -> DecodeState:
    return replace(state, arena_NR=write_rows(state.arena_NR, piece))


def step_function(
    program: StepProgram, plan: DevicePlan, config: ModelConfig
) -> tuple[Callable[..., tuple[Any, ...]], tuple[int, ...]]:
    """Return a program's function of (params, cache, state, staged) and its staged data's shape."""
    if isinstance(program, DecodeBucket):
        decode = partial(programs.decode, config=config, chunk_pages=plan.decode_chunk_pages)
        return decode, (program.rows, row_size(program.table_size))
    extend = partial(programs.extend, config=config, shape=program, scratch_slot=plan.num_slots)
    return extend, (program.staged_size,)


def _extend_shape(plan: DevicePlan, bucket: ExtendBucket, table_size: int) -> ExtendShape:
    return ExtendShape(
        bucket=bucket,
        num_sequences=min(bucket.tokens // bucket.block, plan.num_slots),
        table_size=table_size,
        chunk_pages=plan.extend_chunk_pages,
    )


def empty_state(plan: DevicePlan, config: ModelConfig) -> DecodeState:
    """Make the slots of a plan."""
    return make_state(plan.num_slots, config.vocab_size, plan.arena_rows)


def empty_cache(plan: DevicePlan, config: ModelConfig) -> KVCache:
    """Make the pages of a plan."""
    dtype = stored_dtype(plan.kv_dtype, is_accelerator=plan.is_accelerator)
    return make_cache(
        config,
        num_pages=plan.num_pages,
        num_sliding_pages=plan.num_sliding_pages,
        page_size=plan.page_size,
        dtype=dtype,
    )


class ModelRunner:
    """Runs the compiled programs over one cache and one set of slots."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        plan: DevicePlan,
        compiled: Mapping[Program, Compiled],
    ) -> None:
        self._params = params
        self._plan = plan
        self._window = config.window
        self._programs = compiled
        self._cache, self._state = compiled["allocate"]()
        self._vocab_size = config.vocab_size
        self._arena = Arena(
            num_rows=plan.arena_rows, num_slots=plan.num_slots, vocab_size=config.vocab_size
        )
        self._host_rows = HostRows(plan.num_slots, plan.table_sizes[-1])

    @property
    def plan(self) -> DevicePlan:
        """What the programs were compiled for."""
        return self._plan

    @property
    def num_pages(self) -> int:
        """Full-attention pages, the scratch page 0 included."""
        return self._plan.num_pages

    @property
    def num_sliding_pages(self) -> int:
        """Sliding layers' pages, the scratch page 0 included."""
        return self._plan.num_sliding_pages

    @property
    def window(self) -> int:
        """Keys that a sliding layer sees, the token's own included."""
        return self._window

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._plan.page_size

    @property
    def num_slots(self) -> int:
        """Most rows of a decode."""
        return self._plan.num_slots

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        return self._plan.max_model_len

    @property
    def arena_rows(self) -> int:
        """Rows that grammars can have on the device."""
        return self._plan.arena_rows

    @property
    def extend_buckets(self) -> tuple[ExtendBucket, ...]:
        """Ascending by tokens."""
        return self._plan.extend_buckets

    def open_slot(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Give the slot to a sequence: its sampling, the ids so far, empty page tables."""
        self._host_rows.open(slot, sampling, len(prompt_ids))
        self._arena.leave(slot)
        for piece in table_pieces(slot, sampling, prompt_ids, output_ids):
            self._write_table(piece)

    def open_grammar(
        self,
        slot: int,
        guidance: Guidance,
        *,
        state: int,
        end_position: int,
        live_slots: Collection[int],
    ) -> bool:
        """Keep an open slot to a grammar; False where it takes `write_masks` to do so."""
        image, place = guidance.grammar.image, None
        if image is not None:
            place = self._arena.place(slot, image, guidance.end_ids, live_slots)
        if place is None:
            self._host_rows.set_grammar(slot, header=-1 - slot, ends=0, state=0, end_position=0)
            return False
        self._write_arena(place.writes)
        self._host_rows.set_grammar(
            slot,
            header=place.header,
            ends=place.ends,
            state=state,
            end_position=end_position if guidance.ensures_complete else 0,
        )
        return True

    def set_grammar_state(self, slot: int, state: int) -> None:
        """Set the grammar's state that the slot's next extend samples in."""
        self._host_rows.set_grammar_state(slot, state)

    def count_tokens(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Note generated ids that no decode takes in; `output_ids` are all so far."""
        for piece in counting_pieces(slot, sampling, token_ids, output_ids):
            self._write_table(piece)

    def write_masks(self, masks: Sequence[tuple[int, Words]]) -> None:
        """Set the masks of slots for their next token; bit b of word w is token 32·w + b."""
        self._write_arena(
            [Write(1 + slot, strided(mask, self._vocab_size)) for slot, mask in masks]
        )

    def set_pages(self, slot: int, start: int, pages: Sequence[int], kind: AttentionKind) -> None:
        """Set entries [start, start + len(pages)) of the slot's page table of a kind."""
        self._host_rows.set_pages(slot, start, pages, kind)

    def copy_pages(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy keys and values of pages, at most num_slots times.

        A copy is the source and destination of a full page, then of a sliding one.
        """
        staged = np.zeros((self.num_slots, COPY_FIELDS), np.int32)  # the rest copies scratch pages
        if copies:
            staged[: len(copies)] = copies
        self._cache = self._programs["copy_pages"](self._cache, staged)

    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> PendingResults:
        """Run each slot's last sampled id at its position and sample the next one."""
        bucket = DecodeBucket(
            rows=smallest_fitting(self._plan.row_buckets, len(slots)),
            table_size=self._table_size(max(positions) + 1),
        )
        staged = self._host_rows.stage(slots, bucket.rows, bucket.table_size)
        staged[: len(positions), Column.POSITION] = positions
        return self._run(bucket, staged, range(len(slots)))

    def extend(self, chunks: Sequence[ExtendChunk]) -> PendingResults:
        """Write the chunks' tokens; sample for those that hold a sequence's last known one."""
        lengths = [len(chunk.token_ids) for chunk in chunks]
        bucket = smallest_extend(self.extend_buckets, lengths)
        longest = max(chunk.start + len(chunk.token_ids) for chunk in chunks)
        num_targets = sum(len(chunk.targets) for chunk in chunks)
        if num_targets and (len(chunks) > 1 or bucket != self.extend_buckets[0]):
            raise InvariantError(f"{len(chunks)} chunks of {lengths} tokens are to be scored")
        shape = replace(
            _extend_shape(self._plan, bucket, self._table_size(longest)), scores=num_targets > 0
        )
        staged = self._stage_extend(chunks, shape)
        if num_targets:
            staged[shape.targets_start :][:num_targets] = chunks[0].targets
        sampled = [i for i, chunk in enumerate(chunks) if chunk.sample]
        return self._run(shape, staged, sampled, num_targets)

    def warm_up(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[StepProgram, float]:
        """Run every program on padding; return their seconds, a first guess of a step's.

        Each runs twice, and the quicker run counts: a first one may take ten times as long, for it
        is the one that touches its memory first. Padding is one sequence without context, so that
        what a long context or several sequences cost is not in it. `progress` gets (done, total).
        """
        no_slots: list[int] = []
        durations_s = {}
        self._write_table(padding_piece(self._host_rows.scratch_slot))
        self._write_arena([Write(0, np.zeros(0, np.uint32))])
        self.copy_pages([])
        programs = step_programs(self._plan)
        progress(0, len(programs))
        for program in programs:
            if isinstance(program, DecodeBucket):
                staged = self._host_rows.stage(no_slots, program.rows, program.table_size)
            else:
                staged = self._stage_extend([], program)
            durations_s[program] = min(self._time(program, staged) for _ in range(2))
            progress(len(durations_s), len(programs))
        return durations_s

    def _time(self, program: StepProgram, staged: Int32Array) -> float:
        """Run a program for nobody; return its seconds."""
        started_s = time.perf_counter()
        self._run(program, staged, []).token_ids()
        return time.perf_counter() - started_s

    def _table_size(self, num_tokens: int) -> int:
        return smallest_fitting(self._plan.table_sizes, -(-num_tokens // self.page_size))

    def _stage_extend(self, chunks: Sequence[ExtendChunk], shape: ExtendShape) -> Int32Array:
        """Lay out tokens, blocks and sequences; what no chunk fills stays padding."""
        block, num_blocks = shape.bucket.block, shape.num_blocks
        slots = [chunk.slot if chunk.sample else self._host_rows.scratch_slot for chunk in chunks]
        rows_nF = self._host_rows.stage(
            [chunk.slot for chunk in chunks], shape.num_sequences, shape.table_size
        )
        rows_nF[: len(slots), Column.SLOT] = slots
        staged = np.zeros(shape.staged_size, np.int32)
        tokens_RT = staged[: shape.bucket.tokens].reshape(num_blocks, block)
        blocks_R3 = staged[shape.bucket.tokens : shape.rows_start].reshape(-1, BLOCK_FIELDS)
        first = 0
        for i, chunk in enumerate(chunks):
            length = len(chunk.token_ids)
            last = first + -(-length // block)
            flat = tokens_RT[first:last].reshape(-1)
            flat[:length] = chunk.token_ids
            offset_R = np.arange(0, length, block)
            blocks_R3[first:last, 0] = i
            blocks_R3[first:last, 1] = chunk.start + offset_R
            blocks_R3[first:last, 2] = np.minimum(block, length - offset_R)
            rows_nF[i, Column.POSITION] = chunk.start + length - 1
            rows_nF[i, Column.FULL_START] = chunk.full_start
            rows_nF[i, Column.TOKEN_INDEX] = first * block + length - 1
            first = last
        staged[shape.rows_start : shape.targets_start] = rows_nF.reshape(-1)
        return staged

    def _run(
        self, program: StepProgram, staged: Int32Array, rows: Sequence[int], num_targets: int = 0
    ) -> PendingResults:
        self._cache, self._state, *results = self._programs[program](
            self._params, self._cache, self._state, staged
        )
        scores_NC = results[1] if num_targets else None
        return PendingResults(results[0], rows, scores_NC, num_targets)

    def _write_arena(self, writes: Sequence[Write]) -> None:
        row_size = row_words(self._vocab_size)
        for start in range(0, len(writes), ARENA_PIECE_ROWS):
            piece = np.zeros(ARENA_PIECE_ROWS * (1 + row_size), np.uint32)
            piece[:ARENA_PIECE_ROWS] = np.iinfo(np.int32).max  # no row: not written
            words_KR = piece[ARENA_PIECE_ROWS:].reshape(-1, row_size)
            for k, write in enumerate(writes[start : start + ARENA_PIECE_ROWS]):
                piece[k] = write.row
                words_KR[k, : len(write.words)] = write.words
            self._state = self._programs["write_arena"](self._state, piece)

    def _write_table(self, piece: Int32Array) -> None:
        self._state = self._programs["write_table"](self._state, piece)

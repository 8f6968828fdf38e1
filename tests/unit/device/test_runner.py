"""What the runner hands to its programs: staged data, told apart by a program that keeps it."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.device.adjustments import PIECE_SIZE
from jaxserve.device.buckets import DecodeBucket, ExtendBucket, ExtendChunk
from jaxserve.device.logprobs import ID, RESULT_SIZE
from jaxserve.device.plan import DevicePlan
from jaxserve.device.programs import ExtendShape, unpack_extend
from jaxserve.device.runner import (
    ModelRunner,
    Program,
    StepProgram,
    empty_cache,
    empty_state,
    step_programs,
)
from jaxserve.device.state import Column
from jaxserve.errors import InvariantError
from jaxserve.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.params import Params
from jaxserve.types import SamplingParams

PLAN = DevicePlan(
    dtype="float32",
    kv_dtype="float32",
    is_accelerator=False,
    page_size=4,
    num_pages=9,
    num_sliding_pages=7,
    num_slots=4,
    max_model_len=32,
    row_buckets=(1, 2, 4),
    table_sizes=(2, 8),
    extend_buckets=(ExtendBucket(tokens=8, block=4), ExtendBucket(tokens=16, block=4)),
    decode_chunk_pages=2,
    extend_chunk_pages=1,
)
SAMPLING = SamplingParams(max_tokens=1, seed=0, temperature=0.5)
NO_WEIGHTS = cast(Params, None)

LAYER = LayerConfig(
    kind="full",
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    mlp_dim=2,
    kv_source=0,
    has_v_proj=True,
    rope=RopeConfig(theta=1e4, num_pairs=1),
)
CONFIG = ModelConfig(
    model_type="gemma4_text",
    vocab_size=8,
    model_dim=2,
    layers=(LAYER,),
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


@dataclass
class Recorder:
    """Stands for all programs of a runner; row i of every one samples the id 100 + i.

    Target i is said to be 200 + i.
    """

    calls: list[tuple[StepProgram, npt.NDArray[np.int32]]] = field(default_factory=list)
    copies: list[npt.NDArray[np.int32]] = field(default_factory=list)
    pieces: list[npt.NDArray[np.int32]] = field(default_factory=list)

    def runner(self) -> ModelRunner:
        programs: dict[Program, Any] = {s: self._program(s) for s in step_programs(PLAN)}
        programs["allocate"] = lambda: (empty_cache(PLAN, CONFIG), empty_state(PLAN, CONFIG))
        programs["write_table"] = self._write_table
        programs["write_arena"] = lambda state, piece: state
        programs["copy_pages"] = self._copy_pages
        return ModelRunner(NO_WEIGHTS, CONFIG, PLAN, programs)

    def _copy_pages(self, cache: Any, copies: Any) -> Any:
        self.copies.append(copies)
        return cache

    def _write_table(self, state: Any, piece: Any) -> Any:
        self.pieces.append(piece)
        return state

    def _program(self, shape: StepProgram) -> object:
        def run(params: Params, cache: Any, state: Any, staged: Any) -> tuple[Any, ...]:
            self.calls.append((shape, staged))
            result_BC = np.zeros((16, RESULT_SIZE), np.int32)
            result_BC[:, ID] = np.arange(100, 116)
            return cache, state, result_BC, result_BC + 100

        return run

    @property
    def last(self) -> tuple[StepProgram, npt.NDArray[np.int32]]:
        return self.calls[-1]


def chunk(
    slot: int, ids: range, start: int = 0, *, sample: bool = True, full_start: int = 0
) -> ExtendChunk:
    return ExtendChunk(slot=slot, token_ids=ids, start=start, sample=sample, full_start=full_start)


@pytest.mark.parametrize(
    ("num_slots", "position", "bucket"),
    [
        (1, 0, DecodeBucket(rows=1, table_size=2)),
        (2, 7, DecodeBucket(rows=2, table_size=2)),
        (3, 8, DecodeBucket(rows=4, table_size=8)),
        (4, 31, DecodeBucket(rows=4, table_size=8)),
    ],
)
def test_decode_takes_the_smallest_program_that_holds_rows_and_longest_position(
    num_slots: int, position: int, bucket: DecodeBucket
) -> None:
    recorder = Recorder()
    positions = [*[1] * (num_slots - 1), position]

    recorder.runner().decode(range(num_slots), positions)

    assert recorder.last[0] == bucket


def test_decode_stages_slots_positions_and_tables_row_by_row() -> None:
    recorder = Recorder()
    runner = recorder.runner()
    for slot in (3, 1, 0):
        runner.open_slot(slot, SAMPLING, [1], [])
        runner.set_pages(slot, 0, [slot + 1, slot + 5], "full")
        runner.set_pages(slot, 1, [slot + 3], "sliding")

    pending = runner.decode([3, 1, 0], [5, 2, 7])

    _, staged = recorder.last
    assert staged[:, Column.SLOT].tolist() == [3, 1, 0, PLAN.num_slots]
    assert staged[:, Column.POSITION].tolist() == [5, 2, 7, 0]
    tables, sliding_tables = np.split(staged[:, Column.TABLE :], 2, axis=1)
    assert tables.tolist() == [[4, 8], [2, 6], [1, 5], [0, 0]]
    assert sliding_tables.tolist() == [[0, 6], [0, 4], [0, 3], [0, 0]]
    assert pending.token_ids() == [100, 101, 102]


def test_extend_lays_chunks_out_in_blocks_of_their_own() -> None:
    recorder = Recorder()
    runner = recorder.runner()
    for slot in (2, 0):
        runner.open_slot(slot, SAMPLING, [1], [])
        runner.set_pages(slot, 0, [slot + 1, slot + 2], "full")
        runner.set_pages(slot, 0, [slot + 3], "sliding")

    runner.extend(
        [chunk(2, range(10, 16), start=1, full_start=4), chunk(0, range(20, 23), start=3)]
    )

    shape, staged = recorder.last
    assert isinstance(shape, ExtendShape)
    assert shape.bucket == PLAN.extend_buckets[1]
    ids_N, rows, rows_nF = unpack_extend(jax.numpy.asarray(staged), shape)
    assert ids_N.tolist() == [10, 11, 12, 13, 14, 15, 0, 0, 20, 21, 22, 0, 0, 0, 0, 0]
    assert rows.start_R.tolist()[:3] == [1, 5, 3]
    assert rows.num_valid_R.tolist() == [4, 2, 3, 0]
    assert not rows.is_one_run
    assert rows.table_RM.tolist()[:3] == [[3, 4], [3, 4], [1, 2]]
    assert rows.sliding_table_RM.tolist()[:3] == [[5, 0], [5, 0], [3, 0]]
    assert rows.full_start_R.tolist()[:3] == [4, 4, 0]
    assert rows_nF[:2, Column.SLOT].tolist() == [2, 0]
    # Where the chunk's last token lies among the flat ones, and its position in the sequence.
    assert rows_nF[:2, Column.TOKEN_INDEX].tolist() == [5, 10]
    assert rows_nF[:2, Column.POSITION].tolist() == [6, 5]


def test_blocks_of_one_chunk_are_one_run() -> None:
    recorder = Recorder()
    recorder.runner().extend([chunk(2, range(10, 16))])

    shape, staged = recorder.last
    assert isinstance(shape, ExtendShape)
    _, rows, _ = unpack_extend(jax.numpy.asarray(staged), shape)
    assert rows.num_valid_R.tolist() == [4, 2]
    assert rows.is_one_run


def test_a_chunk_that_samples_nothing_stores_its_id_in_the_scratch_slot() -> None:
    recorder = Recorder()
    runner = recorder.runner()
    runner.set_pages(1, 0, [7], "full")

    pending = runner.extend([chunk(1, range(4), sample=False), chunk(2, range(4))])

    shape, staged = recorder.last
    assert isinstance(shape, ExtendShape)
    _, rows, rows_nF = unpack_extend(jax.numpy.asarray(staged), shape)
    assert rows_nF[:, Column.SLOT].tolist() == [PLAN.num_slots, 2]
    assert rows.table_RM[0].tolist() == [7, 0], "it still writes to its own pages"
    assert pending.token_ids() == [101]


def test_extend_takes_the_program_that_holds_the_chunks_end() -> None:
    recorder = Recorder()

    recorder.runner().extend([chunk(0, range(4), start=5)])

    shape, _ = recorder.last
    assert isinstance(shape, ExtendShape)
    assert (shape.bucket, shape.table_size) == (PLAN.extend_buckets[0], 8)


def test_chunks_beyond_the_largest_bucket_are_our_bug() -> None:
    with pytest.raises(InvariantError, match="fit no extend bucket"):
        Recorder().runner().extend([chunk(slot, range(5)) for slot in range(3)])


def test_a_scored_chunk_has_its_targets_behind_the_rows_in_the_scoring_program() -> None:
    recorder = Recorder()
    scored = ExtendChunk(
        slot=1, token_ids=range(10, 16), start=0, sample=True, targets=range(11, 16)
    )

    pending = recorder.runner().extend([scored])

    assert pending.token_ids() == [100]
    assert [one.token_id for one in pending.logprobs()] == [100]
    assert [one.token_id for one in pending.target_logprobs()] == [200, 201, 202, 203, 204]
    shape, staged = recorder.last
    assert isinstance(shape, ExtendShape)
    assert (shape.bucket, shape.scores) == (PLAN.extend_buckets[0], True)
    assert staged.shape == (shape.staged_size,)
    assert staged[shape.targets_start :].tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    ids_N, rows, rows_nF = unpack_extend(jax.numpy.asarray(staged), shape)
    assert ids_N.tolist() == [10, 11, 12, 13, 14, 15, 0, 0]
    assert rows.num_valid_R.tolist() == [4, 2]
    assert rows_nF[0, Column.SLOT] == 1


@pytest.mark.parametrize("lengths", [(9,), (4, 4)])
def test_a_scored_chunk_with_company_or_of_a_larger_bucket_is_our_bug(
    lengths: tuple[int, ...],
) -> None:
    chunks = [
        ExtendChunk(slot=slot, token_ids=range(length), start=0, sample=True, targets=[1])
        for slot, length in enumerate(lengths)
    ]
    with pytest.raises(InvariantError, match="to be scored"):
        Recorder().runner().extend(chunks)


def test_opening_a_slot_writes_its_table_piece_by_piece_if_it_has_one() -> None:
    recorder = Recorder()
    runner = recorder.runner()

    runner.open_slot(1, SAMPLING, [1, 2], [3])
    assert recorder.pieces == []
    runner.open_slot(2, replace(SAMPLING, presence_penalty=1.0), range(1500), [3])

    assert [piece.shape for piece in recorder.pieces] == [(PIECE_SIZE,)] * 2
    # Each begins with its slot and whether it is the first.
    assert [piece[:2].tolist() for piece in recorder.pieces] == [[2, 1], [2, 0]]


def test_a_queued_call_keeps_the_pages_that_it_was_given() -> None:
    recorder = Recorder()
    runner = recorder.runner()
    runner.set_pages(0, 0, [5], "full")
    runner.decode([0], [0])

    runner.open_slot(0, SAMPLING, [1], [])
    runner.set_pages(0, 0, [6], "full")

    assert recorder.last[1][0, Column.TABLE] == 5


def test_warm_up_runs_every_program_twice_on_nothing() -> None:
    recorder = Recorder()
    told: list[tuple[int, int]] = []

    durations_s = recorder.runner().warm_up(lambda done, total: told.append((done, total)))

    assert [shape for shape, _ in recorder.calls] == [s for s in durations_s for _ in range(2)]
    assert set(durations_s) == set(step_programs(PLAN))
    assert told == [(i, len(durations_s)) for i in range(len(durations_s) + 1)]
    assert [piece[:2].tolist() for piece in recorder.pieces] == [[PLAN.num_slots, 1]]
    for shape, staged in recorder.calls:
        if isinstance(shape, ExtendShape):
            _, rows, rows_nF = unpack_extend(jax.numpy.asarray(staged), shape)
            assert not rows.num_valid_R.any()
            assert set(rows_nF[:, Column.SLOT].tolist()) == {PLAN.num_slots}
        else:
            assert set(staged[:, Column.SLOT].tolist()) == {PLAN.num_slots}


def test_copies_are_staged_with_the_rest_copying_the_scratch_page() -> None:
    recorder = Recorder()
    recorder.runner().copy_pages([(3, 5, 2, 4), (1, 2, 0, 0)])
    assert recorder.copies[-1].tolist() == [[3, 5, 2, 4], [1, 2, 0, 0], [0] * 4, [0] * 4]

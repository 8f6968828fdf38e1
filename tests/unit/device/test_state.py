"""The staged row of a slot: what the host writes is what the device reads."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.state import (
    Column,
    HostRows,
    make_state,
    read_adjustments,
    read_sampling,
    read_tables,
    state_num_bytes,
)
from jaxserve.types import SamplingParams

SAMPLING = SamplingParams(
    max_tokens=9,
    seed=0xFEDC_BA98_7654_3210,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
)


def test_sampling_travels_to_the_device_unchanged() -> None:
    rows = HostRows(num_slots=4, table_size=3)
    rows.open(2, SAMPLING, 3)
    staged = rows.stage([2], 1, 3)
    staged[0, Column.POSITION] = 11

    read = read_sampling(jnp.asarray(staged))

    floats = [read.temperature[0], read.top_p[0], read.min_p[0]]
    assert floats == [np.float32(0.7), np.float32(0.9), np.float32(0.05)]
    assert read.top_k.tolist() == [40]
    assert read.seed.tolist() == [[0x7654_3210, 0xFEDC_BA98]]
    # The row's last known token stands at 11, so the next one is sampled for 12.
    assert read.position.tolist() == [12]


def test_adjustments_travel_to_the_device_unchanged() -> None:
    rows = HostRows(num_slots=4, table_size=3)
    adjusting = replace(
        SAMPLING,
        presence_penalty=-1.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        min_tokens=6,
        stop_token_ids=frozenset({1}),
    )
    rows.open(2, adjusting, 11)
    rows.open(3, SAMPLING, 11)

    read = read_adjustments(jnp.asarray(rows.stage([2, 3], 4, 3)))

    assert read.slot.tolist() == [2, 3, 4, 4]
    assert read.is_used.tolist() == [True, False, False, False]
    assert read.presence_penalty[0] == np.float32(-1.5)
    assert read.frequency_penalty[0] == np.float32(0.3)
    assert read.repetition_penalty[:2].tolist() == [np.float32(1.1), 1.0]
    # The prompt's 11 tokens stand at [0, 11), six more at [11, 17).
    assert read.min_position[0] == 17


@pytest.mark.parametrize(
    ("changed", "adjusts"),
    [
        ({}, False),
        ({"num_logprobs": 5, "num_prompt_logprobs": 5}, False),
        ({"stop_token_ids": frozenset({1})}, False),
        ({"min_tokens": 3}, False),
        ({"min_tokens": 3, "stop_token_ids": frozenset({1})}, True),
        ({"logit_bias": ((5, 0.0),)}, True),
        ({"allowed_token_ids": frozenset[int]()}, True),
        ({"bad_words": ((5,),)}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 0.5}, True),
    ],
)
def test_only_what_changes_logits_is_said_to_adjust(changed: dict[str, Any], adjusts: bool) -> None:
    sampling = replace(SAMPLING, **changed)
    rows = HostRows(num_slots=1, table_size=1)
    rows.open(0, sampling, 3)

    staged = rows.stage([0], 1, 1)

    assert sampling.adjusts_logits == adjusts
    assert staged[0, Column.ADJUSTS] == adjusts
    assert staged[0, Column.WANTS_LOGPROBS] == (sampling.num_logprobs is not None)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_every_seed_is_staged(seed: int) -> None:
    rows = HostRows(num_slots=1, table_size=1)
    rows.open(0, SamplingParams(max_tokens=1, seed=seed), 3)

    low, high = read_sampling(jnp.asarray(rows.stage([0], 1, 1))).seed[0].tolist()

    assert low + (high << 32) == seed


def test_rows_come_in_the_order_of_their_slots_and_padding_is_the_scratch_slot() -> None:
    rows = HostRows(num_slots=4, table_size=2)
    for slot in range(4):
        rows.set_pages(slot, 0, [10 + slot, 20 + slot], "full")
        rows.set_pages(slot, 1, [30 + slot], "sliding")

    staged = rows.stage([3, 0], 4, 2)

    assert staged[:, Column.SLOT].tolist() == [3, 0, 4, 4]
    tables, sliding_tables = read_tables(jnp.asarray(staged))
    assert tables.tolist() == [[13, 23], [10, 20], [0, 0], [0, 0]]
    assert sliding_tables.tolist() == [[0, 33], [0, 30], [0, 0], [0, 0]]
    # Padding is greedy, so that it asks for no draw.
    assert staged[2:, Column.TEMPERATURE].tolist() == [0, 0]


def test_a_smaller_table_is_the_front_of_the_whole() -> None:
    rows = HostRows(num_slots=1, table_size=4)
    rows.set_pages(0, 0, [5, 6], "full")
    rows.set_pages(0, 2, [7, 8], "full")
    rows.set_pages(0, 1, [1, 2, 3], "sliding")

    assert rows.stage([0], 1, 4)[0, Column.TABLE :].tolist() == [5, 6, 7, 8, 0, 1, 2, 3]
    assert rows.stage([0], 1, 3)[0, Column.TABLE :].tolist() == [5, 6, 7, 0, 1, 2]


def test_opening_a_slot_forgets_the_sequence_before() -> None:
    rows = HostRows(num_slots=2, table_size=2)
    rows.open(1, SAMPLING, 3)
    rows.set_pages(1, 0, [5, 6], "full")
    rows.set_pages(1, 0, [7, 8], "sliding")

    rows.open(1, SamplingParams(max_tokens=1, seed=0, temperature=0.0), 3)

    fresh = HostRows(num_slots=2, table_size=2)
    fresh.open(1, SamplingParams(max_tokens=1, seed=0, temperature=0.0), 3)
    assert rows.stage([1], 1, 2).tolist() == fresh.stage([1], 1, 2).tolist()


def test_what_is_staged_does_not_change_afterwards() -> None:
    rows = HostRows(num_slots=1, table_size=1)
    staged = rows.stage([0], 1, 1)
    before = staged.tolist()

    rows.set_pages(0, 0, [9], "full")

    assert staged.tolist() == before


def test_the_state_has_a_slot_for_padding() -> None:
    state = make_state(4, 10)

    assert state.last_token_S.shape == (5,)


def test_the_state_is_as_large_as_it_is_said_to_be() -> None:
    leaves = jax.tree.leaves(make_state(4, 100))

    assert state_num_bytes(4, 100) == sum(leaf.nbytes for leaf in leaves)

"""The runner's paged, batched, chunked programs give what a whole pass in numpy gives."""

from typing import get_args

import pytest

from tests.checkpoints import Kind
from tests.engine.conftest import TinyModels
from tests.engine.tiny import (
    HandDriven,
    TinyModel,
    assert_the_cache_stays_in_place,
    prompt_of,
)

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

KINDS = get_args(Kind)

# Around the borders of a page (8), the window (16), a read of the context (32) and a chunk (64).
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 96, 119)


def assert_all_greedy(model: TinyModel, driven: HandDriven, prompts: dict[int, list[int]]) -> None:
    for slot, prompt in prompts.items():
        model.assert_greedy(prompt, driven.outputs[slot])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS[0::2], LENGTHS[1::2]], ids=["odd", "even"])
def test_prompts_of_every_length_in_one_batch(
    tiny_models: TinyModels, kind: Kind, lengths: tuple[int, ...]
) -> None:
    model = tiny_models(kind)
    driven = HandDriven(model, seed=len(lengths) + lengths[0])
    prompts = {driven.add(prompt := prompt_of(n)): list(prompt) for n in lengths}
    for slot in prompts:
        driven.prefill(slot, chunk=64)

    driven.decode(list(prompts), steps=9)

    assert_all_greedy(model, driven, prompts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [(60,), (1, 59), (16, 16, 16, 12), (33, 8, 7, 11, 1)])
def test_a_prompt_in_chunks_of_any_size(
    tiny_models: TinyModels, kind: Kind, parts: tuple[int, ...]
) -> None:
    model = tiny_models(kind)
    driven = HandDriven(model, seed=7)
    prompt = prompt_of(60)
    slot = driven.add(prompt)

    for part in parts:
        driven.extend((slot, part))
    driven.decode([slot], steps=6)

    model.assert_greedy(prompt, driven.outputs[slot])


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_in_one_extend_beside_running_rows(
    tiny_models: TinyModels, kind: Kind
) -> None:
    model = tiny_models(kind)
    driven = HandDriven(model, seed=1)
    prompts = {driven.add(prompt := prompt_of(n)): list(prompt) for n in (20, 40, 3, 16, 5)}
    a, b, c, d, e = prompts
    driven.extend((a, 20))
    driven.decode([a])
    driven.extend((b, 30), (c, 3), (d, 10))  # only the second one ends its prompt
    driven.decode([c, a])
    driven.extend((d, 6), (e, 5), (b, 10))
    driven.decode([e, a, d, b, c], steps=5)

    assert_all_greedy(model, driven, prompts)
    assert [len(driven.outputs[slot]) for slot in prompts] == [8, 6, 7, 6, 6]


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_every_number_of_rows(e2b: TinyModel, num_rows: int) -> None:
    driven = HandDriven(e2b, seed=num_rows)
    prompts = {driven.add(prompt := prompt_of(10 + 3 * n)): list(prompt) for n in range(num_rows)}
    for slot in prompts:
        driven.prefill(slot, chunk=16)

    driven.decode(list(prompts), steps=3)

    assert_all_greedy(e2b, driven, prompts)


def test_the_whole_context_can_be_filled(e2b: TinyModel) -> None:
    driven = HandDriven(e2b, seed=2)
    prompt = prompt_of(100)
    slot = driven.add(prompt)
    driven.prefill(slot, chunk=16)

    driven.decode([slot], steps=e2b.plan.max_model_len - 100)

    e2b.assert_greedy(prompt, driven.outputs[slot])


def test_no_step_copies_a_kv_array(e2b: TinyModel) -> None:
    assert_the_cache_stays_in_place(e2b)

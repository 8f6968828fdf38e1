"""The numpy oracle against transformers' recorded outputs."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve.models.registry import load_config
from tests import oracle
from tests.checkpoints import read_tensors
from tests.model.reference import (
    ATOL,
    CLEAR_GAP,
    case_folders,
    gemma3_270m_folder,
    gemma3_270m_reference,
    read_prompts,
)


@pytest.mark.parametrize("folder", case_folders(), ids=lambda folder: folder.name)
def test_oracle_gives_the_recorded_logits(folder: Path) -> None:
    config, tensors = load_config(folder), read_tensors(folder)
    for prompt in read_prompts(folder):
        logits_TV = oracle.logits(tensors, config, prompt.ids + prompt.greedy[:-1])
        prompt_TV = logits_TV[: len(prompt.ids)][-len(prompt.logits_TV) :]
        steps_NV = logits_TV[len(prompt.ids) - 1 :]
        np.testing.assert_allclose(prompt_TV, prompt.logits_TV, rtol=0, atol=ATOL)
        np.testing.assert_allclose(steps_NV, prompt.step_logits_NV, rtol=0, atol=ATOL)
        clear = prompt.gaps > CLEAR_GAP
        np.testing.assert_array_equal(steps_NV.argmax(-1)[clear], np.array(prompt.greedy)[clear])


def test_greedy_continues_by_whole_passes() -> None:
    folder = case_folders()[0]
    prompt = read_prompts(folder)[1]
    n = prompt.num_clear_steps
    config, tensors = load_config(folder), read_tensors(folder)
    assert n >= 8
    assert oracle.greedy(tensors, config, prompt.ids, n) == prompt.greedy[:n]


@pytest.mark.real_model
def test_oracle_continues_gemma3_270m_as_recorded() -> None:
    folder = gemma3_270m_folder()
    prompt = gemma3_270m_reference()["capital"]
    ids = prompt["ids"] + prompt["greedy"][:-1]
    logits_TV = oracle.logits(read_tensors(folder), load_config(folder), ids)
    clear = np.array(prompt["gaps"]) > CLEAR_GAP
    chosen = logits_TV[len(prompt["ids"]) - 1 :].argmax(-1)
    np.testing.assert_array_equal(chosen[clear], np.array(prompt["greedy"])[clear])

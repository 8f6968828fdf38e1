"""The server's own model code, through its paged cache, against recorded outputs and the oracle."""

from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.evaluate import greedy, prompt_logits
from jaxserve.models.config import ModelConfig
from jaxserve.models.key_balance import balance_keys
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.specs import random_params
from jaxserve.models.weights import load_params
from tests import oracle
from tests.checkpoints import Kind, config_json, named_tensors, write_json_files
from tests.model.reference import (
    ATOL,
    Prompt,
    case_folders,
    read_prompts,
)


def load(folder: Path) -> tuple[Params, ModelConfig]:
    config = load_config(folder)
    loaded = load_params(folder, config, jnp.float32, progress=lambda done, total: None)
    return loaded.params, config


def assert_continues(params: Params, config: ModelConfig, prompt: Prompt) -> None:
    n = prompt.num_clear_steps
    tokens, logits_NV = greedy(params, config, prompt.ids, n)
    assert tokens == prompt.greedy[:n]
    np.testing.assert_allclose(logits_NV, prompt.step_logits_NV[:n], rtol=0, atol=ATOL)


@pytest.mark.parametrize("folder", case_folders(), ids=lambda folder: folder.name)
def test_recorded_outputs(folder: Path) -> None:
    params, config = load(folder)
    for prompt in read_prompts(folder):
        logits_TV = prompt_logits(params, config, prompt.ids, page_size=16, chunk=32)
        tail_TV = logits_TV[-len(prompt.logits_TV) :]
        np.testing.assert_allclose(tail_TV, prompt.logits_TV, rtol=0, atol=ATOL)
        assert_continues(params, config, prompt)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 16), (32, 64)])
def test_chunks_and_pages_do_not_change_the_logits(
    kind: Kind, page_size: int, chunk: int, tmp_path: Path
) -> None:
    write_json_files(tmp_path, config_json(kind))
    config = load_config(tmp_path)
    params = random_params(config, jnp.float32, seed=3)
    ids = np.random.default_rng(4).integers(0, config.vocab_size, 77).tolist()
    expected_TV = oracle.logits(named_tensors(params, config), config, ids)
    logits_TV = prompt_logits(params, config, ids, page_size=page_size, chunk=chunk)
    np.testing.assert_allclose(logits_TV, expected_TV, rtol=0, atol=ATOL)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_cached_equals_uncached_at_every_step(kind: Kind, tmp_path: Path) -> None:
    write_json_files(tmp_path, config_json(kind))
    config = load_config(tmp_path)
    params = random_params(config, jnp.float32, seed=5)
    ids = [2, 7, 300, 41, 900]
    tokens, logits_NV = greedy(params, config, ids, 40)
    expected_TV = oracle.logits(named_tensors(params, config), config, ids + tokens[:-1])
    np.testing.assert_allclose(logits_NV, expected_TV[len(ids) - 1 :], rtol=0, atol=ATOL)


def test_int8_keys_and_values_are_rounded_as_the_oracle_does(tmp_path: Path) -> None:
    # Two kv heads in sliding layers, one in the full one.
    write_json_files(tmp_path, config_json("dense"))
    config = load_config(tmp_path)
    params = random_params(config, jnp.float32, seed=3)
    ids = np.random.default_rng(4).integers(0, config.vocab_size, 77).tolist()
    tensors = named_tensors(balance_keys(params, config), config)
    expected_TV = oracle.logits(tensors, config, ids, int8_kv=True)
    exact_TV = oracle.logits(tensors, config, ids)

    logits_TV = prompt_logits(params, config, ids, page_size=16, chunk=32, kv_dtype="int8")

    # A value on the border of two levels may fall to the other one.
    assert np.abs(logits_TV - expected_TV).mean() < 0.1 * np.abs(exact_TV - expected_TV).mean()

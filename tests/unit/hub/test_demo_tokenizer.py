"""The real demo folder's tokenizer against the published one's ids."""

import json
import os
from pathlib import Path

import pytest

from jaxserve.hub.demo import fetch_gemma3_270m
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

PROMPTS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Three reasons to keep a diary:\n1.": [
        *(2, 19765, 7483, 531, 2514, 496, 55873, 236787, 107, 236770, 236761)
    ],
    "def add(a, b):\n    ": [2, 2063, 1138, 236769, 236746, 236764, 518, 1473, 107, 140],
    '{"name": "Ada", "city": "': [2, 14937, 1201, 1083, 623, 86658, 827, 623, 13319, 1083, 623],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return fetch_gemma3_270m(Path(caches) / "jaxserve")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_have_the_published_ids(tokenizer: Tokenizer, prompt: str) -> None:
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    assert ids == PROMPTS[prompt]
    assert Detokenizer(tokenizer).push(ids) == prompt


def test_as_many_merges_as_published(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["merges"]) == 514_906

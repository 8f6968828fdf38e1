"""Recorded outputs of transformers, and the checkpoints that they belong to.

The project's own cases are made by scripts/make_cases. JAXSERVE_TEST_CASES may name more folders of
the same form, separated by colons. JAXSERVE_TEST_GEMMA3 may say where Gemma 3 270M lies, which is
fetched into the user's cache otherwise.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.hub.demo import fetch_gemma3_270m
from tests.checkpoints import DATA, Array

ATOL = 2e-3
# Below this distance of the two likeliest tokens, float32 sums in another order may swap them.
CLEAR_GAP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and its greedy continuation.

    Attributes:
        logits_TV: of the prompt's last T positions.
        step_logits_NV: row n gave greedy[n].
        gaps: per step, the distance of the two largest logits.
    """

    ids: list[int]
    logits_TV: Array
    greedy: list[int]
    step_logits_NV: Array
    gaps: Array

    @property
    def num_clear_steps(self) -> int:
        """Steps before the first one that could go either way."""
        unclear = np.flatnonzero(self.gaps < CLEAR_GAP)
        return int(unclear[0]) if unclear.size else len(self.greedy)


def case_folders() -> list[Path]:
    own = sorted((DATA / "checkpoints").iterdir())
    more = [Path(name) for name in os.environ.get("JAXSERVE_TEST_CASES", "").split(":") if name]
    return own + more


def read_prompts(folder: Path) -> list[Prompt]:
    with np.load(folder / "reference.npz") as arrays:
        count = sum(name.endswith("_ids") for name in arrays)
        return [
            Prompt(
                ids=arrays[f"p{i}_ids"].tolist(),
                logits_TV=arrays[f"p{i}_logits"],
                greedy=arrays[f"p{i}_greedy"].tolist(),
                step_logits_NV=arrays[f"p{i}_step_logits"],
                gaps=arrays[f"p{i}_gaps"],
            )
            for i in range(count)
        ]


def gemma3_270m_folder() -> Path:
    if folder := os.environ.get("JAXSERVE_TEST_GEMMA3"):
        return Path(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return fetch_gemma3_270m(cache / "jaxserve")


def gemma3_270m_reference() -> dict[str, Any]:
    """Return prompts by name, each with ids, greedy and gaps; _paragraph has token_logprobs."""
    recorded: dict[str, Any] = json.loads((DATA / "gemma3_270m.json").read_text(encoding="utf-8"))
    return recorded

"""scripts/loadtest.py against the installed server."""

import asyncio
import json
from pathlib import Path

import pytest

from scripts import loadtest
from tests.e2e.server import ServerProcess

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

LENGTHS = ["--input-len", "24", "--output-len", "8", "--prefix-len", "32", "--tool-len", "16"]
QUICK = ["--concurrency", "1,3", "--turns", "2", "--think-time-s", "0.01"]


@pytest.mark.parametrize("mode", ["random", "prefix", "agents"])
async def test_every_mode_runs_without_a_failure(
    server: ServerProcess, tmp_path: Path, mode: str
) -> None:
    save = tmp_path / "run.json"
    flags = ["--url", server.url, "--mode", mode, "--id-range", "300:900", *LENGTHS, *QUICK]

    assert await asyncio.to_thread(loadtest.main, [*flags, "--save", str(save)]) == 0

    for level in json.loads(save.read_bytes()):
        assert level["completed"] == level["num_prompts"]
        assert all(4 <= length <= 12 for length in level["output_lens"])
        assert level["total_cached_tokens"] is not None
        assert level["duration"] > 0
        if mode == "random":
            assert all(12 <= length <= 36 for length in level["input_lens"])

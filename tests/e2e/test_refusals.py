"""Starts that are refused: the exit code, and what the user is told."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Setup
from tests.e2e.server import COMMAND, ROOT


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def serve(setup: Setup, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start with the shared flags and some that override them; it ends by itself."""
    return run("serve", "--port", "0", *setup.flags, *flags, **environment)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.splitlines()[-1]


def test_a_model_that_is_not_there(setup: Setup) -> None:
    result = serve(setup, "--model", "./no-such-folder")

    assert result.returncode == 2
    assert last_line(result).startswith("jaxserve: --model './no-such-folder' is neither a folder")
    assert "Traceback" not in result.stderr


def test_a_folder_that_holds_no_model(setup: Setup, tmp_path: Path) -> None:
    result = serve(setup, "--model", str(tmp_path))

    assert result.returncode == 3
    assert str(tmp_path) in last_line(result)
    assert "Traceback" not in result.stderr


def test_a_device_that_is_not_there(setup: Setup) -> None:
    result = serve(setup, JAX_PLATFORMS="no_such_chip")

    assert result.returncode == 2
    assert last_line(result).startswith("jaxserve: no device to serve on: ")
    assert "no_such_chip" in last_line(result)
    assert "Traceback" not in result.stderr


def test_a_checkpoint_without_a_tensor(setup: Setup, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(setup.checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"]["layer_types"].append("full_attention")
    (folder / "config.json").write_text(json.dumps(config))

    result = serve(setup, "--model", str(folder))

    assert result.returncode == 3
    assert "layers.3." in last_line(result)
    assert "Traceback" not in result.stderr


def test_a_context_that_does_not_fit_is_refused_with_the_table(setup: Setup) -> None:
    result = serve(setup, "--kv-cache-bytes", "100000")

    assert result.returncode == 2
    assert "jaxserve: one sequence of --max-model-len 2048 does not fit" in result.stderr
    assert "KV tokens" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_context_beyond_the_models(setup: Setup) -> None:
    result = serve(setup, "--max-model-len", "5000")

    assert result.returncode == 2
    assert last_line(result) == (
        "jaxserve: --max-model-len 5000 exceeds the model's 4096 positions"
    )


def test_a_port_in_use(setup: Setup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve(setup, "--port", str(port))

    assert result.returncode == 2
    assert f"cannot listen on --host 127.0.0.1 --port {port}" in last_line(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-batch", "0"], "--max-batch 0 is less than the least, 1"),
        (["serve", "--port", "70000"], "--port 70000"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["bake"], "bake"),
        ([], "command"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)

    assert result.returncode == 2
    assert message in last_line(result)

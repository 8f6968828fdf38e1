"""One tiny server for all tests that need no more, and what others start their own with."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.compiling import FLAGS
from tests.e2e.server import COMMAND, ROOT, ServerProcess

MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What servers of one session share: a checkpoint, and flags with the compiled programs."""

    checkpoint: Path
    flags: tuple[str, ...]
    torch_trap: Path


Start = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("e2e")
    checkpoint = make_checkpoint(folder / "model", "dense")
    trap = folder / "trap"
    trap.mkdir()
    # A torch to be found, which tells that it was.
    (trap / "torch.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('found').touch()"
    )
    flags = [
        *("--model", str(checkpoint), "--dtype", "float32"),
        *("--max-batch", "8", "--max-model-len", "2048", "--kv-cache-bytes", str(1 << 24)),
    ]
    programs = str(folder / "programs")
    compile_programs = [*COMMAND, "compile", "--target", "cpu", "--out", programs, *flags]
    subprocess.run(compile_programs, cwd=ROOT, env=os.environ | fast_compiles(), check=True)
    served = ("--served-model-name", MODEL, "--compile-cache", "", "--programs", programs)
    return Setup(checkpoint=checkpoint, flags=(*flags, *served), torch_trap=trap)


@pytest.fixture
def start(setup: Setup, tmp_path: Path) -> Iterator[Start]:
    """Start a server of the test's own; further flags override the shared ones."""
    with ExitStack() as servers:

        def start(*flags: str, command: tuple[str, ...] = COMMAND) -> ServerProcess:
            return servers.enter_context(
                ServerProcess(
                    tmp_path,
                    [*setup.flags, *flags],
                    command=command,
                    environment=fast_compiles(),
                )
            )

        yield start


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """The shared server, and what it answered as soon as it listened."""

    server: ServerProcess
    health: httpx.Response
    live: httpx.Response
    models: httpx.Response


@pytest.fixture(scope="session")
def starting(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starting]:
    """The shared server, perhaps not ready yet."""
    environment = {**fast_compiles(), "PYTHONPATH": str(setup.torch_trap)}
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, setup.flags, environment=environment) as server:
        yield Starting(
            server=server,
            health=server.get("/health"),
            live=server.get("/live"),
            models=server.get("/v1/models"),
        )


@pytest.fixture(scope="session")
def server(starting: Starting) -> ServerProcess:
    """The shared server, ready."""
    starting.server.wait_ready()
    return starting.server


def fast_compiles() -> dict[str, str]:
    """Return the environment of a server that compiles fast."""
    return {"XLA_FLAGS": FLAGS}


# Clients: none may look for anything but this machine while it is tested.

SILENCE = {
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OTEL_SDK_DISABLED": "true",
}


@pytest.fixture
def this_machine_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test whose client asks for another host's address."""
    asked: list[object] = []
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", b"127.0.0.1", "localhost", None):
            asked.append(host)
            raise OSError(f"the test may not reach {host!r}")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name, value in SILENCE.items():
        monkeypatch.setenv(name, value)
    yield
    assert asked == []


LOCAL_ONLY = """
import socket

asked = []
resolve = socket.getaddrinfo

def getaddrinfo(host, *args, **kwargs):
    if host not in ("127.0.0.1", b"127.0.0.1", "localhost", None):
        asked.append(str(host))
        raise OSError(f"the test may not reach {host!r}")
    return resolve(host, *args, **kwargs)

socket.getaddrinfo = getaddrinfo
"""
"""The same for a program of its own: it precedes it, and `asked` has the other hosts."""

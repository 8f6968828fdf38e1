"""One tiny server for all tests that need no more, and what others start their own with."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.server import COMMAND, ServerProcess

MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What servers of one session share: a checkpoint, its flags and the compiled programs."""

    checkpoint: Path
    flags: tuple[str, ...]
    compile_cache: Path
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
        *("--model", str(checkpoint), "--served-model-name", MODEL, "--dtype", "float32"),
        *("--max-batch", "8", "--max-model-len", "2048", "--kv-cache-bytes", str(1 << 24)),
        *("--compile-cache", str(folder / "compiled")),
    ]
    return Setup(
        checkpoint=checkpoint,
        flags=tuple(flags),
        compile_cache=folder / "compiled",
        torch_trap=trap,
    )


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
    """Let XLA optimize nothing: these tests would wait for it, and are not about speed."""
    return {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

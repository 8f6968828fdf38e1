"""The image, built by the Dockerfile's own steps into fresh folders, and run as a container is.

This stands in for a container engine: see `tests.image.sandbox` for what it is made of. It needs
root on Linux. Elsewhere it is skipped.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.compiling import FLAGS
from tests.image.context import ROOT, make_context, wheels
from tests.image.dockerfile import Stage, read_stages
from tests.image.sandbox import (
    BASE_ENVIRONMENT,
    Binds,
    Container,
    Sandbox,
    build,
    started,
    why_not,
)

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]  # pip and the compiler, on any machine

_PATIENCE_S = 600.0

COMPLETE = """
import json, sys, urllib.request
body = json.dumps({"prompt": "Rain", "max_tokens": 4, "ignore_eos": True}).encode()
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", body, {"content-type": "application/json"}
)
sys.stdout.write(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a build leaves: the last stage and its files, and a model to serve."""

    stage: Stage
    sandbox: Sandbox
    model: Path

    def start(self, folder: Path) -> Container:
        """Start a server, told nothing but which model to serve and how large to be."""
        flags = ["--model", "/models/tiny", "--dtype", "float32", "--kv-cache-bytes", str(1 << 22)]
        flags += ["--max-batch", "1", "--max-model-len", "64"]  # two programs to compile
        return Container(
            self.stage,
            self.sandbox,
            [*(self.stage.command or []), *flags],
            folder / "log",
            environment={"XLA_FLAGS": FLAGS},
            binds={"/models/tiny": (self.model, "ro"), **self._volumes(folder)},
        )

    def _volumes(self, folder: Path) -> Binds:
        """Make fresh volumes as an engine does, with the image's owner and mode of the folder."""
        made = {}
        for path in self.stage.volumes:
            original = (self.sandbox.root / path.lstrip("/")).stat()
            volume = folder / "volumes" / path.lstrip("/")
            volume.mkdir(parents=True)
            os.chown(volume, original.st_uid, original.st_gid)
            volume.chmod(original.st_mode & 0o7777)
            made[path] = (volume, "rw")
        return made


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no namespaces to build the image in: {reason}")
    folder = tmp_path_factory.mktemp("image")
    try:
        stages = read_stages(ROOT / "Dockerfile", {}, BASE_ENVIRONMENT)
        sandbox = build(
            stages,
            make_context(folder / "context"),
            folder / "stages",
            environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"},
            binds={"/wheels": (wheels(), "ro")},
        )
        model = make_checkpoint(folder / "model", "dense")
        yield Image(stage=stages[-1], sandbox=sandbox, model=model)
    finally:
        shutil.rmtree(folder)  # more than a gigabyte


@pytest.fixture(scope="module")
def container(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A running server of a tiny model."""
    set_readable(image.model, by_all=True)
    with started(image.start(tmp_path_factory.mktemp("container"))) as running:
        wait_healthy(running, image.stage.health or [])
        yield running


def set_readable(model: Path, *, by_all: bool) -> None:
    (model / "model.safetensors").chmod(0o644 if by_all else 0o600)


def wait_healthy(container: Container, check: Sequence[str]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while container.process.poll() is None and time.monotonic() < deadline_s:
        # Before that, it may not be inside its root yet.
        if "listening on" in container.log and container.execute(check).returncode == 0:
            return
        time.sleep(0.2)
    pytest.fail(f"not healthy:\n{container.log}")


def test_the_server_runs_as_the_images_user_and_answers(image: Image, container: Container) -> None:
    answer = container.execute(["python", "-c", COMPLETE])

    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 4, answer.stderr
    lines = Path(f"/proc/{container.pid}/status").read_text().splitlines()
    status = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    uid, gid = image.stage.user.split(":")
    assert (status["Uid"], status["Gid"], status["Groups"]) == ([uid] * 4, [gid] * 4, [])


def test_what_it_writes_is_on_the_volume(container: Container) -> None:
    listed = container.execute(["find", "/data/cache/jaxserve/compiled", "-type", "f"])
    not_kept = ["find", "/", "-path", "/proc", "-prune", "-o", "-path", "/data", "-prune"]
    elsewhere = container.execute([*not_kept, "-o", "-user", "jaxserve", "-print"])

    assert listed.stdout, listed.stderr
    assert elsewhere.stdout == ""


def test_the_image_holds_no_weights(image: Image) -> None:
    names = [path.name for path in image.sandbox.root.rglob("*")]

    assert [name for name in names if name.endswith((".safetensors", ".gguf"))] == []
    assert [name for name in names if name.startswith("gemma3_270m")] == []


def test_sigterm_drains_and_ends_it(image: Image, container: Container) -> None:
    assert image.stage.stop_signal is not None
    os.kill(container.pid, signal.Signals[image.stage.stop_signal])

    assert container.process.wait(_PATIENCE_S) == 0
    assert "draining" in container.log
    assert "Traceback" not in container.log


def test_a_model_that_the_user_may_not_read_is_refused_with_the_reason(
    image: Image, tmp_path: Path
) -> None:
    set_readable(image.model, by_all=False)

    with started(image.start(tmp_path)) as container:
        code = container.process.wait(_PATIENCE_S)

    assert code == 3
    assert "user 10001 may not" in container.log
    assert "Traceback" not in container.log

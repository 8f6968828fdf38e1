"""From a model's name to its folder; the hub is a small server on loopback."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.hub.resolve import check_folder, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"template",
    "tokenizer.model": b"pieces",
    "pytorch_model.bin": b"a pickle",
    "picture.png": b"a picture",
}
RESOLVE = """
import sys
from pathlib import Path
from jaxserve.errors import ConfigError
from jaxserve.hub.resolve import resolve_model
try:
    print(resolve_model(sys.argv[1], cache_dir=Path("unused")))
except ConfigError as error:
    sys.exit(f"ConfigError: {error}")
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Speaks as much of the hub's protocol as a snapshot download needs."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in REPO_FILES.items()
            ]
            self.send(200, json.dumps(entries).encode())
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in REPO_FILES]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(info).encode())
        elif path.startswith("/org/tiny/resolve/"):
            name = path.rpartition("/")[2]
            self.send(200, REPO_FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        elif "org/gated" in path:
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolve_at(hub_url: str, name: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """Resolve in a process of its own: the library reads its endpoint when it is imported."""
    pytest.importorskip("huggingface_hub", reason="the extra `hf` is not installed")
    environment = os.environ | {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_a_hub_model_is_downloaded_as_far_as_it_is_needed(hub_url: str, tmp_path: Path) -> None:
    done = resolve_at(hub_url, "org/tiny", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    unneeded = {"pytorch_model.bin", "picture.png"}
    assert contents == {k: v for k, v in REPO_FILES.items() if k not in unneeded}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "the hub has no such model"),
        ("org/gated", "wants its terms accepted"),
        ("org/bad..name", "download failed"),
    ],
)
def test_what_the_hub_refuses_is_a_config_error(
    hub_url: str, tmp_path: Path, name: str, message: str
) -> None:
    done = resolve_at(hub_url, name, tmp_path)
    assert done.returncode == 1
    assert f"ConfigError: --model {name}: " in done.stderr
    assert message in done.stderr


def test_a_hub_that_cannot_be_reached_is_a_config_error(tmp_path: Path) -> None:
    done = resolve_at("http://127.0.0.1:9", "org/tiny", tmp_path)
    message = "--model org/tiny: there is no such folder, and its download failed"
    assert f"ConfigError: {message}" in done.stderr


@pytest.mark.parametrize("name", [None, "gemma3-270m"])
def test_the_demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None) -> None:
    monkeypatch.setattr("jaxserve.hub.resolve.fetch_gemma3_270m", lambda cache: cache / "demo")
    assert resolve_model(name, cache_dir=tmp_path) == tmp_path / "demo"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path


def test_a_folder_goes_before_a_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model", cache_dir=tmp_path) == Path("org/model")


def test_a_folder_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model", cache_dir=tmp_path) == tmp_path / "model"


@pytest.mark.parametrize("name", ["", "gemma", "./no/such/folder", "a/b/c", "org/../x", "org/ x"])
def test_anything_else_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder, nor a hub name") as caught:
        resolve_model(name, cache_dir=tmp_path)
    assert repr(name) in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="install the extra `hf`"):
        resolve_model("org/model", cache_dir=tmp_path)


def test_a_folder_without_a_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"no config\.json, no tokenizer\.json, no \*\.safe"
    ) as no:
        check_folder(str(tmp_path))
    assert f"--model {tmp_path}: the folder {tmp_path.resolve()}" in str(no.value)
    for name in ("config.json", "model-1-of-2.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"holds no model: it has no tokenizer\.json$"):
        check_folder(str(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    for model in (str(tmp_path), "org/name", "", None):
        check_folder(model)

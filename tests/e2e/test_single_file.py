"""The package as one file: the same bytes each time, serving where only its dependencies are."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

import jaxserve
from tests.e2e.conftest import Start
from tests.e2e.server import ROOT


def build(target: Path) -> Path:
    command = [sys.executable, str(ROOT / "scripts" / "build_single_file"), str(target)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("single_file") / "jaxserve.pyz")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has what this one has installed, without jaxserve."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    site_packages = next(folder.glob("lib/*/site-packages"))
    installed = [entry for entry in sys.path if entry.endswith("-packages")]
    # Such files inside those folders, which name an editable package's checkout, are not read.
    (site_packages / "installed.pth").write_text("\n".join(installed) + "\n")
    return str(folder / "bin" / "python")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_the_same_source_gives_the_same_bytes(single_file: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "again.pyz").read_bytes() == single_file.read_bytes()


def test_it_holds_the_package_and_its_licence(single_file: Path) -> None:
    with zipfile.ZipFile(single_file) as archive:
        names = set(archive.namelist())

    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("jaxserve/**/*.py")}
    assert names == modules | {"LICENSE", "__main__.py"}


def test_the_package_is_not_there_otherwise(python: str) -> None:
    result = run(python, "-I", "-c", "import jaxserve")

    assert "No module named 'jaxserve'" in result.stderr


def test_it_tells_its_version(single_file: Path, python: str) -> None:
    result = run(python, "-I", str(single_file), "--version")

    assert result.stdout == f"jaxserve {jaxserve.__version__}\n", result.stderr


def test_without_its_dependencies_it_says_what_to_install(
    single_file: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path, symlinks=True)

    result = run(str(tmp_path / "bin" / "python"), "-I", str(single_file), "serve")

    assert result.returncode == 1
    assert 'is not installed: python -m pip install "anyio' in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.timeout(300)  # it may wait for the compiler
@pytest.mark.usefixtures("server")  # it has filled the folder of compiled programs
def test_it_serves(start: Start, single_file: Path, python: str) -> None:
    server = start(command=(python, "-I", str(single_file)))
    server.wait_ready()

    body = {"prompt": "Rain", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)

    assert answer.json()["usage"]["completion_tokens"] == 3

"""The build context, as .dockerignore leaves it, and the wheels that building it needs."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_context(folder: Path) -> Path:
    """Copy what .dockerignore lets through; it excludes everything, then names exceptions."""
    everything, *exceptions, bytecode = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    if everything != "*" or bytecode != "**/__pycache__":
        raise ValueError(".dockerignore has a form that this does not know")
    for exception in exceptions:
        name = exception.removeprefix("!").rstrip("/")
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def download_wheels(folder: Path) -> Path:
    """Fetch, or take from pip's cache, what the build installs: the one thing it needs a network for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--dest", str(folder), *wanted, "hatchling", "gguf"], check=True)
    return folder

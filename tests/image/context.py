"""The build context, as .dockerignore leaves it, and the wheels that building it needs."""

import hashlib
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


def wheels() -> Path:
    """Return a folder of what the build installs: the one thing that it needs a network for.

    It stays in the checkout's .cache until what is wanted changes.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["hf"], *extras["guided"], "hatchling", "gguf"]
    constraints = ROOT / "constraints.txt"
    text = "\n".join([sys.version, *wanted, constraints.read_text()])
    kept = ROOT / ".cache" / "image-wheels"
    folder = kept / hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder.exists():
        return folder
    shutil.rmtree(kept, ignore_errors=True)
    partial = folder.with_suffix(".partial")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--only-binary", ":all:", "--constraint", str(constraints), "--dest", str(partial)]
    subprocess.run([*pip, *wanted], check=True)
    return partial.rename(folder)

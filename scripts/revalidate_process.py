"""Asks scripts/revalidate_one.py in processes, and comes back from each whatever becomes of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from scripts.revalidate_case import Case, Mode
from scripts.tpu_kernels import QUIET

ROOT = Path(__file__).parent.parent

Answer = dict[str, Any]
"""What a case is answered; one with "error" and without "fits" is a fault of the process."""


def ask_process(
    mode: Mode,
    case: Case | None,
    limit_s: float,
    command: Sequence[str] = (sys.executable, "-m", "scripts.revalidate_one"),
) -> Answer:
    """Answer in a fresh process: a chip's memory is then empty, and libtpu is loaded once.

    A process that fails, or takes longer than `limit_s`, is an answer with "error".
    """
    request = json.dumps({"mode": mode, "case": None if case is None else asdict(case)})
    environment = {**os.environ, **(QUIET if mode == "estimate" else {})}
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # a group of its own, to be ended with what it started itself
        )
        try:
            output, _ = process.communicate(request, limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return {"error": f"no answer after {limit_s:.0f} s"}
        except BaseException:  # this one is told to stop: raised again
            _end(process)
            raise
        log.seek(0)
        lines = log.read().strip().splitlines()
    if process.returncode == 0:
        answer = _read(output)
        return {"error": "the process ended without an answer"} if answer is None else answer
    sys.stderr.writelines(f"{line}\n" for line in lines[:-1])  # the last is in the answer
    return {"error": ": ".join([_how_ended(process.returncode), *lines[-1:]])}


def _read(output: str) -> Answer | None:
    """Return the last line's JSON object."""
    try:
        answer: object = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # it has ended in this moment
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _how_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed, as the system does where memory runs out"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with {code}"

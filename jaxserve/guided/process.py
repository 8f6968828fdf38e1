"""The worker process as the server sees it: started, asked one job at a time, ended.

It is started without a fork of the server's own, whose threads a fork would break: the standard
library's Popen does so, and what waits for it is a thread.
"""

import asyncio
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from jaxserve.errors import SchemaError, UnavailableError
from jaxserve.guided.worker import HEAD_BYTES, Answer, Job, Setup, frame, frame_length

WALL_FACTOR = 30
"""Wall time that a job may take, in units of its CPU time: a busy machine is no schema's fault."""

_OVERRUNS = (-signal.SIGPROF, -signal.SIGABRT)
"""How the process ends itself: its time is over, or a library finds no memory."""

_PROGRAM = "import sys; sys.path[:] = {path!r}; from jaxserve.guided.worker import main; main()"


class Worker:
    """The process; started when needed, and again after a job that ended it.

    Whoever asks gives it one job at a time.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: _Process | None = None
        self._first: bytes | None = None

    async def run(self, job: Job) -> Answer:
        """Return how a job went.

        Raises:
            SchemaError: the job failed, or took too much time or memory.
            UnavailableError: the process was ended by something else, twice, or the machine is too
                busy for it.
        """
        try:
            answer = await self._answer(job)
        except BaseException:
            # Cancelled: an answer would come to whoever asks next.
            await self.stop()
            raise
        if answer.failure is not None:
            raise SchemaError(**answer.failure)
        return answer

    async def stop(self) -> int | None:
        """End the process, if there is one; return how it ended, as Popen tells it."""
        process, self._process = self._process, None
        return None if process is None else await asyncio.to_thread(process.end)

    async def _answer(self, job: Job) -> Answer:
        """Send a job, to a second process where the first was ended from outside."""
        cpu_s = self._setup.cpu_s * job.spec.time_factor
        for _ in range(2):
            try:
                async with asyncio.timeout(cpu_s * WALL_FACTOR):
                    process = self._process
                    if process is None or not process.is_running:
                        process = await self._start()
                    return await asyncio.to_thread(process.ask, frame(job))
            except TimeoutError as error:
                raise UnavailableError("The server is too busy to compile a grammar.") from error
            except (EOFError, OSError):
                if await self.stop() in _OVERRUNS:
                    raise SchemaError(
                        f"the grammar takes more than {cpu_s:g} s or"
                        f" {self._setup.memory_bytes} bytes to compile",
                        code="schema_too_complex",
                    ) from None
        raise UnavailableError("The process that compiles grammars was ended.")

    async def _start(self) -> "_Process":
        await self.stop()
        if self._first is None:
            # Megabytes of tokens: not on the loop, and not twice.
            self._first = await asyncio.to_thread(frame, self._setup)
        process = self._process = _Process()
        await asyncio.to_thread(process.ask, self._first)
        return process


class _Process:
    """A running worker; its methods wait, and are for threads of their own."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._is_asked = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def ask(self, message: bytes) -> Answer:
        """Send a message and return the answer (EOFError, OSError: the process ended)."""
        jobs, answers = self._popen.stdin, self._popen.stdout
        if jobs is None or answers is None:
            raise EOFError
        with self._is_asked:
            jobs.write(message)
            jobs.flush()
            head = _read(answers, HEAD_BYTES)
            answer: Answer = pickle.loads(_read(answers, frame_length(head)))
            return answer

    def end(self) -> int:
        """Kill it, which ends a question that waits for its answer; return how it ended."""
        self._popen.kill()
        with self._is_asked:
            status = self._popen.wait()
            for pipe in (self._popen.stdin, self._popen.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            return status


def _read(pipe: IO[bytes], num_bytes: int) -> bytes:
    data = pipe.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data

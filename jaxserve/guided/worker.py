"""The process that compiles grammars: one job after another, within limits of time and memory.

It runs beside the server so that a schema can take neither the interpreter's lock nor the memory.
Jobs come as length-prefixed pickles from the process that started it; a job's answer is small, the
grammar itself goes into a file, unless none can be written. A job that takes more CPU time than it
may ends the process.
"""

import os
import pickle
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxserve.errors import SchemaError, SchemaFault
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.store import GrammarStore
from jaxserve.guided.tables import Grammar, GrammarSpec
from jaxserve.guided.vocabulary import GrammarVocabulary

_LENGTH = struct.Struct("<Q")
_NICENESS = 10
"""Of this process: running streams go before a grammar."""


class Setup(NamedTuple):
    """What the process is told first."""

    vocabulary: GrammarVocabulary
    folder: Path
    cpu_s: float
    memory_bytes: int


class Job(NamedTuple):
    """A grammar to compile, and the name to keep it under."""

    name: str
    spec: GrammarSpec


class Answer(NamedTuple):
    """How a job went.

    Attributes:
        failure: why there is no grammar.
        unkept: the grammar, where the folder could not keep it.
    """

    cpu_s: float
    failure: SchemaFault | None = None
    unkept: Grammar | None = None


def frame(message: object) -> bytes:
    """Return a message as it is sent."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def frame_length(head: bytes) -> int:
    """Return how long the message after a head is."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


HEAD_BYTES = _LENGTH.size


def main() -> None:
    """Work until the other end closes."""
    os.nice(_NICENESS)
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs = sys.stdin.buffer
    setup = _receive(jobs)
    if not isinstance(setup, Setup):
        return
    _ = setup.vocabulary.tree
    _limit_memory(setup.memory_bytes)
    store = GrammarStore(setup.folder)
    _send(answers, Answer(0.0))
    while isinstance(job := _receive(jobs), Job):
        # Its default action ends the process, also in the midst of a library's work.
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s * job.spec.time_factor)
        answer = _work(job, setup.vocabulary, store)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, answer)


def _work(job: Job, vocabulary: GrammarVocabulary, store: GrammarStore) -> Answer:
    begun_s = time.process_time()
    failure: SchemaFault | None = None
    unkept: Grammar | None = None
    try:
        grammar = compile_grammar(job.spec, vocabulary)
        if not store.write(job.name, grammar):
            unkept = grammar
    except SchemaError as error:
        failure = error.fault
    except (MemoryError, RecursionError) as error:
        failure = SchemaError(
            f"the grammar is too complex ({type(error).__name__})", code="schema_too_complex"
        ).fault
    return Answer(time.process_time() - begun_s, failure, unkept)


def _limit_memory(more_bytes: int) -> None:
    """Allow so many bytes beyond what the process has mapped now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _receive(stream: BinaryIO) -> object:
    """Return the next message, None at the end."""
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    message: object = pickle.loads(stream.read(frame_length(head)))
    return message


def _send(stream: BinaryIO, message: object) -> None:
    stream.write(frame(message))
    stream.flush()

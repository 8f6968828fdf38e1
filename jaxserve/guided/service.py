"""Grammars for requests: compiled once, beside the server, and kept in memory and on disk.

Belongs to one event loop, which never compiles and never waits. Requests for one grammar at the
same time wait for one compilation; one that nobody waits for any more is left out, unless it has
begun. What failed is remembered, too: a schema that took too long once is not tried again.
"""

import asyncio
import hashlib
import logging
import math
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from jaxserve.errors import ApiError, EngineError, OverloadedError, SchemaError, SchemaFault
from jaxserve.guided.compiling import COMPILER_VERSION
from jaxserve.guided.process import Worker
from jaxserve.guided.store import GrammarStore
from jaxserve.guided.tables import Grammar, GrammarSpec, HostGrammar
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.guided.worker import Job, Setup

logger = logging.getLogger(__name__)

DEFAULT_CPU_S = 2.0
DEFAULT_MEMORY_BYTES = 1 << 30
DEFAULT_CACHE_BYTES = 256 << 20
MAX_FAILURES = 1_000
MAX_QUEUED = 64
"""Grammars that are compiled or wait for that; most take 0.1 s, the worst the flag's time."""

_NEWEST_WEIGHT = 0.2
"""Of the latest compilation's time in what one usually takes."""

JSON_OBJECT = GrammarSpec(kind="json_object")


class GrammarCompiler:
    """Compiles grammars on demand. An asynchronous context manager: leaving it ends its process."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        cache_dir: Path | None = None,
        cpu_s: float = DEFAULT_CPU_S,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """Keep grammars in `cache_dir`; None: in a folder that goes with this object."""
        self._own_folder = None if cache_dir else tempfile.TemporaryDirectory(prefix="jaxserve-")
        folder = cache_dir or Path(self._own_folder.name if self._own_folder else "")
        self._vocabulary = vocabulary
        self._store = GrammarStore(folder)
        self._worker = Worker(Setup(vocabulary, folder, cpu_s, memory_bytes))
        self._cache = _Cache(cache_bytes)
        self._failures: OrderedDict[str, SchemaFault] = OrderedDict()
        self._under_way: dict[str, _Search] = {}
        self._turn = asyncio.Lock()
        self._num_queued = 0
        # Before any has been compiled: the most that a usual one may take.
        self._usual_s = cpu_s

    async def __aenter__(self) -> "GrammarCompiler":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def warm(self, specs: Iterable[GrammarSpec] = ()) -> None:
        """Compile what requests are likely to ask for: any JSON object, and `specs`.

        One that cannot be compiled, or not now, is logged, and asked for again by requests.
        """
        for spec in (JSON_OBJECT, *specs):
            try:
                await self.compile(spec)
            except ApiError as error:
                logger.warning("cannot compile a grammar to be warmed: %s", error.message)

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Return a spec's grammar.

        Raises:
            SchemaError: it is malformed, cannot be enforced, or takes too much time or memory.
            OverloadedError: too many others wait.
            UnavailableError: the machine is too busy, or the process was ended by something else.
            EngineError: the grammar was compiled, and deleted before it could be read.
        """
        name = self._name(spec)
        known = self._cache.get(name)
        if known is not None:
            return known
        failure = self._failures.get(name)
        if failure is not None:
            raise SchemaError(**failure)
        search = self._under_way.get(name)
        if search is None:
            search = self._under_way[name] = _Search()
            search.task = asyncio.create_task(self._find(name, spec, search))
            search.task.add_done_callback(lambda done: self._note(name, done))
        search.num_waiting += 1
        try:
            # One who leaves must not end what others wait for.
            return await asyncio.shield(search.task)
        finally:
            search.num_waiting -= 1
            if not (search.num_waiting or search.has_begun or search.task.done()):
                # Whoever asks from now on must not meet it.
                del self._under_way[name]
                search.task.cancel()

    async def close(self) -> None:
        """End the process; what is under way fails."""
        for search in self._under_way.values():
            search.task.cancel()
        await self._worker.stop()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _name(self, spec: GrammarSpec) -> str:
        parts = (spec.digest, self._vocabulary.digest, str(COMPILER_VERSION))
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    async def _find(self, name: str, spec: GrammarSpec, search: "_Search") -> Grammar:
        kept = await asyncio.to_thread(self._store.read, name)
        if kept is not None:
            return kept
        async with self._in_turn():
            search.has_begun = True
            answer = await self._worker.run(Job(name, spec))
        made = answer.unkept or await asyncio.to_thread(self._store.read, name)
        if made is None:  # whoever cleans up was quicker
            raise EngineError("The compiled grammar is gone from the cache folder; try again.")
        if answer.unkept is not None:
            logger.warning("the cache folder cannot be written: grammars stay in memory alone")
        size = "on the host" if isinstance(made, HostGrammar) else f"{made.stats.num_states} states"
        logger.info("compiled a grammar: %s, %s, %.3f s", spec.kind, size, answer.cpu_s)
        return made

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait for the process, in a queue that may be full (OverloadedError)."""
        if self._num_queued >= MAX_QUEUED:
            raise OverloadedError(
                f"{MAX_QUEUED} grammars wait to be compiled",
                retry_after_s=max(1, math.ceil(self._num_queued * self._usual_s)),
            )
        self._num_queued += 1
        try:
            async with self._turn:
                clock = asyncio.get_running_loop().time
                begun_s = clock()
                try:
                    yield
                finally:
                    self._usual_s += _NEWEST_WEIGHT * (clock() - begun_s - self._usual_s)
        finally:
            self._num_queued -= 1

    def _note(self, name: str, done: "asyncio.Task[Grammar]") -> None:
        if done.cancelled():
            return
        del self._under_way[name]
        error = done.exception()
        if error is None:
            self._cache.put(name, done.result())
        elif isinstance(error, SchemaError):
            self._failures[name] = error.fault
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)


class _Search:
    """A grammar that is looked for on disk, waits to be compiled, or is compiled."""

    task: asyncio.Task[Grammar]

    def __init__(self) -> None:
        self.num_waiting = 0
        self.has_begun = False
        """Whether it is compiled: then it is of use to whoever asks next."""


class _Cache:
    """Grammars in memory, the least recently used ones dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._bytes = 0

    def get(self, name: str) -> Grammar | None:
        grammar = self._grammars.get(name)
        if grammar is not None:
            self._grammars.move_to_end(name)
        return grammar

    def put(self, name: str, grammar: Grammar) -> None:
        self._grammars[name] = grammar
        self._bytes += _num_bytes(grammar)
        while self._bytes > self._max_bytes and len(self._grammars) > 1:
            _, dropped = self._grammars.popitem(last=False)
            self._bytes -= _num_bytes(dropped)


def _num_bytes(grammar: Grammar) -> int:
    return len(grammar.text) if isinstance(grammar, HostGrammar) else grammar.stats.num_bytes

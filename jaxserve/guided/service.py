"""Grammars for requests: compiled once, beside the server, and kept in memory and on disk.

Belongs to one event loop, which never compiles and never waits. Requests for one grammar at the
same time wait for one compilation. What failed is remembered, too: a schema that took too long once
is not tried again and again.
"""

import asyncio
import hashlib
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from jaxserve.errors import EngineError, OverloadedError, SchemaError, SchemaFault
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
MAX_UNDER_WAY = 64
"""Grammars that are compiled or wait for that; most take 0.1 s, the worst the flag's time."""

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
        self._under_way: dict[str, asyncio.Task[Grammar]] = {}

    async def __aenter__(self) -> "GrammarCompiler":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def warm(self, specs: Iterable[GrammarSpec] = ()) -> None:
        """Compile what requests are likely to ask for: any JSON object, and `specs`.

        A spec that cannot be compiled is logged, and refused when a request brings it.
        """
        for spec in (JSON_OBJECT, *specs):
            try:
                await self.compile(spec)
            except SchemaError as error:
                logger.warning("cannot compile a grammar to be warmed: %s", error.message)

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Return a spec's grammar.

        Raises:
            SchemaError: it is malformed, cannot be enforced, or takes too much time or memory.
            OverloadedError: too many others wait.
        """
        name = self._name(spec)
        known = self._cache.get(name)
        if known is not None:
            return known
        failure = self._failures.get(name)
        if failure is not None:
            raise SchemaError(**failure)
        task = self._under_way.get(name)
        if task is None:
            if len(self._under_way) >= MAX_UNDER_WAY:
                raise OverloadedError(f"{MAX_UNDER_WAY} grammars wait to be compiled")
            task = asyncio.create_task(self._find(name, spec))
            self._under_way[name] = task
            task.add_done_callback(lambda done: self._note(name, done))
        # One who leaves must not end what others wait for.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the process; what is under way fails."""
        for task in self._under_way.values():
            task.cancel()
        await self._worker.stop()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _name(self, spec: GrammarSpec) -> str:
        parts = (spec.digest, self._vocabulary.digest, str(COMPILER_VERSION))
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    async def _find(self, name: str, spec: GrammarSpec) -> Grammar:
        kept = await asyncio.to_thread(self._store.read, name)
        if kept is not None:
            return kept
        answer = await self._worker.run(Job(name, spec))
        made = answer.unkept or await asyncio.to_thread(self._store.read, name)
        if made is None:  # whoever cleans up was quicker
            raise EngineError("The compiled grammar is gone from the cache folder; try again.")
        if answer.unkept is not None:
            logger.warning("the cache folder cannot be written: grammars stay in memory alone")
        size = "on the host" if isinstance(made, HostGrammar) else f"{made.stats.num_states} states"
        logger.info("compiled a grammar: %s, %s, %.3f s", spec.kind, size, answer.cpu_s)
        return made

    def _note(self, name: str, done: "asyncio.Task[Grammar]") -> None:
        del self._under_way[name]
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._cache.put(name, done.result())
        elif isinstance(error, SchemaError):
            self._failures[name] = error.fault
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)


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

"""The grammars of a model: compiled once, laid out for the device, kept.

Event loop only; the work is done elsewhere, by the compiler or a worker thread.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import anyio.to_thread

from jaxserve.errors import SchemaError, UnsupportedFieldError
from jaxserve.guided import tables as guided
from jaxserve.guided.triggered import Opening
from jaxserve.http.layouts import Layouts
from jaxserve.types import Grammar

logger = logging.getLogger(__name__)

_MAX_KEPT_BYTES = 512 << 20
_HOST_GRAMMAR_BYTES = 1 << 20


class Compiler(Protocol):
    """Compiles grammars: jaxserve.guided.service has it."""

    async def compile(self, spec: guided.GrammarSpec) -> guided.Grammar:
        """Return a grammar.

        Raises:
            SchemaError: it can't be enforced.
            OverloadedError: too many others wait to be compiled.
        """
        ...

    async def warm(self, specs: Iterable[guided.GrammarSpec] = ()) -> None:
        """Compile what requests are likely to bring."""
        ...

    async def close(self) -> None:
        """Compile nothing more."""
        ...


class Grammars:
    """The grammars of one model, the latest kept."""

    def __init__(self, compiler: Compiler, layouts: Layouts) -> None:
        self._compiler = compiler
        self._layouts = layouts
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    @property
    def marks(self) -> Mapping[int, str]:
        """By id, the characters that stand for control tokens."""
        return self._layouts.vocabulary.marks

    async def compile(self, spec: guided.GrammarSpec) -> guided.Grammar:
        """Return what a grammar compiles to; raises as `Compiler.compile`."""
        return await self._compiler.compile(spec)

    async def prepare(
        self,
        spec: guided.GrammarSpec | None,
        *openings: Opening,
        stop_ids: Collection[int] = (),
    ) -> Grammar:
        """Compile a grammar, or find it; None: anything.

        `openings` go before it, and each before those that it follows here. What is text of the
        grammar and one of `stop_ids`, which end the request, is never the only token allowed,
        unless the grammar has no other there. Raises as `Compiler.compile`.
        """
        stops = sorted(filter(self._layouts.vocabulary.is_text, stop_ids))
        key = " ".join(map(str, [spec.digest if spec else "anything", *openings, *stops]))
        grammar = self._kept.get(key)
        if grammar is None:
            compiled = await self._compiler.compile(spec) if spec else None
            # Shielded: whoever leaves must not make room for one more thread while his works on.
            grammar = await asyncio.shield(
                anyio.to_thread.run_sync(self._layouts.lay_out, key, compiled, openings, stops)
            )
            if grammar.loosened:
                logger.warning(
                    "calls of some tools are held to their syntax, but not to their schemas: %s",
                    ", ".join(grammar.loosened),
                )
        self._kept[key] = grammar
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(map(_num_bytes, self._kept.values())) > _MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return grammar

    async def warm(self, specs: Iterable[guided.GrammarSpec]) -> None:
        """Compile what requests are likely to bring; what can't be is logged."""
        await self._compiler.warm(specs)

    async def close(self) -> None:
        """End the compiler."""
        await self._compiler.close()


def _num_bytes(grammar: Grammar) -> int:
    """Count about what a grammar takes: as tables and as the device has them, or on the host."""
    return _HOST_GRAMMAR_BYTES if grammar.image is None else 2 * grammar.image.rows_NR.nbytes


def of_model(grammars: Grammars | None, param: str) -> Grammars:
    """Return what a field needs.

    Raises:
        UnsupportedFieldError: this server has no grammars.
    """
    if grammars is None:
        raise UnsupportedFieldError(f"{param} is not supported by this server.", param=param)
    return grammars


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Let errors of a grammar name the field that it came in."""
    try:
        yield
    except SchemaError as error:
        error.param = param
        raise

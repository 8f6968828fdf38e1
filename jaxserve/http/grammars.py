"""Grammars as requests meet them: compiled once, laid out for the device, handed to sequences.

Event loop only; the work is done elsewhere, by the compiler or a worker thread.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import anyio.to_thread

from jaxserve.errors import InvalidRequestError, SchemaError, UnsupportedFieldError
from jaxserve.guided import tables as guided
from jaxserve.guided.triggered import Opening
from jaxserve.http.layouts import Layouts
from jaxserve.types import GenerationRequest, Grammar, Guidance

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
            grammar = await anyio.to_thread.run_sync(
                self._layouts.lay_out, key, compiled, openings, stops
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


def guide(
    requests: Sequence[GenerationRequest],
    grammar: Grammar,
    model_end_ids: frozenset[int],
    *,
    ensures_complete: bool,
) -> list[GenerationRequest]:
    """Give planned sequences a grammar.

    Raises:
        InvalidRequestError: the budget does not hold the shortest complete text.
    """
    if ensures_complete:
        _check_budget(requests, grammar)
    guidances = {
        ids: guidance(grammar, ids, model_end_ids, ensures_complete=ensures_complete)
        for ids in {request.sampling.stop_token_ids for request in requests}
    }
    return [
        replace(request, guidance=guidances[request.sampling.stop_token_ids])
        for request in requests
    ]


def guidance(
    grammar: Grammar,
    end_ids: frozenset[int],
    model_end_ids: frozenset[int],
    *,
    ensures_complete: bool,
) -> Guidance:
    """Return how a grammar guides what ends with some ids."""
    # What ignores all ends still has to be told that the text is over.
    return Guidance(
        grammar=grammar, end_ids=end_ids or model_end_ids, ensures_complete=ensures_complete
    )


def _check_budget(requests: Sequence[GenerationRequest], grammar: Grammar) -> None:
    if grammar.image is None or grammar.min_tokens is None:
        raise InvalidRequestError(
            "ensure_complete is not supported for a grammar that runs on the host: one that"
            " recurs, or is too large for the device.",
            param="ensure_complete",
        )
    max_tokens = min(request.sampling.max_tokens for request in requests)
    if max_tokens < grammar.min_tokens:
        raise InvalidRequestError(
            f"ensure_complete: the shortest text and its end take {grammar.min_tokens} tokens;"
            f" this answer may have {max_tokens}.",
            param="ensure_complete",
        )

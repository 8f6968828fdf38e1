"""Grammars as requests meet them: compiled once, laid out for the device, handed to sequences.

Event loop only; the work is done elsewhere, by the compiler or a worker thread.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Protocol

import anyio.to_thread
import numpy as np

from jaxserve.device.arena import distances, pack
from jaxserve.errors import InvalidRequestError, SchemaError, UnsupportedFieldError
from jaxserve.guided import tables as guided
from jaxserve.guided.checking import TextChecker
from jaxserve.guided.forced import canonical
from jaxserve.guided.guide import ForcedGuide, MatcherGuide, OpenedGuide, TablesGuide
from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.triggered import Forced, Opening, Thought, anything, opened
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.http.aside import limiter
from jaxserve.types import GenerationRequest, Grammar, Guidance, Guide

logger = logging.getLogger(__name__)

_MAX_KEPT_BYTES = 512 << 20
_HOST_GRAMMAR_BYTES = 1 << 20


class Compiler(Protocol):
    """Compiles grammars: jaxserve.guided.service has it."""

    async def compile(self, spec: guided.GrammarSpec) -> guided.Grammar:
        """Return a grammar; raises SchemaError where it can't be enforced."""
        ...

    async def warm(self, specs: Iterable[guided.GrammarSpec] = ()) -> None:
        """Compile what requests are likely to bring."""
        ...

    async def close(self) -> None:
        """Compile nothing more."""
        ...


class Grammars:
    """The grammars of one model, the latest kept."""

    def __init__(
        self,
        compiler: Compiler,
        vocabulary: GrammarVocabulary,
        *,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        arena_rows: int,
    ) -> None:
        """`vocab_size` is the model's; the device has `arena_rows` for grammars.

        `encode` gives a text's ids without a BOS.
        """
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._encode = encode
        self._vocab_size = vocab_size
        self._arena_rows = arena_rows
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._host_tokenizer = _HostTokenizer(vocabulary)
        self._stops: list[int] = []

    @property
    def marks(self) -> Mapping[int, str]:
        """By id, the characters that stand for control tokens."""
        return self._vocabulary.marks

    def stopping_at(self, token_ids: Collection[int]) -> "Grammars":
        """Return these grammars for a request that some ids stop.

        What is text of a grammar and would stop the request is never the only token allowed, unless
        the grammar has no other there.
        """
        stopping = copy(self)
        stopping._stops = sorted(filter(self._vocabulary.is_text, token_ids))
        return stopping

    async def prepare(self, spec: guided.GrammarSpec | None, *openings: Opening) -> Grammar:
        """Compile a grammar, or find it; None: anything.

        `openings` go before it, and each before those that it follows here.

        Raises:
            SchemaError: it can't be enforced.
        """
        key = " ".join(map(str, [spec.digest if spec else "anything", *openings, *self._stops]))
        grammar = self._kept.get(key)
        if grammar is None:
            compiled: guided.Grammar = anything(self._vocab_size)
            if spec is not None:
                compiled = await self._compiler.compile(spec)
            grammar = await anyio.to_thread.run_sync(self._lay_out, key, compiled, openings)
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

    async def check(
        self,
        spec: guided.GrammarSpec,
        texts: Sequence[str],
        controls: Mapping[str, int] | None = None,
    ) -> dict[str, object]:
        """Tell what a grammar compiles to, and what it says of texts.

        `controls` are control tokens that may be spelled out in the texts.

        Raises:
            SchemaError: it can't be enforced.
        """
        begun_s = time.perf_counter()
        compiled = await self._compiler.compile(spec)
        compile_s = time.perf_counter() - begun_s
        grammar = await self.prepare(spec)
        report: dict[str, object] = {
            "path": "host" if grammar.image is None else "device",
            "compile_s": round(compile_s, 4),
        }
        if isinstance(compiled, guided.HostGrammar):
            report["reason"] = compiled.reason
        else:
            report |= compiled.stats._asdict()
            report["min_tokens"] = grammar.min_tokens
        if compiled.loosened:
            report["loosened"] = compiled.loosened
        if texts:
            # It has compiled for the model within its limits, and does so sooner for bytes.
            marks = {each: self.marks[token_id] for each, token_id in (controls or {}).items()}
            # In threads that no request for an answer waits for.
            report["texts"] = await anyio.to_thread.run_sync(
                lambda: _judge(TextChecker.of(spec, compiled, marks), texts),
                limiter=limiter(is_foreign=True),
            )
        return report

    def _lay_out(self, key: str, compiled: guided.Grammar, openings: Sequence[Opening]) -> Grammar:
        num_words = -(-max(self._vocab_size, self._vocabulary.size) // 32)
        start: Callable[[], Guide]
        if isinstance(compiled, guided.HostGrammar):
            matcher = HostMatcher(self._host_tokenizer.get(), compiled)

            def start_matcher() -> Guide:
                return MatcherGuide(matcher.copy(), num_words=num_words)

            start = self._opened_start(start_matcher, openings, num_words)
            return Grammar(start=start, loosened=compiled.loosened)
        opened_tables = compiled
        try:
            for opening in openings:
                opened_tables = opened(
                    opened_tables,
                    opening,
                    vocab_size=self._vocab_size,
                    is_text_V=self._vocabulary.is_text_V,
                )
        except ValueError:
            # There are too many states for one more.
            start = self._opened_start(lambda: TablesGuide(compiled), openings, num_words)
            return Grammar(start=start, loosened=compiled.loosened)
        tables, forced_id_S = canonical(opened_tables, self._encode, never=self._stops)
        distance_S = distances(tables)
        # One row of the arena is the header's, one the end ids'.
        return Grammar(
            start=lambda: TablesGuide(tables, distance_S, forced_id_S),
            image=pack(tables, key, self._vocab_size, self._arena_rows - 2, distance_S),
            min_tokens=int(distance_S[guided.START_STATE]),
            loosened=compiled.loosened,
        )

    def _opened_start(
        self, start: Callable[[], Guide], openings: Sequence[Opening], num_words: int
    ) -> Callable[[], Guide]:
        for opening in openings:
            start = self._behind(start, opening, num_words)
        return start

    def _behind(
        self, start: Callable[[], Guide], opening: Opening, num_words: int
    ) -> Callable[[], Guide]:
        if isinstance(opening, Forced):
            return lambda: ForcedGuide(start, opening, num_words)
        is_free_V = np.ones(self._vocab_size, np.bool_)
        if isinstance(opening, Thought):
            is_free_V = self._vocabulary.is_text_V
        free_words = np.zeros(num_words, np.uint32)
        packed = np.packbits(is_free_V, bitorder="little")
        free_words.view(np.uint8)[: len(packed)] = packed
        return lambda: OpenedGuide(start, opening, free_words)


class _HostTokenizer:
    """The tokenizer of grammars on the host, which takes seconds to make: once, when needed."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: HostTokenizer | None = None
        self._lock = Lock()

    def get(self) -> HostTokenizer:
        """Return it. Any thread."""
        with self._lock:
            if self._made is None:
                self._made = HostTokenizer(self._vocabulary)
            return self._made


def _num_bytes(grammar: Grammar) -> int:
    """Count about what a grammar takes: as tables and as the device has them, or on the host."""
    return _HOST_GRAMMAR_BYTES if grammar.image is None else 2 * grammar.image.rows_NR.nbytes


def _judge(checker: TextChecker, texts: Sequence[str]) -> list[dict[str, object]]:
    verdicts: list[dict[str, object]] = []
    for text in texts:
        verdict = checker.judge(text.encode())
        report: dict[str, object] = {"accepted": verdict.accepted, "offset": verdict.offset}
        if not verdict.accepted:
            report["allowed"] = verdict.expected
        verdicts.append(report)
    return verdicts


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

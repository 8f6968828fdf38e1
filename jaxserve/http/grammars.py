"""Grammars as requests meet them: compiled once, laid out for the device, handed to sequences.

Event loop only; the work is done elsewhere, by the compiler or a worker thread.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Protocol

import anyio.to_thread

from jaxserve.device.arena import distances, pack
from jaxserve.errors import InvalidRequestError, SchemaError, UnsupportedFieldError
from jaxserve.guided import tables as guided
from jaxserve.guided.checking import TextChecker, describe_bytes
from jaxserve.guided.forced import canonical
from jaxserve.guided.guide import MatcherGuide, TablesGuide
from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.openai.guided import GrammarRequest
from jaxserve.types import GenerationRequest, Grammar, Guidance

_MAX_KEPT_BYTES = 256 << 20


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
        self._host_tokenizer: HostTokenizer | None = None
        self._host_lock = Lock()

    async def prepare(
        self, spec: guided.GrammarSpec, *, stop_token_ids: Collection[int] = ()
    ) -> Grammar:
        """Compile a grammar, or find it.

        What is text of the grammar and would stop the request is never the only token allowed,
        unless the grammar has no other there.

        Raises:
            SchemaError: it can't be enforced.
        """
        stops = sorted(filter(self._vocabulary.is_text, stop_token_ids))
        key = f"{spec.digest}{stops}" if stops else spec.digest
        grammar = self._kept.get(key)
        if grammar is None:
            compiled = await self._compiler.compile(spec)
            grammar = await anyio.to_thread.run_sync(self._lay_out, key, compiled, stops)
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

    async def check(self, spec: guided.GrammarSpec, texts: Sequence[str]) -> dict[str, object]:
        """Tell what a grammar compiles to, and what it says of texts.

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
        if texts:
            # It has compiled for the model within its limits, and does so sooner for bytes.
            report["texts"] = await anyio.to_thread.run_sync(_judge, spec, compiled, texts)
        return report

    def _lay_out(self, key: str, compiled: guided.Grammar, stops: Sequence[int]) -> Grammar:
        if isinstance(compiled, guided.HostGrammar):
            matcher = HostMatcher(self._tokenizer_of_host(), compiled)
            num_words = -(-max(self._vocab_size, self._vocabulary.size) // 32)
            return Grammar(start=lambda: MatcherGuide(matcher.copy(), num_words=num_words))
        tables, forced_id_S = canonical(compiled, self._encode, never=stops)
        distance_S = distances(tables)
        # One row of the arena is the header's, one the end ids'.
        return Grammar(
            start=lambda: TablesGuide(tables, distance_S, forced_id_S),
            image=pack(tables, key, self._vocab_size, self._arena_rows - 2),
            min_tokens=int(distance_S[guided.START_STATE]),
        )

    def _tokenizer_of_host(self) -> HostTokenizer:
        with self._host_lock:
            if self._host_tokenizer is None:
                self._host_tokenizer = HostTokenizer(self._vocabulary)
            return self._host_tokenizer


def _num_bytes(grammar: Grammar) -> int:
    return 0 if grammar.image is None else grammar.image.rows_NR.nbytes


def _judge(
    spec: guided.GrammarSpec, compiled: guided.Grammar, texts: Sequence[str]
) -> list[dict[str, object]]:
    checker = TextChecker.of(spec, compiled)
    verdicts: list[dict[str, object]] = []
    for text in texts:
        verdict = checker.judge(text.encode())
        report: dict[str, object] = {"accepted": verdict.accepted, "offset": verdict.offset}
        if not verdict.accepted:
            report["allowed"] = describe_bytes(verdict.allowed, may_end=verdict.may_end)
        verdicts.append(report)
    return verdicts


async def prepare(
    grammars: Grammars | None, request: GrammarRequest, *, stop_token_ids: Collection[int] = ()
) -> Grammar:
    """Compile what a request asks for, that may stop at some ids; errors name the field.

    Raises:
        SchemaError: it can't be enforced.
        UnsupportedFieldError: this server has no grammars.
    """
    with _naming(request):
        grammars = _of_model(grammars, request)
        return await grammars.prepare(request.spec, stop_token_ids=stop_token_ids)


async def check(
    grammars: Grammars | None, request: GrammarRequest, texts: Sequence[str]
) -> dict[str, object]:
    """Tell of a grammar and of texts; raises what `prepare` does."""
    with _naming(request):
        return await _of_model(grammars, request).check(request.spec, texts)


def _of_model(grammars: Grammars | None, request: GrammarRequest) -> Grammars:
    if grammars is None:
        raise UnsupportedFieldError(
            f"{request.param} is not supported by this server.", param=request.param
        )
    return grammars


@contextmanager
def _naming(request: GrammarRequest) -> Iterator[None]:
    """Let errors of a grammar name the field that it came in."""
    try:
        yield
    except SchemaError as error:
        error.param = request.param
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
    # What ignores all ends still has to be told that the text is over.
    guidances = {
        ids: Guidance(
            grammar=grammar, end_ids=ids or model_end_ids, ensures_complete=ensures_complete
        )
        for ids in {request.sampling.stop_token_ids for request in requests}
    }
    return [
        replace(request, guidance=guidances[request.sampling.stop_token_ids])
        for request in requests
    ]


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

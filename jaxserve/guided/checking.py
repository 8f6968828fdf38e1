"""Judging texts by a grammar, byte by byte: is a text accepted, and if not, where does it go wrong.

For people who write grammars. No tokenizer takes part: a text is judged as written in bytes.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from jaxserve.guided.calls import CallsSource, CallTool
from jaxserve.guided.compiling import compile_grammar, host_calls
from jaxserve.guided.guide import opened_start, start_of
from jaxserve.guided.host import HostTokenizer
from jaxserve.guided.masks import has_id, num_words, unpacked
from jaxserve.guided.tables import Grammar, GrammarSpec, HostGrammar
from jaxserve.guided.triggered import Trigger
from jaxserve.guided.vocabulary import FIRST_MARK, MAX_MARKS, GrammarVocabulary

_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a grammar says of a text.

    Attributes:
        offset: of the first byte that may not stand where it stands; the text's length where all
            may, though something may be missing behind them.
        allowed: bytes that may follow the text before `offset`.
        may_end: whether the text may end there.
        controls: spellings of control tokens that may follow there.
    """

    accepted: bool
    offset: int
    allowed: frozenset[int]
    may_end: bool
    controls: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What may come at `offset`, as one reads it."""
        return describe_bytes(self.allowed, may_end=self.may_end, controls=self.controls)

    def told(self) -> dict[str, object]:
        """Return it as people are told: `allowed` is what may come at `offset`."""
        told: dict[str, object] = {"accepted": self.accepted, "offset": self.offset}
        return told if self.accepted else told | {"allowed": self.expected}


@lru_cache(maxsize=1)
def byte_vocabulary() -> GrammarVocabulary:
    """Return a vocabulary of the 256 bytes and all marks there can be.

    A mark's number is the same as in any other vocabulary, so what is written with another's marks
    can be compiled for this one.
    """
    pieces: dict[int, str | int] = {byte: byte for byte in range(_NUM_BYTES)}
    controls = range(_NUM_BYTES, _NUM_BYTES + MAX_MARKS)
    return GrammarVocabulary.build(pieces, control_ids=controls, vocab_size=_NUM_BYTES + MAX_MARKS)


@lru_cache(maxsize=1)
def _byte_tokenizer() -> HostTokenizer:
    return HostTokenizer(byte_vocabulary())


class TextChecker:
    """A grammar over bytes."""

    def __init__(
        self,
        grammar: Grammar,
        controls: Mapping[str, str] | None = None,
        *,
        trigger: str | None = None,
    ) -> None:
        """Judge by a grammar that was compiled for `byte_vocabulary()`.

        `controls` are control tokens that may be spelled out in texts, and their marks. Behind
        `trigger`, one of them, the grammar begins, and any text may stand before it and behind.
        """
        self._ids = {
            spelling: _NUM_BYTES + ord(mark) - FIRST_MARK
            for spelling, mark in (controls or {}).items()
        }
        self._around = re.compile(f"({'|'.join(map(re.escape, self._ids))})".encode())
        vocabulary = byte_vocabulary()
        width = num_words(vocabulary.size)
        self._start = start_of(grammar, _byte_tokenizer, num_words=width)
        if trigger is not None:
            self._start = opened_start(
                self._start,
                Trigger(self._ids[trigger]),
                vocab_size=vocabulary.size,
                is_text_V=vocabulary.is_text_V,
                num_words=width,
            )

    @classmethod
    def of(
        cls,
        spec: GrammarSpec,
        compiled: Grammar | None = None,
        controls: Mapping[str, str] | None = None,
        *,
        trigger: str | None = None,
    ) -> "TextChecker":
        """Compile a spec; `compiled` is its grammar for a model, where that is known.

        Raises:
            SchemaError: as compiling does.
        """
        if compiled is not None and compiled.loosened:
            spec = _loosened(spec, compiled.loosened)
        if not isinstance(compiled, HostGrammar):
            compiled = compile_grammar(spec, byte_vocabulary())
        elif spec.kind == "calls":
            # Its text names control tokens by their ids, which are others here.
            compiled = host_calls(CallsSource.read(spec.source), byte_vocabulary(), compiled.reason)
        return cls(compiled, controls, trigger=trigger)

    def judge(self, text: bytes) -> Verdict:
        """Return what the grammar says of a text."""
        guide = self._start()
        offset = 0
        for token_id, length in self._tokens(text):
            if not has_id(guide.allowed_words(), token_id):
                break
            guide.advance(token_id)
            offset += length
        allowed_V = unpacked(guide.allowed_words())
        return Verdict(
            accepted=guide.may_end and offset == len(text),
            offset=offset,
            allowed=frozenset(np.flatnonzero(allowed_V[:_NUM_BYTES]).tolist()),
            may_end=guide.may_end,
            controls=tuple(spelling for spelling, i in self._ids.items() if allowed_V[i]),
        )

    def _tokens(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Return the ids that a text is made of, and how many bytes each one is."""
        for piece in self._around.split(text) if self._ids else [text]:
            token_id = self._ids.get(piece.decode(errors="replace"))
            if token_id is None:
                yield from ((byte, 1) for byte in piece)
            else:
                yield token_id, len(piece)


def _loosened(spec: GrammarSpec, names: Collection[str]) -> GrammarSpec:
    """Return calls with some tools loosened: for the model they were, whose tables are larger."""
    source = CallsSource.read(spec.source)
    tools = tuple(
        CallTool(tool.name, {}, "given_up") if tool.name in names else tool for tool in source.tools
    )
    return replace(spec, source=replace(source, tools=tools).text())


def described(grammar: Grammar) -> dict[str, object]:
    """Return what a grammar compiled to, as people are told."""
    told: dict[str, object] = {}
    if isinstance(grammar, HostGrammar):
        told["reason"] = grammar.reason
    else:
        told |= grammar.stats._asdict()
    if grammar.loosened:
        told["loosened"] = grammar.loosened
    return told


def describe_bytes(allowed: frozenset[int], *, may_end: bool, controls: Sequence[str] = ()) -> str:
    """Return bytes as one reads them: ranges of printable ones, others in hexadecimal."""
    parts = [*controls]
    left = sorted(allowed)
    while left:
        last = 0
        while last + 1 < len(left) and left[last + 1] == left[last] + 1:
            last += 1
        run, left = left[: last + 1], left[last + 1 :]
        parts += [_name(run[0])] if len(run) == 1 else [f"{_name(run[0])}-{_name(run[-1])}"]
    return " ".join(parts + ["end of text"] * may_end) or "nothing"


def _name(byte: int) -> str:
    return chr(byte) if 0x20 < byte < 0x7F else f"0x{byte:02x}"

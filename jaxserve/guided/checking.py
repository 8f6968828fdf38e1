"""Judging texts by a grammar, byte by byte: is a text accepted, and if not, where does it go wrong.

For people who write grammars. No tokenizer takes part: a text is judged as written in bytes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.tables import Grammar, GrammarSpec, HostGrammar
from jaxserve.guided.vocabulary import GrammarVocabulary

_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a grammar says of a text.

    Attributes:
        offset: of the first byte that may not stand where it stands; the text's length where all
            may, though something may be missing behind them.
        allowed: bytes that may follow the text before `offset`.
        may_end: whether the text may end there.
    """

    accepted: bool
    offset: int
    allowed: frozenset[int]
    may_end: bool


@lru_cache(maxsize=1)
def byte_vocabulary() -> GrammarVocabulary:
    """Return a vocabulary of the 256 bytes and an end."""
    pieces: dict[int, str | int] = {byte: byte for byte in range(_NUM_BYTES)}
    return GrammarVocabulary.build(pieces | {_NUM_BYTES: "<end>"}, control_ids=(_NUM_BYTES,))


@lru_cache(maxsize=1)
def _byte_tokenizer() -> HostTokenizer:
    return HostTokenizer(byte_vocabulary())


class TextChecker:
    """A grammar over bytes."""

    def __init__(self, grammar: Grammar) -> None:
        """Judge by a grammar that was compiled for `byte_vocabulary()`."""
        self._grammar = grammar

    @classmethod
    def of(cls, spec: GrammarSpec, compiled: Grammar | None = None) -> "TextChecker":
        """Compile a spec; `compiled` is its grammar for a model, where that is known.

        Raises:
            SchemaError: as compiling does.
        """
        if isinstance(compiled, HostGrammar):
            return cls(compiled)
        return cls(compile_grammar(spec, byte_vocabulary()))

    def judge(self, text: bytes) -> Verdict:
        """Return what the grammar says of a text."""
        if isinstance(self._grammar, HostGrammar):
            return self._judge_on_host(self._grammar, text)
        tables, state, offset = self._grammar, 0, 0
        for byte in text:
            following = tables.advance(state, byte)
            if following < 0:
                break
            state, offset = following, offset + 1
        allowed = np.flatnonzero(tables.allowed_V(state)[:_NUM_BYTES])
        may_end = bool(tables.accepting_S[state])
        accepted = may_end and offset == len(text)
        return Verdict(accepted, offset, frozenset(allowed.tolist()), may_end)

    def _judge_on_host(self, grammar: HostGrammar, text: bytes) -> Verdict:
        matcher = HostMatcher(_byte_tokenizer(), grammar)
        offset = 0
        while offset < len(text) and matcher.advance(text[offset]):
            offset += 1
        row_W = np.zeros(-(-byte_vocabulary().size // 32), np.uint32)
        matcher.fill_mask(row_W)
        bits = np.unpackbits(row_W.astype("<u4").view(np.uint8), bitorder="little")[:_NUM_BYTES]
        may_end = matcher.accepting
        accepted = may_end and offset == len(text)
        return Verdict(accepted, offset, frozenset(np.flatnonzero(bits).tolist()), may_end)


def describe_bytes(allowed: frozenset[int], *, may_end: bool) -> str:
    """Return bytes as one reads them: ranges of printable ones, others in hexadecimal."""
    parts: list[str] = []
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

r"""Log-probabilities as the two answers write them.

A token is written as its text; one that is a byte of a character, as OpenAI does, as `bytes:\xNN`.
What is written is JSON at once, a token at a time: as objects, those of a long prompt would take
their encoder the time of several steps in one piece.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import orjson

from jaxserve.types import TokenLogprobs

Wire = dict[str, object]

Columns = tuple[bytes, ...]
"""Tokens as JSON: what goes into each list of a choice's `logprobs`; parts can be joined."""

_COMPLETION_LISTS = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")


def chat_logprobs(parts: Sequence[Columns]) -> orjson.Fragment:
    """Join what is told of a chat choice's tokens to its `logprobs`."""
    [content] = _joined(parts, 1)
    return orjson.Fragment(b'{"content":[%s],"refusal":null}' % content)


def completion_logprobs(parts: Sequence[Columns]) -> orjson.Fragment:
    """Join what is told of a completion choice's tokens to its `logprobs`."""
    columns = _joined(parts, len(_COMPLETION_LISTS))
    lists = [b'"%s":[%s]' % each for each in zip(_COMPLETION_LISTS, columns, strict=True)]
    return orjson.Fragment(b"{%s}" % b",".join(lists))


def _joined(parts: Sequence[Columns], num_columns: int) -> list[bytes]:
    return [b",".join(part[i] for part in parts if part[i]) for i in range(num_columns)]


def _column(values: Iterable[object]) -> bytes:
    return b",".join(map(orjson.dumps, values))


class Spelling(Protocol):
    """What each id stands for."""

    def piece(self, token_id: int) -> str | int:
        """Return a token's text, or its byte where it is one; "" outside of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token of an answer or an echoed prompt.

    Attributes:
        offset: where its text begins in the choice's; a byte's is where its run of bytes does.
        scored: None for a prompt's first token, which follows nothing.
    """

    token_id: int
    offset: int
    scored: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsWriter:
    """Writes tokens by their spellings, or `as_ids`: "token_id:ID"."""

    spelling: Spelling
    as_ids: bool

    def chat(self, tokens: Sequence[ScoredToken]) -> Columns:
        """Write tokens of a chat choice."""
        content = (
            {
                **self._entry(token.token_id, token.scored.logprob),
                "top_logprobs": [
                    self._entry(token_id, logprob)
                    for token_id, logprob in zip(
                        token.scored.top_ids, token.scored.top_logprobs, strict=True
                    )
                ],
            }
            for token in tokens
            if token.scored is not None
        )
        return (_column(content),)

    def completion(self, tokens: Sequence[ScoredToken], num_top: int) -> Columns:
        """Write tokens of a completion choice; each is always among its likeliest."""
        return (
            _column(self._text(token.token_id) for token in tokens),
            _column(None if token.scored is None else token.scored.logprob for token in tokens),
            _column(self._top(token.scored, num_top) for token in tokens),
            _column(token.offset for token in tokens),
        )

    def prompt(self, scored: Sequence[TokenLogprobs], num_top: int) -> orjson.Fragment:
        """Give `prompt_logprobs` as vLLM does: by id, null for the first token."""
        rest = (self._by_id(each.cut(num_top)) for each in scored)
        return orjson.Fragment(b"[%s]" % _column(chain((None,), rest)))

    def _top(self, scored: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
        if scored is None:
            return None
        cut = scored.cut(num_top)
        top = {
            self._text(token_id): logprob
            for token_id, logprob in zip(cut.top_ids, cut.top_logprobs, strict=True)
        }
        return {**top, self._text(scored.token_id): scored.logprob}

    def _by_id(self, scored: TokenLogprobs) -> Wire:
        def entry(token_id: int, logprob: float, rank: int) -> Wire:
            return {"logprob": logprob, "rank": rank, "decoded_token": self._spell(token_id)}

        top = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(scored.top_ids, scored.top_logprobs, strict=True), start=1
            )
        }
        return {**top, str(scored.token_id): entry(scored.token_id, scored.logprob, scored.rank)}

    def _entry(self, token_id: int, logprob: float) -> Wire:
        piece = self.spelling.piece(token_id)
        data = [piece] if isinstance(piece, int) else list(piece.encode())
        return {"token": self._text(token_id), "logprob": logprob, "bytes": data}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self._spell(token_id)

    def _spell(self, token_id: int) -> str:
        piece = self.spelling.piece(token_id)
        return f"bytes:\\x{piece:02x}" if isinstance(piece, int) else piece

r"""Log-probabilities as the two answers write them.

A token is written as its text; one that is a byte of a character, as OpenAI does, as `bytes:\xNN`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.types import TokenLogprobs

Wire = dict[str, object]


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

    def chat(self, tokens: Sequence[ScoredToken]) -> Wire:
        """Give the `logprobs` of a chat choice."""
        content = [
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
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[ScoredToken], num_top: int) -> Wire:
        """Give the `logprobs` of a completion choice; a token is always among its likeliest."""
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [
                None if token.scored is None else token.scored.logprob for token in tokens
            ],
            "top_logprobs": [self._top(token.scored, num_top) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def prompt(self, scored: Sequence[TokenLogprobs]) -> list[Wire | None]:
        """Give `prompt_logprobs` as vLLM does: by id, None for the first token."""
        return [None, *(self._by_id(each) for each in scored)]

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

"""The control tokens that Gemma 4's turns are made of."""

from dataclasses import dataclass
from typing import Self

from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Ids of the control tokens that a turn is made of."""

    thought_start: int
    thought_end: int
    call_start: int
    call_end: int
    response_start: int
    delimiter: int

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Self | None:
        """Look them up by their spelling; None where the vocabulary lacks one."""
        ids = {name: tokenizer.token_id(spelling) for name, spelling in _SPELLINGS.items()}
        known = {name: token_id for name, token_id in ids.items() if token_id is not None}
        return cls(**known) if len(known) == len(ids) else None


_SPELLINGS = {
    "thought_start": "<|channel>",
    "thought_end": "<channel|>",
    "call_start": "<|tool_call>",
    "call_end": "<tool_call|>",
    "response_start": "<|tool_response>",
    "delimiter": '<|"|>',
}

"""The control tokens that Gemma 4's turns are made of."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from jaxserve.guided.calls import CallMarks
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

    @property
    def spellings(self) -> dict[str, int]:
        """All of them by their spelling."""
        return {spelling: getattr(self, name) for name, spelling in _SPELLINGS.items()}

    def is_in_thought(self, ids: Sequence[int], special_ids: Container[int]) -> bool:
        """Tell whether ids, of which some are control tokens, end within a thought."""
        last = next((token_id for token_id in reversed(ids) if token_id in special_ids), None)
        return last == self.thought_start

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Self | None:
        """Look them up by their spelling; None where the vocabulary lacks one."""
        ids = {name: tokenizer.token_id(spelling) for name, spelling in _SPELLINGS.items()}
        known = {name: token_id for name, token_id in ids.items() if token_id is not None}
        return cls(**known) if len(known) == len(ids) else None


def call_marks(markers: Markers | None, marks: Mapping[int, str]) -> CallMarks | None:
    """Return what stands for the markers of calls in grammars; `marks` are a vocabulary's."""
    if markers is None:
        return None
    ids = (markers.call_start, markers.call_end, markers.delimiter)
    return CallMarks(*(marks[token_id] for token_id in ids))


def control_marks(markers: Markers | None, marks: Mapping[int, str]) -> dict[str, str]:
    """Return by their spelling what stands for all markers in grammars, as in `call_marks`."""
    spellings = {} if markers is None else markers.spellings
    return {spelling: marks[token_id] for spelling, token_id in spellings.items()}


_SPELLINGS = {
    "thought_start": "<|channel>",
    "thought_end": "<channel|>",
    "call_start": "<|tool_call>",
    "call_end": "<tool_call|>",
    "response_start": "<|tool_response>",
    "delimiter": '<|"|>',
}

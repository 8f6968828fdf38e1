"""A chat's turn: how it is parsed, what it changes in sampling, and how its parts are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxserve.http.served_model import ServedModel
from jaxserve.http.turns import turn_starts
from jaxserve.openai.options import GenerationOptions
from jaxserve.openai.tool_schemas import argument_types
from jaxserve.openai.tools import ToolUse
from jaxserve.text.gemma_turn import GemmaTurn
from jaxserve.text.json_turn import JsonTurn
from jaxserve.text.markers import Markers
from jaxserve.text.turns import (
    CallArguments,
    CallStarted,
    Content,
    OfferedTools,
    Thought,
    TurnEvent,
    TurnParser,
)
from jaxserve.types import BANNED, GenerationRequest, SamplingParams

REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "none": (),
}
"""Fields of an answer that hold the model's thoughts, by the flag's value."""


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """What a chat request says of its answers' parts.

    Attributes:
        reasoning_fields: where thoughts are told; none: they are not.
        thinks: the model is asked to think.
        thought_budget: most tokens of thoughts; None: no limit.
        strict_by_default: arguments of calls fit the schemas of tools that do not say so.
    """

    model: ServedModel
    tool_use: ToolUse
    reasoning_fields: Sequence[str]
    thinks: bool = False
    thought_budget: int | None = None
    strict_by_default: bool = True

    @cached_property
    def markers(self) -> Markers | None:
        """The control tokens of turns, where the model has them."""
        return Markers.find(self.model.tokenizer)

    def is_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends within a thought."""
        return self.markers is not None and self.markers.is_in_thought(
            prompt_ids, self.model.tokenizer.special_ids
        )

    @cached_property
    def _tools(self) -> OfferedTools:
        return {tool.name: argument_types(tool.parameters) for tool in self.tool_use.offered}

    def parser(self, request: GenerationRequest, options: GenerationOptions) -> TurnParser | None:
        """Return what splits an answer; None where all of it is content."""
        tokenizer, skips = self.model.tokenizer, options.skip_special_tokens
        if self.markers is not None:
            return GemmaTurn(
                tokenizer,
                self.markers,
                self._tools or None,
                prompt_ids=request.prompt_ids,
                skip_special_tokens=skips,
            )
        if self._tools:
            return JsonTurn(tokenizer, self._tools, skip_special_tokens=skips)
        return None

    def fit(self, request: GenerationRequest) -> GenerationRequest:
        """Make a request one of a chat.

        A call ends it, also where other end ids do not, or is banned where asked to; later requests
        may part from it where a turn of the model begins.
        """
        tokenizer = self.model.tokenizer
        request = replace(request, resume_points=turn_starts(request.prompt_ids, tokenizer))
        markers, sampling = self.markers, request.sampling
        if markers is None:
            return request
        if self._tools:
            ends = sampling.stop_token_ids | {markers.response_start}
            sampling = replace(sampling, stop_token_ids=ends)
        elif self.tool_use.is_banned:
            sampling = with_ban(sampling, markers.call_start)
        return replace(request, sampling=sampling)

    def delta(self, part: TurnEvent) -> Mapping[str, object] | None:
        """Return a part as a chunk's delta; None where it is content, or nothing to tell."""
        if isinstance(part, Thought) and self.reasoning_fields:
            return dict.fromkeys(self.reasoning_fields, part.text)
        if isinstance(part, CallStarted):
            call = {"index": part.index, **_call(part)}
        elif isinstance(part, CallArguments):
            call = {"index": part.index, "function": {"arguments": part.text}}
        else:
            return None
        return {"tool_calls": [call]}


@dataclass(slots=True)
class WholeTurn:
    """The parts of a turn, put together."""

    plan: TurnPlan | None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def add(self, parts: Sequence[TurnEvent]) -> None:
        """Append parts."""
        for part in parts:
            if isinstance(part, Content):
                self.text.append(part.text)
            elif isinstance(part, Thought):
                self.reasoning.append(part.text)
            elif isinstance(part, CallStarted):
                self.calls.append(_call(part))
                self.arguments.append([])
            elif isinstance(part, CallArguments):
                self.arguments[part.index].append(part.text)

    def extras(self) -> dict[str, object]:
        """Return the fields of a message beside its content."""
        extras: dict[str, object] = {}
        if self.plan is not None and self.reasoning:
            extras |= dict.fromkeys(self.plan.reasoning_fields, "".join(self.reasoning))
        if self.calls:
            for call, pieces in zip(self.calls, self.arguments, strict=True):
                call["function"]["arguments"] = "".join(pieces)
            extras["tool_calls"] = self.calls
        return extras


def with_ban(sampling: SamplingParams, token_id: int) -> SamplingParams:
    """Return parameters with which an id is never sampled."""
    others = [pair for pair in sampling.logit_bias if pair[0] != token_id]
    return replace(sampling, logit_bias=tuple(sorted((*others, (token_id, BANNED)))))


def _call(part: CallStarted) -> dict[str, Any]:
    function = {"name": part.name, "arguments": ""}
    return {"id": part.id, "type": "function", "function": function}

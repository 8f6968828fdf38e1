"""What a model's turn consists of: thoughts, content and calls of tools, as events."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.errors import InvariantError

OfferedTools = Mapping[str, Mapping[str, str]]
"""By name of a tool, the JSON Schema types of its arguments, where each has exactly one."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins; calls of a turn are counted from 0, and named by who tells them."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: all of them together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete; there is none where the turn was cut in it."""

    index: int


TurnEvent = Content | Thought | CallStarted | CallArguments | CallEnded


class TurnParser(Protocol):
    """Splits a turn into events, id by id."""

    @property
    def num_thought_tokens(self) -> int:
        """Ids of thoughts so far, their markers included."""

    @property
    def faults(self) -> Sequence[str]:
        """Names of what was put right, or given back as content because it could not be."""

    def push(self, token_id: int) -> list[TurnEvent]:
        """Take one id; returns what it makes final."""

    def finish(self, *, is_cut: bool) -> list[TurnEvent]:
        """Take the end; where it `is_cut`, a call under way stays incomplete."""


class TurnText:
    """The events of one push, in order, and the calls' count."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[TurnEvent] = []

    def add(self, event: TurnEvent) -> None:
        """Append an event; one without text is none."""
        if isinstance(event, Content | Thought | CallArguments) and not event.text:
            return
        self._events.append(event)

    def start_call(self, name: str) -> None:
        """Begin the next call."""
        self._events.append(CallStarted(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Continue the last call."""
        self.add(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """End the last call."""
        self._events.append(CallEnded(self.num_calls - 1))

    def take(self) -> list[TurnEvent]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events


_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:/-]{0,127}")


def is_tool_name(name: str) -> bool:
    """Tell whether a text has the form of a tool's name."""
    return _NAME.fullmatch(name) is not None


def resolve_name(name: str, tools: OfferedTools) -> str | None:
    """Return the offered tool that a model means: by its exact name, or by the only similar one.

    Models put a namespace before it, and change its case.
    """
    if name in tools:
        return name
    plain = re.split(r"[.:/]", name)[-1].lower()
    similar = [tool for tool in tools if tool.lower() in (plain, name.lower())]
    return similar[0] if len(similar) == 1 else None


def merge(events: Sequence[TurnEvent]) -> list[TurnEvent]:
    """Join neighbours of one kind, so that equal turns have equal events however they came."""
    merged: list[TurnEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            merged[-1] = Thought(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            if event.index != last.index:
                raise InvariantError("a call's arguments come before its start")
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged

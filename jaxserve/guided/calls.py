"""Calls of tools as a grammar: which may be made, how each is written, what it may be given.

A call is written as the model's turns have it: Gemma 4's between control tokens, all others' as
JSON in a fenced block. Arguments follow the tool's schema, in the order and the spelling in which
chat templates write them again, so that the next prompt begins as this answer ended.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import AutomatonTooLargeError, Dfa
from jaxserve.guided.cases import Cases
from jaxserve.guided.composing import Nfa
from jaxserve.guided.conditions import Literal as SchemaAt
from jaxserve.guided.document import Document
from jaxserve.guided.endings import nothing_fits
from jaxserve.guided.json_automaton import JsonAutomata, NeedsStackError
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.notation import JsonNotation, MarkedNotation, Notation

BLOCK_START = "```tool_call\n"
BLOCK_END = "\n```"

Strictness = Literal["always", "if_possible", "given_up", "never"]
"""Whether arguments have to fit the schema; in the last two they are any object."""


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""What a call may be given where its tool's schema is not enforced."""


class CallTool(NamedTuple):
    """A tool that may be called; `parameters` is its schema."""

    name: str
    parameters: Any
    strictness: Strictness


class CallMarks(NamedTuple):
    """The characters that stand for the control tokens of a call."""

    start: str
    end: str
    delimiter: str


class AnswerSpec(NamedTuple):
    """What may be written in the place of calls: another spec's fields."""

    kind: str
    source: str
    compact: bool


@dataclass(frozen=True, kw_only=True)
class CallsSource:
    """What a spec of the kind `calls` says.

    Attributes:
        marks: of Gemma 4's syntax; None: calls are JSON in fenced blocks.
        is_opened: the token that opens the call is there already; then it is one call.
        repeats: further calls may follow.
        answer: may be written instead.
    """

    tools: tuple[CallTool, ...]
    marks: CallMarks | None = None
    is_opened: bool = False
    repeats: bool = True
    answer: AnswerSpec | None = None

    def text(self) -> str:
        """Write it as a spec's source."""
        return json.dumps(
            {
                "tools": self.tools,
                "marks": self.marks,
                "is_opened": self.is_opened,
                "repeats": self.repeats,
                "answer": self.answer,
            }
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Read what `text` has written."""
        fields = json.loads(text)
        return cls(
            tools=tuple(CallTool(*tool) for tool in fields["tools"]),
            marks=None if fields["marks"] is None else CallMarks(*fields["marks"]),
            is_opened=fields["is_opened"],
            repeats=fields["repeats"],
            answer=None if fields["answer"] is None else AnswerSpec(*fields["answer"]),
        )

    @cached_property
    def notation(self) -> Notation:
        """How arguments are spelled."""
        # Plain text is written again with one space.
        return (
            JsonNotation(spaces=1) if self.marks is None else MarkedNotation(self.marks.delimiter)
        )

    @property
    def opener(self) -> str:
        """What every call begins with."""
        return BLOCK_START if self.marks is None else self.marks.start

    @property
    def separator(self) -> str:
        """What stands between two calls."""
        return "\n" if self.marks is None else ""

    def head(self, name: str) -> bytes:
        """Return what is written before a tool's arguments."""
        if self.marks is not None:
            return f"call:{name}".encode()
        return b'{"name": ' + scalar_text(name) + b', "arguments": '

    @property
    def closer(self) -> str:
        """What is written behind the arguments."""
        return f"}}{BLOCK_END}" if self.marks is None else self.marks.end


class CallAutomata:
    """The automata of calls; what cannot be enforced is loosened where that may be."""

    def __init__(self, source: CallsSource) -> None:
        """Work out each tool's arguments.

        Raises:
            SchemaError: a schema that always has to hold cannot be enforced.
            NeedsStackError, AutomatonTooLargeError: one of those has no automaton.
        """
        self._source = source
        self._loose: Dfa | None = None
        self._known: dict[str, Dfa] = {}
        self._strict: dict[str, Dfa] = {}
        for index, tool in enumerate(source.tools):
            arguments = self._arguments(index, tool)
            if arguments is not None:
                self._strict[tool.name] = arguments

    @property
    def loosened(self) -> tuple[str, ...]:
        """Names of tools whose arguments were to fit, and are any object."""
        asked = (tool.name for tool in self._source.tools if tool.strictness != "never")
        return tuple(name for name in asked if name not in self._strict)

    @property
    def num_states(self) -> int:
        """States of all tools whose arguments fit their schemas."""
        return sum(dfa.num_states for dfa in self._strict.values())

    def loosen(self, max_states: int) -> bool:
        """Loosen the tools of the largest automata until no more states are left than that.

        Returns whether that helped; some may not be loosened.
        """
        own = [tool.name for tool in self._source.tools if tool.strictness == "if_possible"]
        sizes = {name: self._strict[name].num_states for name in own if name in self._strict}
        before = left = self.num_states
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if left <= max_states:
                break
            left -= sizes[name]
            del self._strict[name]
        return left < before

    def whole(self, answer: Dfa | None) -> Dfa:
        """Return the texts of all calls, or of an answer instead.

        Raises:
            AutomatonTooLargeError: there are too many states.
        """
        source = self._source
        nfa = Nfa()
        named, done, end = nfa.node(), nfa.node(), nfa.node()
        nfa.literal(0, b"" if source.is_opened else source.opener.encode(), named)
        by_arguments: dict[Dfa, list[bytes]] = {}
        for tool in source.tools:
            arguments = self._strict.get(tool.name) or self._any_object()
            by_arguments.setdefault(arguments, []).append(source.head(tool.name))
        for arguments, heads in by_arguments.items():
            before, after = nfa.node(), nfa.node()
            nfa.choices(named, heads, before)
            nfa.embed(before, arguments, after)
            nfa.literal(after, source.closer.encode(), done)
        nfa.skip(done, end)
        if source.repeats and not source.is_opened:
            nfa.literal(done, (source.separator + source.opener).encode(), named)
        if answer is not None:
            nfa.embed(0, answer, end)
        return nfa.determinize(end)

    def _arguments(self, index: int, tool: CallTool) -> Dfa | None:
        """Return what a tool may be given; None: any object."""
        if tool.strictness in ("given_up", "never"):
            return None
        try:
            with naming_tool(index, tool.name):
                return self._of_schema(json.dumps(tool.parameters))
        except (SchemaError, NeedsStackError, AutomatonTooLargeError):
            if tool.strictness == "always":
                raise
            return None

    def _of_schema(self, schema: str) -> Dfa:
        known = self._known.get(schema)
        if known is None:
            cases = Cases(Document(schema))
            known = JsonAutomata(cases, self._source.notation).objects(cases.key(SchemaAt("")))
            if known.is_empty:
                raise nothing_fits()
            self._known[schema] = known
        return known

    def _any_object(self) -> Dfa:
        return self._of_schema(json.dumps(ANY_OBJECT))


@contextmanager
def naming_tool(index: int, name: str) -> Iterator[None]:
    """Let errors of a tool's schema name the tool, and its place in the list of tools."""
    try:
        yield
    except SchemaError as error:
        fault = error.fault
        fault["message"] = f"tool {name!r}: {error.message}"
        fault["path"] = f"/{index}/function/parameters{error.path or ''}"
        raise SchemaError(**fault) from error

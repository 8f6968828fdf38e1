"""Gemma 4's turn, split by the ids of its markers: thoughts, content, calls.

Ids go in one at a time, so the events do not depend on how a step's ids were cut. What departs from
the syntax is put right where its meaning is plain (a missing opener, closer, delimiter or brace, a
namespace before a name, quotes of another kind) and counted; else it comes back as content, without
the markers. Nothing is dropped but markers, and nothing raises. One object per sequence.
"""

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto

from jaxserve.text.call_arguments import ArgumentsWriter
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.json_call import read_json_call
from jaxserve.text.markers import Markers
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.turns import (
    Content,
    OfferedTools,
    Thought,
    TurnEvent,
    TurnText,
    is_tool_name,
    resolve_name,
)

_LABEL = "thought\n"
_CALL = "call:"
# A call without its opening marker, or the beginning of one.
_LEAD = re.compile(r"\s*(?:c|ca|cal|call|call:\s*[\w.:/-]{0,128}\s*)?")
_LEAD_CALL = re.compile(r"\s*call:\s*([\w.:/-]+)\s*([{(])")
_CLOSERS = {"{": "}", "(": ")"}
# A longer head is no name.
_MAX_HEAD_CHARS = 256


class _Mode(Enum):
    """What the next text is."""

    START = auto()  # content, or a call without its marker
    CONTENT = auto()
    LABEL = auto()  # of a thought
    THOUGHT = auto()
    HEAD = auto()  # of a call, up to its opening brace
    JSON = auto()  # a call that is a JSON object, name and all
    ARGUMENTS = auto()
    TAIL = auto()  # of a call, between its last brace and its closing marker


class GemmaTurn:
    """The turn of one sequence; `tools` is None where a call may not be made."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: Markers,
        tools: OfferedTools | None,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self.num_thought_tokens = 0
        self.faults: list[str] = []
        self._tools = tools
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._turn = TurnText()
        self._text = ""  # held: a possible label, head or newline
        self._json: list[str] = []
        self._writer: ArgumentsWriter | None = None
        self._mode = self._resting
        self._on_marker: dict[int, Callable[[], None]] = {
            markers.thought_start: self._start_thought,
            markers.thought_end: self._end_thought,
            markers.call_start: self._start_call,
            markers.call_end: self._end_call,
            markers.response_start: self._start_response,
            markers.delimiter: self._delimit,
        }
        self._on_text: dict[_Mode, Callable[[str], None]] = {
            _Mode.START: self._push_start,
            _Mode.CONTENT: lambda text: self._turn.add(Content(text)),
            _Mode.LABEL: self._push_label,
            _Mode.THOUGHT: self._push_thought,
            _Mode.HEAD: self._push_head,
            _Mode.JSON: self._push_json,
            _Mode.ARGUMENTS: self._push_arguments,
            _Mode.TAIL: self._push_tail,
        }
        self._enter(tokenizer, markers, prompt_ids)

    def push(self, token_id: int) -> list[TurnEvent]:
        """Take one id; returns what it makes final."""
        was_thought = self._is_thought
        on_marker = self._on_marker.get(token_id)
        if on_marker is None:
            self._push_text(self._detokenizer.push((token_id,)))
        else:
            self._push_text(self._detokenizer.finish())
            on_marker()
        if was_thought or self._is_thought:
            self.num_thought_tokens += 1
        return self._turn.take()

    def finish(self, *, is_cut: bool) -> list[TurnEvent]:
        """Take the end; where it `is_cut`, a call under way stays incomplete."""
        self._push_text(self._detokenizer.finish())
        if is_cut and self._mode is _Mode.HEAD:
            self._give_back()
        elif is_cut and self._mode is _Mode.ARGUMENTS:
            return self._turn.take()
        elif not is_cut:
            self._note_open_call()
        self._leave()
        return self._turn.take()

    @property
    def _resting(self) -> _Mode:
        """How content begins."""
        return _Mode.CONTENT if self._tools is None else _Mode.START

    @property
    def _is_thought(self) -> bool:
        return self._mode in (_Mode.LABEL, _Mode.THOUGHT)

    @property
    def _is_call(self) -> bool:
        return self._mode in (_Mode.HEAD, _Mode.JSON, _Mode.ARGUMENTS, _Mode.TAIL)

    def _note_open_call(self) -> None:
        if self._mode in (_Mode.ARGUMENTS, _Mode.TAIL):
            self._fault("end_of_call")

    def _fault(self, name: str) -> None:
        self.faults.append(name)

    def _enter(self, tokenizer: Tokenizer, markers: Markers, prompt_ids: Sequence[int]) -> None:
        """Begin where the prompt ends: perhaps inside of a thought."""
        for at in range(len(prompt_ids) - 1, -1, -1):
            token_id = prompt_ids[at]
            if token_id == markers.thought_start:
                self._mode = _Mode.LABEL
                self._push_text(Detokenizer(tokenizer).push(prompt_ids[at + 1 :]))
                self._turn.take()
            if token_id in tokenizer.special_ids:
                return

    def _push_text(self, text: str) -> None:
        if text:
            self._on_text[self._mode](text)

    def _leave(self) -> None:
        """End what is under way, and go on to content."""
        mode, text, self._text = self._mode, self._text, ""
        if mode is _Mode.START:
            self._turn.add(Content(text))
        elif mode is _Mode.LABEL and text != _LABEL[: len(text)]:
            self._turn.add(Thought(text))
        elif mode is _Mode.HEAD:
            self._end_head(text)
        elif mode is _Mode.JSON:
            self._end_json()
        elif mode is _Mode.ARGUMENTS:
            self._end_arguments()
        elif mode is _Mode.TAIL:
            self._turn.end_call()
        self._mode = self._resting

    # Markers

    def _start_thought(self) -> None:
        self._note_open_call()
        self._leave()
        self._mode = _Mode.LABEL

    def _end_thought(self) -> None:
        if not self._is_thought:
            self._fault("stray_marker")
        if not self._is_call:
            self._leave()

    def _start_call(self) -> None:
        if self._is_thought:
            self._fault("end_of_thought")
        self._note_open_call()
        self._leave()
        if self._tools is None:
            self._fault("no_tools")
        else:
            self._mode = _Mode.HEAD

    def _end_call(self) -> None:
        if self._is_call:
            self._leave()
        elif self._tools is not None:
            self._fault("stray_marker")

    def _start_response(self) -> None:
        """Nothing: the sequence ends with it, and what a model made up behind it is content."""

    def _delimit(self) -> None:
        if self._mode is _Mode.ARGUMENTS and self._writer is not None:
            self._turn.add_arguments(self._writer.delimit())
        elif self._mode is _Mode.HEAD:
            self._fault("name")
        elif self._mode is not _Mode.TAIL:
            # A string that is in no call: what its delimiter stands for.
            self._push_text('"')

    # Thoughts

    def _push_label(self, text: str) -> None:
        self._text += text
        if self._text.startswith(_LABEL):
            text, self._text = self._text[len(_LABEL) :], ""
        elif _LABEL.startswith(self._text):
            return
        else:
            text, self._text = self._text, ""
        self._mode = _Mode.THOUGHT
        self._push_text(text)

    def _push_thought(self, text: str) -> None:
        """Tell all but a newline at the end, which belongs to the closing marker."""
        text = self._text + text
        self._text = "\n" if text.endswith("\n") else ""
        self._turn.add(Thought(text.removesuffix("\n")))

    # Calls

    def _push_start(self, text: str) -> None:
        self._text += text
        call = _LEAD_CALL.match(self._text)
        if call is not None and resolve_name(call[1], self._tools or {}) is not None:
            self._fault("start_of_call")
            self._mode = _Mode.HEAD
            text, self._text = self._text, ""
            self._push_text(text)
        elif (
            call is not None
            or len(self._text) > _MAX_HEAD_CHARS
            or _LEAD.fullmatch(self._text) is None
        ):
            self._leave()
            self._mode = _Mode.CONTENT

    def _push_head(self, text: str) -> None:
        self._text += text
        brace = re.search(r"[{(]", self._text)
        if brace is None:
            if len(self._text) > _MAX_HEAD_CHARS:
                self._give_back()
            return
        head, rest = self._text[: brace.start()], self._text[brace.end() :]
        if not head.strip() and brace[0] == "{":
            self._json, self._text = [self._text], ""
            self._mode = _Mode.JSON
        elif (name := self._read_name(head)) is not None:
            self._text = ""
            if brace[0] == "(":
                self._fault("brackets")
            self._begin(name, _CLOSERS[brace[0]])
            self._push_text(rest)
        else:
            self._give_back()

    def _read_name(self, head: str) -> str | None:
        """Return the name in a call's head; without `call:` it has to be an offered one."""
        name = head.strip()
        has_label = name.startswith(_CALL)
        if has_label:
            name = name.removeprefix(_CALL).strip()
        offered = resolve_name(name, self._tools or {})
        if offered is None:
            return name if has_label and is_tool_name(name) else None
        if offered != name:
            self._fault("name")
        if not has_label:
            self._fault("label_of_call")
        return offered

    def _begin(self, name: str, closer: str) -> None:
        self._writer = ArgumentsWriter((self._tools or {}).get(name, {}), closer=closer)
        self._turn.start_call(name)
        self._mode = _Mode.ARGUMENTS
        self._turn.add_arguments(self._writer.push(""))

    def _give_back(self) -> None:
        """Give a head that is none back as content."""
        self._fault("not_a_call")
        text, self._text = self._text, ""
        self._turn.add(Content(text))
        self._mode = _Mode.CONTENT

    def _end_head(self, text: str) -> None:
        name = self._read_name(text)
        if name is None:
            self._fault("not_a_call")
            self._turn.add(Content(text))
            return
        self._fault("arguments")
        self._begin(name, "}")
        self._end_arguments()

    def _push_json(self, text: str) -> None:
        self._json.append(text)

    def _end_json(self) -> None:
        text = "".join(self._json)
        call = read_json_call(text, self._tools or {})
        if call is None:
            self._fault("not_a_call")
            self._turn.add(Content(text))
            return
        self.faults += ["json", *call.repairs]
        self._turn.start_call(resolve_name(call.name, self._tools or {}) or call.name)
        self._turn.add_arguments(call.arguments)
        self._turn.end_call()

    def _push_arguments(self, text: str) -> None:
        writer = self._writer
        if writer is None:
            return
        self._turn.add_arguments(writer.push(text))
        if writer.is_done:
            self._mode = _Mode.TAIL
            self.faults += writer.repairs
            self._writer = None
            self._push_text(writer.rest)

    def _push_tail(self, text: str) -> None:
        """Drop what closes nothing; anything else is content behind the call."""
        rest = text.lstrip()
        while rest[:1] in ("}", ")", "]"):
            self._fault("closer")
            rest = rest[1:].lstrip()
        if rest:
            self._fault("end_of_call")
            self._leave()
            self._push_text(rest)

    def _end_arguments(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._turn.add_arguments(writer.close())
            self.faults += writer.repairs
        self._turn.end_call()

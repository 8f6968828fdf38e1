"""A turn of a model that has no markers of its own for calls: each is JSON in a fenced block.

    ```tool_call
    {"name": "set_lamp", "arguments": {"room": "attic"}}
    ```

What surrounds the blocks is content. A block that is no call comes back as content, as it was.
"""

import re
from enum import Enum, auto

from jaxserve.text.call_arguments import ArgumentsWriter
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.json_call import read_json_call
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.turns import Content, OfferedTools, TurnEvent, TurnText, resolve_name

CALL_FENCE = "```tool_call"
FENCE_END = "```"

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL
)
# A head that is longer comes in another order of keys: such a block is read as a whole.
_MAX_HEAD_CHARS = 300
_TAIL = re.compile(r"\s*(\}?)\s*(`{0,3})")


class _Mode(Enum):
    CONTENT = auto()
    BLOCK = auto()  # of a call, up to its arguments
    ARGUMENTS = auto()
    TAIL = auto()  # between the arguments and the end of the block
    AFTER = auto()  # the white space behind a block


class JsonTurn:
    """The turn of one sequence."""

    num_thought_tokens = 0

    def __init__(
        self, tokenizer: Tokenizer, tools: OfferedTools, *, skip_special_tokens: bool = True
    ) -> None:
        self.faults: list[str] = []
        self._tools = tools
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._turn = TurnText()
        self._mode = _Mode.CONTENT
        self._text = ""  # held: what may be a fence
        self._block: list[str] = []
        self._writer: ArgumentsWriter | None = None
        self._on_text = {
            _Mode.CONTENT: self._push_content,
            _Mode.BLOCK: self._push_block,
            _Mode.ARGUMENTS: self._push_arguments,
            _Mode.TAIL: self._push_tail,
            _Mode.AFTER: self._push_after,
        }

    def push(self, token_id: int) -> list[TurnEvent]:
        """Take one id; returns what it makes final."""
        self._push_text(self._detokenizer.push((token_id,)))
        return self._turn.take()

    def finish(self, *, is_cut: bool) -> list[TurnEvent]:
        """Take the end; where it `is_cut`, a call under way stays incomplete."""
        self._push_text(self._detokenizer.finish())
        if self._mode is _Mode.CONTENT:
            self._turn.add(Content(self._text))
        elif self._mode is _Mode.BLOCK:
            self._block.append(self._text)
            self._end_block("", is_cut=is_cut)
        elif self._mode is _Mode.ARGUMENTS and not is_cut and self._writer is not None:
            self._turn.add_arguments(self._writer.close())
            self.faults += [*self._writer.repairs, "end_of_call"]
            self._turn.end_call()
        elif self._mode is _Mode.TAIL:
            self._turn.end_call()
        return self._turn.take()

    def _push_text(self, text: str) -> None:
        if text:
            self._on_text[self._mode](text)

    def _push_content(self, text: str) -> None:
        before, found, after = self._until(CALL_FENCE, text)
        self._turn.add(Content(before))
        if found:
            self._mode = _Mode.BLOCK
            self._block = []
            self._push_text(after)

    def _until(self, mark: str, text: str) -> tuple[str, bool, str]:
        """Split what is held and `text` at a mark; hold back what may be its beginning."""
        text = self._text + text
        self._text = ""
        before, found, after = text.partition(mark)
        if found:
            return before, True, after
        for length in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:length]):
                self._text = text[-length:]
                return text[:-length], False, ""
        return text, False, ""

    def _push_block(self, text: str) -> None:
        before, found, after = self._until(FENCE_END, text)
        self._block.append(before)
        if sum(map(len, self._block)) < _MAX_HEAD_CHARS or len(self._block) == 1:
            block = "".join(self._block)
            head = _HEAD.match(block)
            if head is not None:
                rest = block[head.end() :] + self._text + (FENCE_END + after if found else "")
                self._text = ""
                self._begin(head[1])
                self._push_text(rest)
                return
        if found:
            self._end_block(FENCE_END, is_cut=False)
            self._push_text(after)

    def _begin(self, name: str) -> None:
        name = self._resolved(name)
        self._writer = ArgumentsWriter(self._tools.get(name, {}), has_json_strings=True)
        self._turn.start_call(name)
        self._turn.add_arguments(self._writer.push(""))
        self._mode = _Mode.ARGUMENTS

    def _resolved(self, name: str) -> str:
        tool = resolve_name(name, self._tools)
        if tool is not None and tool != name:
            self.faults.append("name")
        return tool or name

    def _end_block(self, fence: str, *, is_cut: bool) -> None:
        """Read a whole block as a call, or give it back."""
        block = "".join(self._block)
        call = None if is_cut else read_json_call(block, self._tools)
        self._text = ""
        if call is None:
            self.faults.append("not_a_call")
            self._turn.add(Content(CALL_FENCE + block + fence))
            self._mode = _Mode.CONTENT
            return
        if not fence:
            self.faults.append("end_of_call")
        self.faults += call.repairs
        self._turn.start_call(self._resolved(call.name))
        self._turn.add_arguments(call.arguments)
        self._turn.end_call()
        self._mode = _Mode.AFTER

    def _push_arguments(self, text: str) -> None:
        writer = self._writer
        if writer is None:
            return
        self._turn.add_arguments(writer.push(text))
        if writer.is_done:
            self.faults += writer.repairs
            self._writer = None
            self._mode = _Mode.TAIL
            self._push_text(writer.rest)

    def _push_tail(self, text: str) -> None:
        """Take the call's brace and the block's fence; anything else ends it as well."""
        self._text += text
        tail = _TAIL.match(self._text)
        if tail is None or (tail.end() == len(self._text) and tail[2] != FENCE_END):
            return
        is_closed = tail[2] == FENCE_END
        if not is_closed:
            self.faults.append("end_of_call")
        rest, self._text = self._text[tail.end() if is_closed else tail.end(1) :], ""
        self._turn.end_call()
        self._mode = _Mode.AFTER
        self._push_text(rest)

    def _push_after(self, text: str) -> None:
        text = text.lstrip()
        if text:
            self._mode = _Mode.CONTENT
            self._push_text(text)

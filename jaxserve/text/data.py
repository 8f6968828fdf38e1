"""Rendering and tokenizing so that data stays data: no message, result or argument is control.

A template writes control tokens and data into one text. Where some data spells a control token, or
a part of one at its end, that a neighbour could complete, the characters by which such spellings
begin are replaced in all data before rendering. What the tokenizer then finds to be control is the
template's own; the characters come back behind that. Data without any such spelling, the usual
case, is rendered as it is. Pure.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.text.tokenizer import Tokenizer

Render = Callable[[Any], str]
"""From the data, in whatever containers, to the text."""

# Where stand-ins are taken from: characters for private use, which templates have no use for.
_PRIVATE = range(0xE000, 0xF900)
_USED = re.compile("[\ue000-\uf8ff]|\\\\u([ef][0-9a-f]{3})")


def render_data(
    data: Any, render: Render, tokenizer: Tokenizer, check: Callable[[str], object]
) -> tuple[str, list[int]]:
    """Return the text that `render` makes of the data, and its ids, which begin with a BOS.

    `check` gets the text before it is tokenized, and may refuse it.

    Raises:
        InvalidRequestError: the data leaves no character to stand in for another.
    """
    strings = list(_strings(data))
    if not _may_spell_control(strings, tokenizer):
        text = render(data)
        check(text)
        return text, tokenizer.encode(text, add_special_tokens=True)
    hidden = _stand_ins(strings, tokenizer)
    text = render(_translated(data, str.maketrans(hidden)))
    # A template may have written them as JSON does that knows ASCII only.
    for stand_in in hidden.values():
        text = text.replace(_escape(stand_in), stand_in)
    shown = {ord(stand_in): original for original, stand_in in hidden.items()}
    shown_text = text.translate(shown)
    check(shown_text)
    return shown_text, tokenizer.encode(text, add_special_tokens=True, stand_ins=shown)


def _may_spell_control(strings: Sequence[str], tokenizer: Tokenizer) -> bool:
    beginnings = tokenizer.control_beginnings
    longest = max(map(len, beginnings), default=0)
    for string in strings:
        # Templates strip what they join.
        end = string.rstrip()[-longest:]
        if any(end[at:] in beginnings for at in range(len(end))):
            return True
        if tokenizer.controls.search(string):
            return True
    return False


def _stand_ins(strings: Sequence[str], tokenizer: Tokenizer) -> dict[str, str]:
    """Choose for each first character of a control token one that occurs nowhere."""
    firsts = sorted({beginning[0] for beginning in tokenizer.control_beginnings})
    used = {
        int(found[1], 16) if found[1] else ord(found[0])
        for string in strings
        for found in _USED.finditer(string)
    }
    free = (chr(code) for code in _PRIVATE if code not in used)
    hidden = dict(zip(firsts, free, strict=False))
    if len(hidden) < len(firsts):
        raise InvalidRequestError(
            "the messages hold every character for private use, which leaves none to work with",
            param="messages",
        )
    return hidden


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield str(key)
            yield from _strings(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _strings(value)


def _translated(data: Any, table: Mapping[int, str]) -> Any:
    if isinstance(data, str):
        return data.translate(table)
    if isinstance(data, Mapping):
        return {_translated(key, table): _translated(v, table) for key, v in data.items()}
    if isinstance(data, list | tuple):
        return [_translated(value, table) for value in data]
    return data

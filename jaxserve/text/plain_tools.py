"""Tools for a checkpoint whose template knows none: told, called and answered in plain text.

The syntax is JSON in fenced blocks; a turn in it is read by `json_turn`. Messages go in and come
out as templates take them. What would be a turn of the operator's or of a tool goes into a turn of
the user's, for these formats have two roles, which take turns.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.text.json_turn import CALL_FENCE, FENCE_END

RESULT_FENCE = "```tool_result"

_INTRODUCTION = f"""You can call tools. To call one, write such a block, and another for each \
further call, and end your turn:

{CALL_FENCE}
{{"name": "NAME", "arguments": {{}}}}
{FENCE_END}

The next turn begins with a block {RESULT_FENCE} for each call. The tools, with the JSON Schemas \
of their arguments:
"""

_Message = Mapping[str, Any]


def in_plain_text(
    messages: Sequence[_Message], tools: Sequence[Mapping[str, Any]]
) -> Sequence[_Message]:
    """Return the messages with tools, calls and results as text of system, user and assistant."""
    num_first = 0
    while num_first < len(messages) and messages[num_first]["role"] == "system":
        num_first += 1
    first, others = messages[:num_first], messages[num_first:]
    if not tools and not any(_is_foreign(message) for message in others):
        return messages
    plain: list[dict[str, Any]] = []
    system = [_text(message) for message in first]
    if tools:
        system.append(_INTRODUCTION + "\n".join(map(_json, tools)))
    if system:
        plain.append({"role": "system", "content": "\n\n".join(system)})
    names: dict[str, str] = {}
    was_foreign = False
    for message in others:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        role = "assistant" if message["role"] == "assistant" else "user"
        is_foreign = _is_foreign(message)
        text = _plain(message, names)
        # Two messages that the user sent stay two.
        joins = role == "user" and (is_foreign or was_foreign)
        if joins and plain and plain[-1]["role"] == "user":
            plain[-1]["content"] += f"\n\n{text}"
        else:
            plain.append({"role": role, "content": text})
        was_foreign = is_foreign
    return plain


def _is_foreign(message: _Message) -> bool:
    """Tell whether a message, not one of the first, is none that every template knows."""
    return message["role"] in ("system", "tool") or "tool_calls" in message


def _plain(message: _Message, names: Mapping[str, str]) -> str:
    text = _text(message)
    if message["role"] == "tool":
        result = {"name": names.get(message["tool_call_id"]), "content": text}
        return f"{RESULT_FENCE}\n{_json(result)}\n{FENCE_END}"
    blocks = [
        f"{CALL_FENCE}\n{_json(call['function'])}\n{FENCE_END}"
        for call in message.get("tool_calls", ())
    ]
    # A model that ended its line before a block gets its own words back.
    separator = "" if not text or text.endswith("\n") or not blocks else "\n"
    return text + separator + "\n".join(blocks)


def _text(message: _Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def _json(value: object) -> str:
    """Write JSON on one line; numbers stay as the client spelled them."""
    if isinstance(value, Mapping):
        entries = (f"{_json(str(key))}: {_json(entry)}" for key, entry in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_json, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)

"""A call that is one JSON object with its tool's name and arguments."""

import json
from typing import Any, NamedTuple

from jaxserve.text.call_arguments import ArgumentsWriter
from jaxserve.text.turns import OfferedTools, resolve_name

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


class JsonCall(NamedTuple):
    """A tool's name, and its arguments as JSON text.

    Attributes:
        repairs: names of what was put right in the arguments.
    """

    name: str
    arguments: str
    repairs: tuple[str, ...]


def read_json_call(text: str, tools: OfferedTools) -> JsonCall | None:
    """Read a whole call; None: it is none. Its name is as the model wrote it.

    Numbers stay as they are spelled, and what is no JSON (NaN, half a surrogate pair) becomes some.
    """
    try:
        if not isinstance(json.loads(text), dict):
            return None
        call = _members(text)
        if call.get("function", "").startswith("{"):
            call = _members(call["function"])
        name: Any = json.loads(call.get("name", "null"))
        arguments = call.get("arguments", call.get("parameters", "{}"))
        if arguments.startswith('"'):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(json.loads(arguments), dict):
            return None
    except (ValueError, RecursionError):
        return None
    types = tools.get(resolve_name(name, tools) or name, {})
    writer = ArgumentsWriter(types, has_json_strings=True)
    written = writer.push(arguments.strip()[1:]) + writer.close()
    return JsonCall(name, written, tuple(writer.repairs))


def _members(text: str) -> dict[str, str]:
    """Split the text of a JSON object into its keys and the texts of their values."""
    members: dict[str, str] = {}
    at = _past(text, text.index("{") + 1, _SPACE)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _past(text, at, _SPACE + ":")
        _, end = _DECODER.raw_decode(text, start)
        members[key] = text[start:end]
        at = _past(text, end, _SPACE + ",")
    return members


def _past(text: str, at: int, characters: str) -> int:
    """Return the first position from `at` on that holds none of these characters."""
    while text[at] in characters:
        at += 1
    return at

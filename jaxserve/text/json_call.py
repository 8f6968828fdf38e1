"""A call that is one JSON object with its tool's name and arguments."""

import json
from typing import Any


def read_json_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON text, of a whole call; None: it is none."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    if isinstance(function, dict):
        call = function
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))

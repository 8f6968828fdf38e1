"""Calls and their results in the messages of a request.

Arguments are read exactly: whole numbers of any size and the spelling of all others survive, so
that the next prompt spells them as the model did.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.fields import Field, Object, Values, read_object, table
from jaxserve.openai.json_body import repair_surrogates
from jaxserve.openai.readers import Anything, Inert, Integer, ListOf, Mapped, OneOf, Schema, Text
from jaxserve.openai.tools import ToolName

# Of one message.
MAX_CALLS = 128
MAX_ID_CHARS = 256


class ExactFloat(float):
    """A number that is written as it was read."""

    _text: str

    def __new__(cls, text: str) -> "ExactFloat":
        """Read a JSON number."""
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __str__(self) -> str:
        """Return what was read."""
        return self._text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments: Mapping[str, object] = field(hash=False)

    def for_template(self) -> dict[str, object]:
        """Give the call as chat templates expect it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def decode_arguments(text: str) -> object:
    """Decode JSON exactly, but for unpaired surrogates, which become U+FFFD; raises ValueError."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    repaired = repair_surrogates(text.encode())
    try:
        return json.loads(repaired, parse_float=ExactFloat, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def keep_exact_arguments(body: object, source: bytes) -> None:
    """Put exact arguments in place of those that `body`, decoded from `source`, has as objects.

    The usual decoder gives a number that is no 64-bit integer as a float.
    """
    objects = _arguments_objects(body)
    if not any(_has_float(function["arguments"]) for function in objects):
        return
    try:
        exact = decode_arguments(source.decode())
    except ValueError:
        return  # what the other decoder took is good enough
    for function, other in zip(objects, _arguments_objects(exact), strict=True):
        function["arguments"] = other["arguments"]


def _has_float(value: Any) -> bool:
    """Tell whether there is a float in a JSON value, however deep."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, float):
            return True
        if isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)
    return False


def _arguments_objects(body: Any) -> list[dict[str, Any]]:
    """Return the functions of all calls whose arguments are an object."""
    found = []
    for message in _list(body, "messages"):
        for call in _list(message, "tool_calls"):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                found.append(function)
    return found


def _list(value: Any, key: str) -> list[Any]:
    entries = value.get(key) if isinstance(value, dict) else None
    return entries if isinstance(entries, list) else []


class _Arguments:
    """An object, as such or as JSON text; an empty text stands for an empty object."""

    def __call__(self, value: object, path: str) -> Mapping[str, object]:
        if isinstance(value, str):
            try:
                value = decode_arguments(value) if value.strip() else {}
            except ValueError as error:
                raise InvalidRequestError(f"{path} is not JSON: {error}", param=path) from error
        return Mapped()(value, path)

    def schema(self) -> Schema:
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}


class _ToolCall:
    """One call of an assistant's message."""

    def __call__(self, value: object, path: str) -> ToolCall:
        call = read_object(value, path, _CALL_FIELDS)
        function = call[_FUNCTION]
        return ToolCall(id=call[_ID], name=function[_NAME], arguments=function[_ARGUMENTS])

    def schema(self) -> Schema:
        return Object(_CALL_FIELDS).schema()


CALL_ID = Text(1, MAX_ID_CHARS)
_ID = Field("id", CALL_ID, "", required=True)
_NAME = Field("name", ToolName(), "", required=True)
_ARGUMENTS: Field[Mapping[str, object]] = Field("arguments", _Arguments(), {})
# Clients send back their own reading of what they were told beside it.
_PARSED = Field("parsed_arguments", Inert(Anything()), None)
_FUNCTION: Field[Values] = Field(
    "function", Object(table((_NAME, _ARGUMENTS, _PARSED))), Values({}), required=True
)
_CALL_FIELDS = table(
    (
        _ID,
        Field("type", OneOf(("function",)), "function"),
        _FUNCTION,
        Field("index", Inert(Integer(0, 1 << 31)), None),
    )
)
TOOL_CALLS: Field[tuple[ToolCall, ...]] = Field(
    "tool_calls", ListOf(_ToolCall(), max_items=MAX_CALLS), ()
)


class HistoryMessage(Protocol):
    """What pairing calls and results needs of a message."""

    @property
    def role(self) -> str: ...

    @property
    def calls(self) -> tuple[ToolCall, ...]: ...

    @property
    def call_id(self) -> str | None: ...


M = TypeVar("M", bound=HistoryMessage)


def pair_results(messages: Sequence[M], path: str) -> tuple[M, ...]:
    """Return the messages with the results of each message's calls in the order of the calls.

    Raises:
        InvalidRequestError: a result belongs to no call before it, or a call has not one result.
    """
    paired: list[M] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        if message.role == "tool":
            _refuse(f"{path}[{at}]", "the result of a call, but no message with calls is before it")
        end = at + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        paired += [message, *_in_order(message, messages[at + 1 : end], at, path)]
        at = end
    return tuple(paired)


def _in_order(message: M, results: Sequence[M], at: int, path: str) -> list[M]:
    ids = [call.id for call in message.calls]
    for j, call_id in enumerate(ids):
        if call_id in ids[:j]:
            _refuse(f"{path}[{at}].tool_calls[{j}].id", f"{call_id!r} for a second time")
    by_id: dict[str, M] = {}
    for i, result in enumerate(results, at + 1):
        where = f"{path}[{i}].tool_call_id"
        if result.call_id not in ids:
            _refuse(where, f"{result.call_id!r}, which is none of the calls before it: {ids}")
        if result.call_id in by_id:
            _refuse(where, f"{result.call_id!r}, a call that has its result already")
        by_id[str(result.call_id)] = result
    for j, call_id in enumerate(ids):
        if call_id not in by_id:
            _refuse(f"{path}[{at}].tool_calls[{j}]", f"{call_id!r}, to which no result follows")
    return [by_id[call_id] for call_id in ids]


def _refuse(where: str, what: str) -> NoReturn:
    raise InvalidRequestError(f"{where} is {what}", param=where)

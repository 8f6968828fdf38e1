"""Tools that a chat request offers, and what it says of their use."""

# ruff: noqa: D102 - what a reader reads is its class's docstring

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.fields import Field, Object, Values, read_object, table
from jaxserve.openai.readers import Boolean, Integer, ListOf, Mapped, OneOf, Schema, Text

# OpenAI's limit.
MAX_TOOLS = 128
MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.:/-]{{0,{MAX_NAME_CHARS - 1}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON Schema of its arguments.
        is_strict: whether they have to fit it; None: the request does not say.
        path: of the schema in the request.
    """

    name: str
    description: str
    parameters: Mapping[str, object] = field(hash=False)
    is_strict: bool | None
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether a call may or must be made; `name` is set where it must be one tool's."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


class ToolName:
    """A function's name."""

    def __call__(self, value: object, path: str) -> str:
        name = Text(1, MAX_NAME_CHARS)(value, path)
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{path} must hold only letters, digits, _ and -, and behind these also . : /",
                param=path,
            )
        return name

    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{_NAME.pattern}$"}


class _Tool:
    """One tool."""

    def __call__(self, value: object, path: str) -> Tool:
        function = read_object(value, path, _TOOL_FIELDS)[_FUNCTION]
        return Tool(
            name=function[_NAME_FIELD],
            description=function[_DESCRIPTION],
            parameters=function[_PARAMETERS],
            is_strict=function[_STRICT],
            path=f"{path}.{_FUNCTION.name}.{_PARAMETERS.name}",
        )

    def schema(self) -> Schema:
        return Object(_TOOL_FIELDS).schema()


class _Tools:
    """All tools; each has a name of its own."""

    _read = ListOf(_Tool(), max_items=MAX_TOOLS)

    def __call__(self, value: object, path: str) -> tuple[Tool, ...]:
        tools = self._read(value, path)
        seen: set[str] = set()
        for i, tool in enumerate(tools):
            if tool.name in seen:
                where = f"{path}[{i}].function.name"
                raise InvalidRequestError(f"{where} {tool.name!r} is there twice", param=where)
            seen.add(tool.name)
        return tools

    def schema(self) -> Schema:
        return self._read.schema()


class _ToolChoice:
    """A mode, or an object with the function that has to be called."""

    def __call__(self, value: object, path: str) -> ToolChoice:
        if isinstance(value, dict):
            function = read_object(value, path, _CHOICE_FIELDS)[_CHOSEN]
            return ToolChoice(mode="required", name=function[_NAME_FIELD])
        mode = _MODE(value, path)
        return ToolChoice(
            mode="none" if mode == "none" else "auto" if mode == "auto" else "required"
        )

    def schema(self) -> Schema:
        return {"anyOf": [_MODE.schema(), Object(_CHOICE_FIELDS).schema()]}


_MODE = OneOf(("none", "auto", "required"))
_TYPE = Field("type", OneOf(("function",)), "function")
_NAME_FIELD = Field("name", ToolName(), "", required=True)
_DESCRIPTION = Field("description", Text(), "")
_PARAMETERS: Field[Mapping[str, object]] = Field("parameters", Mapped(), {})
_STRICT: Field[bool | None] = Field(
    "strict", Boolean(), None, "whether arguments have to fit the schema; default: a flag's"
)
_FUNCTION: Field[Values] = Field(
    "function",
    Object(table((_NAME_FIELD, _DESCRIPTION, _PARAMETERS, _STRICT))),
    Values({}),
    required=True,
)
_TOOL_FIELDS = table((_TYPE, _FUNCTION))
_CHOSEN: Field[Values] = Field("function", Object(table((_NAME_FIELD,))), Values({}), required=True)
_CHOICE_FIELDS = table((_TYPE, _CHOSEN))

TOOLS: Field[tuple[Tool, ...]] = Field("tools", _Tools(), (), "functions that the model may call")
_CHOICE: Field[ToolChoice | None] = Field(
    "tool_choice",
    _ToolChoice(),
    None,
    "auto: the model may call tools; none: it may not; required: it calls one or more of them; a"
    " function: it calls that one",
)
_PARALLEL = Field(
    "parallel_tool_calls", Boolean(), True, "false: the answer ends with its first call"
)
_MAX_CALLS: Field[int | None] = Field(
    "max_tool_calls", Integer(1, MAX_TOOLS), None, "the answer ends after so many calls"
)
CHOICE_FIELDS = (_CHOICE, _PARALLEL, _MAX_CALLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How an answer may use tools.

    Attributes:
        offered: what may be called; empty: nothing.
        must_call: one of these has to be called.
        is_named: the request says which one.
        is_banned: there are tools, but none may be called.
        max_calls: the answer ends after so many calls; None: no limit.
        tells_limit: the answer says so where that ended it.
    """

    offered: tuple[Tool, ...] = ()
    must_call: bool = False
    is_named: bool = False
    is_banned: bool = False
    max_calls: int | None = None
    tells_limit: bool = False


def read_tool_use(values: Values) -> ToolUse:
    """Take the use of tools out of what a table with TOOLS and CHOICE_FIELDS read."""
    tools, choice = values[TOOLS], values[_CHOICE] or ToolChoice(mode="auto")
    if choice.mode == "required":
        _check_forced(choice, tools)
    if not tools or choice.mode == "none":
        return ToolUse(is_banned=bool(tools))
    max_calls = values[_MAX_CALLS]
    is_single = not values[_PARALLEL]
    return ToolUse(
        offered=tuple(tool for tool in tools if choice.name in (None, tool.name)),
        must_call=choice.mode == "required",
        is_named=choice.name is not None,
        max_calls=1 if is_single else max_calls,
        tells_limit=max_calls is not None and not is_single,
    )


def _check_forced(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    if not tools:
        raise InvalidRequestError(
            "tool_choice asks for a call, but tools is empty", param="tool_choice"
        )
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError(
            f"tool_choice names {choice.name!r}, which is none of tools", param="tool_choice"
        )

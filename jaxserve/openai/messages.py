"""Chat messages, and what a request says of how they become a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.fields import Field, FieldTable, Object, Values, read_object, table
from jaxserve.openai.readers import Anything, Boolean, Inert, ListOf, Mapped, Neutral, OneOf, Text
from jaxserve.openai.tool_calls import CALL_ID, TOOL_CALLS, ToolCall, pair_results
from jaxserve.openai.tools import TOOLS, Tool

# More keep the event loop from everybody's streams.
MAX_MESSAGES = 8192
"""Messages of one request, their parts and their calls, together."""

MAX_TEMPLATE_CHARS = 1 << 17

THINKING = "enable_thinking"
"""The template's variable by which a model thinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message.

    Attributes:
        content: the text, or the texts of its parts where the client sent parts.
        reasoning: the thought that led to it.
        calls: those that the model made; their results follow.
        call_id: the call whose result it is; None: it is no result.
    """

    role: str
    content: str | tuple[str, ...]
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None

    def for_template(self) -> dict[str, object]:
        """Give the message as chat templates expect it."""
        message: dict[str, object] = {"role": self.role, "content": self.content}
        if not isinstance(self.content, str):
            message["content"] = [{"type": "text", "text": text} for text in self.content]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        return message

    @property
    def num_parts(self) -> int:
        """Count its parts; a plain text is one."""
        return 1 if isinstance(self.content, str) else len(self.content)

    @property
    def text(self) -> str:
        """All of the text."""
        return self.content if isinstance(self.content, str) else "".join(self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt in form of messages; `messages` is not empty.

    Attributes:
        add_generation_prompt: open the model's turn behind the messages.
        continue_final_message: leave the last message open instead, to be continued.
        chat_template: a Jinja template in place of the model's own.
        template_kwargs: further variables of the template.
        tools: what the prompt says that the model may call.
        thinks: whether the model is to think; None: as the template has it.
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    template_kwargs: Mapping[str, object]
    tools: tuple[Tool, ...]
    thinks: bool | None

    @property
    def is_thinking(self) -> bool:
        """Whether it asks the model to think; a template may do so by itself."""
        return self.thinks or bool(self.template_kwargs.get(THINKING))

    @property
    def takes_long(self) -> bool:
        """Whether the length of its text does not tell how long rendering may take."""
        return bool(
            # A program, or its variables.
            self.chat_template is not None
            or self.template_kwargs
            or self.tools
            or any(message.calls for message in self.messages)
        )


class _Part:
    """A part of a message: a text, or the text of a refusal."""

    def __call__(self, value: object, path: str) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "refusal":
            return read_object(value, path, _REFUSAL_FIELDS)[_PART_REFUSAL]
        if isinstance(kind, str) and kind != "text":
            raise InvalidRequestError(
                f"{path}.type must be text or refusal, not {kind[:60]!r}: this server reads no"
                " images, sounds or files",
                param=f"{path}.type",
            )
        return read_object(value, path, _PART_FIELDS)[_PART_TEXT]

    def schema(self) -> dict[str, object]:
        return {"anyOf": [Object(_PART_FIELDS).schema(), Object(_REFUSAL_FIELDS).schema()]}


class _Content:
    """A string, or a list of parts with text."""

    _parts = ListOf(_Part(), max_items=MAX_MESSAGES)

    def __call__(self, value: object, path: str) -> str | tuple[str, ...]:
        if isinstance(value, list):
            # No parts are no text, as null is.
            return self._parts(value, path) or ""
        return Text()(value, path)

    def schema(self) -> dict[str, object]:
        return {"anyOf": [{"type": "string"}, self._parts.schema()]}


class _Message:
    """One message; what it may hold depends on its role."""

    def __call__(self, value: object, path: str) -> Message:
        role = value.get("role") if isinstance(value, dict) else None
        fields = _FIELDS_OF["user" if role is None else _ROLE(role, f"{path}.role")]
        message = read_object(value, path, fields)
        content = message[_CONTENT]
        if refusal := message[_REFUSAL]:
            parts = (content,) if isinstance(content, str) else content
            content = (*parts, refusal) if any(parts) else refusal
        return Message(
            # Templates know one role for what the operator says.
            role="system" if role == "developer" else str(role),
            content=content,
            reasoning=message[_REASONING_CONTENT] or message[_REASONING] or "",
            # An empty list is taken from every role, and reads as none.
            calls=message[TOOL_CALLS] or (),
            call_id=message[_CALL_ID],
        )

    def schema(self) -> dict[str, object]:
        kinds = ("user", "assistant", "tool")
        return {"anyOf": [Object(_FIELDS_OF[kind]).schema() for kind in kinds]}


class _Messages:
    """All messages; they, their parts and their calls are counted before any is read."""

    _list = ListOf(_Message(), min_items=1, max_items=MAX_MESSAGES)

    def __call__(self, value: object, path: str) -> tuple[Message, ...]:
        if isinstance(value, list) and len(value) <= MAX_MESSAGES:
            messages = [message for message in value if isinstance(message, dict)]
            lists = [message.get(key) for message in messages for key in ("content", "tool_calls")]
            count = len(value) + sum(len(each) for each in lists if isinstance(each, list))
            if count > MAX_MESSAGES:
                raise InvalidRequestError(
                    f"{path} holds {count} messages, parts and calls; at most {MAX_MESSAGES} are"
                    " read.",
                    param=path,
                )
        return self._list(value, path)

    def schema(self) -> dict[str, object]:
        return self._list.schema()


class _TemplateVariables:
    """An object of variables, none of which may stand for what the server sets."""

    def __call__(self, value: object, path: str) -> Mapping[str, object]:
        variables = Mapped()(value, path)
        special = {name for name in variables if name.endswith("_token")}
        for name in sorted(special | _RESERVED_VARIABLES.intersection(variables)):
            raise InvalidRequestError(
                f"{path}.{name} cannot be set here: the server sets it.",
                param=f"{path}.{name}",
            )
        return variables

    def schema(self) -> dict[str, object]:
        reserved = [{"enum": sorted(_RESERVED_VARIABLES)}, {"pattern": "_token$"}]
        return {**Mapped().schema(), "propertyNames": {"not": {"anyOf": reserved}}}


_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)

_PART_TEXT = Field("text", Text(), "", required=True)
_PART_FIELDS = table((Field("type", OneOf(("text",)), "text", required=True), _PART_TEXT))
_PART_REFUSAL = Field("refusal", Text(), "", required=True)
_REFUSAL_FIELDS = table((Field("type", OneOf(("refusal",)), "", required=True), _PART_REFUSAL))

_PLAIN_ROLES = ("system", "developer", "user")
_ROLE = OneOf((*_PLAIN_ROLES, "assistant", "tool"))
_CONTENT: Field[str | tuple[str, ...]] = Field("content", _Content(), "")
_CALL_ID: Field[str | None] = Field("tool_call_id", CALL_ID, None, required=True)
_REFUSAL: Field[str | None] = Field("refusal", Text(), None)
_REASONING: Field[str | None] = Field("reasoning", Text(), None)
_REASONING_CONTENT: Field[str | None] = Field("reasoning_content", Text(), None)
# What every message may hold, as long as it asks for nothing.
_NEUTRAL_FIELDS = (
    Field("name", Neutral(), None),
    Field("tool_calls", Neutral(([],)), None),
    Field("tool_call_id", Neutral(), None),
    Field("refusal", Neutral(("",)), None),
    Field("reasoning", Neutral(("",)), None),
    Field("reasoning_content", Neutral(("",)), None),
    Field("function_call", Neutral(), None),
    Field("audio", Neutral(), None),
    Field("annotations", Neutral(([],)), None),
)


def _message_fields(roles: tuple[str, ...], *own: Field[Any]) -> FieldTable:
    role = Field("role", OneOf(roles), "", required=True)
    return table((role, _CONTENT, *_NEUTRAL_FIELDS, *own))


_PLAIN_FIELDS = _message_fields(_PLAIN_ROLES)
_FIELDS_OF = dict.fromkeys(_PLAIN_ROLES, _PLAIN_FIELDS) | {
    "assistant": _message_fields(
        ("assistant",),
        TOOL_CALLS,
        _REFUSAL,
        _REASONING,
        _REASONING_CONTENT,
        # Clients' own notes on what they were told.
        Field("parsed", Inert(Anything()), None),
        Field("provider_specific_fields", Inert(Anything()), None),
    ),
    # Its call tells the name of a result.
    "tool": _message_fields(("tool",), _CALL_ID, Field("name", Inert(Text()), None)),
}

_MESSAGES: Field[tuple[Message, ...]] = Field(
    "messages",
    _Messages(),
    (),
    f"the conversation so far; with their parts and calls at most {MAX_MESSAGES}",
    required=True,
)
_ADD_GENERATION_PROMPT: Field[bool | None] = Field(
    "add_generation_prompt",
    Boolean(),
    None,
    "open the model's turn behind the messages; true unless continue_final_message is",
)
_CONTINUE_FINAL_MESSAGE = Field(
    "continue_final_message",
    Boolean(),
    False,
    "leave the last message's turn open, so that the answer continues it",
)
_CHAT_TEMPLATE: Field[str | None] = Field(
    "chat_template",
    Text(1, MAX_TEMPLATE_CHARS),
    None,
    "a Jinja template in place of the model's own; needs --trust-request-chat-template",
)
_TEMPLATE_KWARGS: Field[Mapping[str, object]] = Field(
    "chat_template_kwargs",
    _TemplateVariables(),
    {},
    f"further variables of the template; not {', '.join(sorted(_RESERVED_VARIABLES))},"
    " nor a name that ends in _token",
)
_EFFORT: Field[str | None] = Field(
    "reasoning_effort",
    OneOf(("none", "minimal", "low", "medium", "high", "xhigh")),
    None,
    "none: the model is not to think; all others: it is",
)
CONVERSATION_FIELDS = (
    _MESSAGES,
    _ADD_GENERATION_PROMPT,
    _CONTINUE_FINAL_MESSAGE,
    _CHAT_TEMPLATE,
    _TEMPLATE_KWARGS,
    Field(
        "add_special_tokens",
        Inert(Boolean()),
        None,
        "changes nothing: a chat's prompt begins with the model's first token, once",
    ),
    TOOLS,
    _EFFORT,
    Field("documents", Neutral(([],)), None),
    Field("mm_processor_kwargs", Neutral(({},)), None),
)


def read_conversation(values: Values) -> Conversation:
    """Take a conversation out of what a table with CONVERSATION_FIELDS read."""
    continues, opens = values[_CONTINUE_FINAL_MESSAGE], values[_ADD_GENERATION_PROMPT]
    if continues and opens:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message contradict each other.",
            param="add_generation_prompt",
        )
    messages = values[_MESSAGES]
    effort, variables = values[_EFFORT], values[_TEMPLATE_KWARGS]
    thinks = None if effort is None else effort != "none"
    if thinks is not None and variables.get(THINKING, thinks) is not thinks:
        raise InvalidRequestError(
            f"reasoning_effort={effort} and chat_template_kwargs.{THINKING} contradict each other",
            param="reasoning_effort",
        )
    return Conversation(
        messages=pair_results(messages, "messages"),
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        chat_template=values[_CHAT_TEMPLATE],
        template_kwargs=variables,
        tools=values[TOOLS],
        thinks=thinks,
    )

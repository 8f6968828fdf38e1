"""Chat messages, and what a request says of how they become a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.fields import (
    Boolean,
    Field,
    Inert,
    ListOf,
    Mapped,
    Neutral,
    Object,
    OneOf,
    Text,
    Values,
    read_object,
    table,
)

# More keep the event loop from everybody's streams.
MAX_MESSAGES = 8192
"""Messages of one request and their parts, together."""

MAX_TEMPLATE_CHARS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message with text.

    Attributes:
        content: the text, or the texts of its parts where the client sent parts.
    """

    role: str
    content: str | tuple[str, ...]

    def for_template(self) -> dict[str, object]:
        """Give the message as chat templates expect it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts = [{"type": "text", "text": text} for text in self.content]
        return {"role": self.role, "content": parts}

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
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    template_kwargs: Mapping[str, object]


def _read_parts(value: object, path: str) -> str | tuple[str, ...]:
    if isinstance(value, list):
        parts = ListOf(Object(_PART_FIELDS), min_items=1, max_items=MAX_MESSAGES)(value, path)
        return tuple(part[_PART_TEXT] for part in parts)
    return Text()(value, path)


class _Content:
    """A string, or a list of text parts."""

    def __call__(self, value: object, path: str) -> str | tuple[str, ...]:
        return _read_parts(value, path)

    def schema(self) -> dict[str, object]:
        parts = ListOf(Object(_PART_FIELDS), min_items=1, max_items=MAX_MESSAGES).schema()
        return {"anyOf": [{"type": "string"}, parts]}


class _Message:
    """One message."""

    def __call__(self, value: object, path: str) -> Message:
        message = read_object(value, path, _MESSAGE_FIELDS)
        role = message[_ROLE]
        # Templates know one role for what the operator says.
        return Message(role="system" if role == "developer" else role, content=message[_CONTENT])

    def schema(self) -> dict[str, object]:
        return Object(_MESSAGE_FIELDS).schema()


class _Messages:
    """All messages; they and their parts are counted before any is read."""

    _list = ListOf(_Message(), min_items=1, max_items=MAX_MESSAGES)

    def __call__(self, value: object, path: str) -> tuple[Message, ...]:
        if isinstance(value, list) and len(value) <= MAX_MESSAGES:
            contents = [message.get("content") for message in value if isinstance(message, dict)]
            count = len(value) + sum(len(parts) for parts in contents if isinstance(parts, list))
            if count > MAX_MESSAGES:
                raise InvalidRequestError(
                    f"{path} holds {count} messages and parts; at most {MAX_MESSAGES} are read.",
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

_PART_TYPE = Field("type", OneOf(("text",)), "text", required=True)
_PART_TEXT = Field("text", Text(), "", required=True)
_PART_FIELDS = table((_PART_TYPE, _PART_TEXT))

_ROLE = Field("role", OneOf(("system", "developer", "user", "assistant")), "", required=True)
_CONTENT: Field[str | tuple[str, ...]] = Field("content", _Content(), "", required=True)
_MESSAGE_FIELDS = table(
    (
        _ROLE,
        _CONTENT,
        Field("name", Neutral(), None),
        Field("tool_calls", Neutral(([],)), None),
        Field("tool_call_id", Neutral(), None),
        Field("function_call", Neutral(), None),
        Field("refusal", Neutral(), None),
        Field("audio", Neutral(), None),
        Field("annotations", Neutral(([],)), None),
        Field("reasoning", Neutral(("",)), None),
        Field("reasoning_content", Neutral(("",)), None),
    )
)

_MESSAGES: Field[tuple[Message, ...]] = Field(
    "messages",
    _Messages(),
    (),
    f"the conversation so far; with their parts at most {MAX_MESSAGES}",
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
    Field("tools", Neutral(([],)), None),
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
    return Conversation(
        messages=values[_MESSAGES],
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        chat_template=values[_CHAT_TEMPLATE],
        template_kwargs=values[_TEMPLATE_KWARGS],
    )

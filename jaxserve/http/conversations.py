"""A conversation as the model reads it: its template's text, and the ids of that."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.messages import THINKING, Conversation
from jaxserve.openai.tool_schemas import fit_tool
from jaxserve.text.data import render_data
from jaxserve.text.markers import Markers
from jaxserve.text.plain_tools import in_plain_text

# Inside of the model's own message a template cuts thoughts out, and would not know them hidden.
_THOUGHT_START, _THOUGHT_END = "<|channel>", "<channel|>"


def render_conversation(
    conversation: Conversation, model: ServedModel, check: Callable[[str], object]
) -> tuple[str, list[int]]:
    """Return a prompt's text and ids; `check` gets the text first, and may refuse it.

    Raises:
        InvalidRequestError: a template refuses the messages, or does not know what they ask for.
    """
    source, template = conversation.chat_template, model.chat_template
    messages: Sequence[Mapping[str, Any]] = [
        message.for_template() for message in conversation.messages
    ]
    variables = dict(conversation.template_kwargs)
    if conversation.thinks is not None:
        if conversation.thinks and not template.mentions(THINKING, source):
            raise InvalidRequestError(
                "reasoning_effort must be none: this model does not think", param="reasoning_effort"
            )
        variables[THINKING] = conversation.thinks
    tools: list[dict[str, Any]] = []
    if Markers.find(model.tokenizer) is None:
        declared = [
            _declaration(tool.name, tool.description, tool.parameters)
            for tool in conversation.tools
        ]
        messages = in_plain_text(messages, declared)
    else:
        _check_template(conversation, model)
        tools = [
            fit_tool(
                tool.name, tool.description, tool.parameters, f"tools[{i}].function.parameters"
            )
            for i, tool in enumerate(conversation.tools)
        ]
        messages = [_without_thoughts(message) for message in messages]

    def render(data: Any) -> str:
        return template.render(
            data["messages"],
            tools=data["tools"] or None,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            source=source,
            variables=data["variables"],
        )

    data = {"messages": messages, "tools": tools, "variables": variables}
    return render_data(data, render, model.tokenizer, check)


def _declaration(name: str, description: str, parameters: Mapping[str, object]) -> dict[str, Any]:
    return {"name": name, "description": description, "parameters": parameters}


def _check_template(conversation: Conversation, model: ServedModel) -> None:
    """Refuse what the template would leave out without a word."""
    source, template = conversation.chat_template, model.chat_template
    if conversation.tools and not template.mentions("tools", source):
        raise InvalidRequestError("tools: the chat template knows none", param="tools")
    if not template.mentions("tool_calls", source):
        for i, message in enumerate(conversation.messages):
            if message.calls:
                where = f"messages[{i}].tool_calls"
                raise InvalidRequestError(f"{where}: the chat template knows none", param=where)


def _without_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] != "assistant":
        return message
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _cut(content)}
    return {**message, "content": [{**part, "text": _cut(part["text"])} for part in content]}


def _cut(text: str) -> str:
    """Cut whole thoughts out of a text."""
    kept: list[str] = []
    while True:
        before, start, after = text.partition(_THOUGHT_START)
        _, end, rest = after.partition(_THOUGHT_END)
        if not (start and end):
            return "".join([*kept, text])
        kept.append(before)
        text = rest

"""Messages to prompt text, by a checkpoint's own Jinja template, in a sandbox.

The environment is the one that checkpoints' templates are written for (Hugging Face's conventions).
It knows nothing of tokens beyond the spellings that it hands to the template. Immutable once
loaded; any thread.
"""

import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.text.tokenizer_config import TokenizerConfig

_FILE_NAME = "chat_template.jinja"

MAX_SOURCE_S = 10.0
"""Seconds that a template of a request may run."""

# What a template, which is code, raises on messages of a shape that it does not expect.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    SyntaxError,  # from Python, which a template is translated to: loops nested too deeply
)


class ChatTemplate:
    """A checkpoint's templates: "default" and, in some, "tool_use", taken when there are tools."""

    def __init__(self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        """Compile the templates.

        Raises:
            ModelLoadError: a template is not valid Jinja.
        """
        self._environment = _environment()
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {
                name: self._environment.from_string(source) for name, source in sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template is wrong at line {error.lineno}: {error}"
            ) from error

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Read a folder's chat_template.jinja or, without it, tokenizer_config.json's template."""
        config = TokenizerConfig.load(folder)
        path = folder / _FILE_NAME
        try:
            sources = (
                {"default": path.read_text(encoding="utf-8")}
                if path.exists()
                else config.chat_templates
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        return cls(sources, special_tokens=config.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        source: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text, with a BOS where the template writes one.

        Args:
            messages: as in a chat completion request.
            tools: as in a chat completion request.
            add_generation_prompt: open the model's turn at the end.
            continue_final_message: end the prompt where the last message's content ends.
            source: a template in place of the checkpoint's own.
            variables: further ones of this checkpoint's template.

        Raises:
            InvalidRequestError: there is no template, or the template refuses the messages.
        """

        def write(messages: Sequence[Mapping[str, Any]]) -> str:
            template = (
                self._choose(with_tools=bool(tools))
                if source is None
                else self._environment.from_string(source)
            )
            text = template.render(
                {**self._special_tokens, **(variables or {})},
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
            # A template may spell half of a surrogate pair, which no tokenizer takes.
            text.encode()
            return text

        def run() -> str:
            return _up_to_end(write, messages) if continue_final_message else write(messages)

        try:
            return run() if source is None else _within(MAX_SOURCE_S, run)
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"the chat template refused the messages: {error}",
                param="messages" if source is None else "chat_template",
            ) from error

    def mentions(self, name: str, source: str | None = None) -> bool:
        """Tell whether a template, `source` or the checkpoint's own, has a name in it.

        One that has not cannot depend on it.
        """
        sources = self._sources.values() if source is None else (source,)
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in sources)

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequestError(
                "this checkpoint has no chat template; use /v1/completions", param="messages"
            )
        return template


def _up_to_end(
    write: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Write messages up to where the last one's content ends, however the template trims that."""
    texts = set()
    # Two, of two lengths: what a template makes of a mark, but for writing it, shows.
    for mark in (secrets.token_hex(16), secrets.token_hex(17)):
        text = write([*messages[:-1], _with_mark(messages[-1], mark)])
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequestError(
                "the chat template does not write the last message, which is to be continued",
                param="continue_final_message",
            )
        # The template may write the message more than once.
        texts.add(before.replace(mark, ""))
    if len(texts) > 1:
        raise InvalidRequestError(
            "the chat template changes the last message, which is to be continued",
            param="continue_final_message",
        )
    return texts.pop()


def _with_mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return a message with a mark where its content ends."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + mark}]}


def _within(seconds: float, run: Callable[[], str]) -> str:
    """Run Python code of this thread, and end it with a TemplateError when its time is over.

    One call into C, such as a product of two long numbers, is not interrupted.
    """
    ends_s = time.monotonic() + seconds

    def watch(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > ends_s:
            raise jinja2.TemplateError(f"it ran for more than {seconds:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return run()
    finally:
        sys.settrace(before)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's own filter, which escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)

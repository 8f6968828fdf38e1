"""Answers in OpenAI's wire format: whole bodies, stream chunks and errors, as bytes.

A chunk is written as head + encoded text + tail, about 25 times cheaper than encoding the object it
stands for. Token ids appear as vLLM gives them: `token_ids` in a choice, `prompt_token_ids` in a
chat answer or a completion's choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import orjson

from jaxserve.errors import ApiError
from jaxserve.openai.logprobs import (
    Columns,
    LogprobsWriter,
    ScoredToken,
    chat_logprobs,
    completion_logprobs,
)
from jaxserve.openai.usage import Timings, Usage

FinishReason = Literal["stop", "length", "tool_calls"]

STREAM_END = b"data: [DONE]\n\n"

_MAX_MESSAGE_CHARS = 2048
_MAX_PARAM_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished choice.

    Attributes:
        extras: a chat's thoughts and calls, as its message has them.
        finish_details: says what else cut the choice, where something did.
        stop_reason: the stop string, or the id of `stop_token_ids`, that ended it, if one did.
        logprobs: its tokens' log-probabilities as the format writes them.
        prompt_logprobs: those of its prompt.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    extras: Mapping[str, object] = field(default_factory=dict)
    finish_details: Mapping[str, object] = field(default_factory=dict)
    logprobs: orjson.Fragment | None = None
    prompt_logprobs: orjson.Fragment | None = None


class Answer(ABC):
    """Writes one request's answer, whole or in chunks; choice i belongs to prompt i // n.

    Attributes:
        prompt_param: the request's field that holds the prompts.
        default_max_tokens: OpenAI's budget of a request that names none; None: all of the context.
        tells_echo: what is told of a prompt's tokens comes with each choice, echoed ones' too.

    Args:
        prompts: the prompts' token ids, written where `return_token_ids`.
    """

    prompt_param: ClassVar[str]
    default_max_tokens: ClassVar[int | None]
    tells_echo: ClassVar[bool]
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    _text_head: ClassVar[bytes]
    _text_end: ClassVar[bytes]

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        return_token_ids: bool,
    ) -> None:
        self._meta = {"id": self.id_prefix + request_id, "created": created, "model": model}
        # As JSON, since every choice of a completion repeats them.
        self._prompts = [orjson.Fragment(orjson.dumps(ids)) for ids in prompts if return_token_ids]
        self._n = n
        self._return_token_ids = return_token_ids
        meta = orjson.dumps({"object": self.chunk_object, **self._meta})
        self._stem = b"data: " + meta[:-1] + b',"choices":'

    @abstractmethod
    def first_chunk(self, index: int, usage: Usage | None) -> bytes:
        """Open a choice; empty where the format has no such chunk."""

    @abstractmethod
    def write_logprobs(
        self, writer: LogprobsWriter, tokens: Sequence[ScoredToken], num_top: int
    ) -> Columns:
        """Write what is told of some of a choice's tokens."""

    @abstractmethod
    def join_logprobs(self, parts: Sequence[Columns]) -> orjson.Fragment:
        """Give a choice's `logprobs`, from what was written."""

    @abstractmethod
    def _wire_choice(self, choice: Choice) -> dict[str, object]: ...

    @abstractmethod
    def _wire_finish(self) -> dict[str, object]: ...

    def text_chunk(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: orjson.Fragment | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Carry one step's text of a choice; b"" where there is nothing to carry.

        `usage` is what has been used so far, where every chunk is to tell it.
        """
        if not (text or logprobs or (self._return_token_ids and token_ids)):
            return b""
        parts = [self._stem, self._text_head % index, orjson.dumps(text), self._text_end]
        parts += b',"logprobs":', b"null" if logprobs is None else orjson.dumps(logprobs)
        parts.append(b',"finish_reason":null')
        if self._return_token_ids:
            parts += b',"token_ids":', orjson.dumps(token_ids)
        parts.append(b"}]")
        if usage is not None:
            parts += b',"usage":', orjson.dumps(usage.to_wire())
        parts.append(b"}\n\n")
        return b"".join(parts)

    def delta_chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        token_ids: tuple[int, ...],
        logprobs: orjson.Fragment | None,
        usage: Usage | None,
    ) -> bytes:
        """Carry one step's part of a chat that is no content."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self._return_token_ids:
            choice["token_ids"] = token_ids
        return self._chunk({"choices": [choice]}, usage)

    def last_chunk(
        self,
        index: int,
        finish_reason: FinishReason,
        stop_reason: str | int | None,
        usage: Usage | None,
        *,
        details: Mapping[str, object],
        timings: Timings | None = None,
    ) -> bytes:
        """Close a choice; `details` say what cut it; `timings`: only the end comes after it."""
        choice = {
            "index": index,
            **self._wire_finish(),
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            **details,
        }
        return self._chunk({"choices": [choice]}, usage, timings)

    def usage_chunk(self, usage: Usage, timings: Timings) -> bytes:
        """Report the usage; comes last before the end, with no choices."""
        return self._chunk({"choices": []}, usage, timings)

    def body(self, choices: Sequence[Choice], usage: Usage, timings: Timings) -> bytes:
        """Write the whole answer; `choices` in order of their index."""
        return orjson.dumps(
            {
                "object": self.whole_object,
                **self._meta,
                "choices": [self._wire_choice(choice) for choice in choices],
                "usage": usage.to_wire(),
                "timings": timings.to_wire(),
                **self._prompt_of_answer(),
                **self._scores_of_answer(choices),
            }
        )

    def _chunk(
        self, fields: Mapping[str, object], usage: Usage | None, timings: Timings | None = None
    ) -> bytes:
        chunk = {"object": self.chunk_object, **self._meta, **fields}
        if usage is not None:
            chunk["usage"] = usage.to_wire()
        if timings is not None:
            chunk["timings"] = timings.to_wire()
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _prompt_of_answer(self) -> dict[str, object]:
        return {}

    def _scores_of_answer(self, choices: Sequence[Choice]) -> dict[str, object]:
        return {}

    def _token_ids(self, choice: Choice) -> dict[str, object]:
        return {"token_ids": choice.token_ids} if self._return_token_ids else {}


class ChatAnswer(Answer):
    """Writes chat completions."""

    prompt_param = "messages"
    default_max_tokens = None
    tells_echo = False
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _text_head = b'[{"index":%d,"delta":{"content":'
    _text_end = b"}"

    def first_chunk(self, index: int, usage: Usage | None) -> bytes:
        """Name the role."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk({"choices": [choice], **self._prompt_of_answer()}, usage)

    def write_logprobs(
        self, writer: LogprobsWriter, tokens: Sequence[ScoredToken], num_top: int
    ) -> Columns:
        """Write what is told of some of a choice's tokens."""
        return writer.chat(tokens)

    def join_logprobs(self, parts: Sequence[Columns]) -> orjson.Fragment:
        """Give a choice's `logprobs`, from what was written."""
        return chat_logprobs(parts)

    def _wire_choice(self, choice: Choice) -> dict[str, object]:
        # Clients take no text beside calls for null.
        content = choice.text or (None if "tool_calls" in choice.extras else "")
        message = {"role": "assistant", "content": content, "refusal": None, **choice.extras}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **choice.finish_details,
            **self._token_ids(choice),
        }

    def _wire_finish(self) -> dict[str, object]:
        return {"delta": {}}

    def _prompt_of_answer(self) -> dict[str, object]:
        return {"prompt_token_ids": self._prompts[0]} if self._return_token_ids else {}

    def _scores_of_answer(self, choices: Sequence[Choice]) -> dict[str, object]:
        scores = choices[0].prompt_logprobs
        return {} if scores is None else {"prompt_logprobs": scores}


class CompletionAnswer(Answer):
    """Writes completions."""

    prompt_param = "prompt"
    default_max_tokens = 16
    tells_echo = True
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    _text_head = b'[{"index":%d,"text":'
    _text_end = b""

    def first_chunk(self, index: int, usage: Usage | None) -> bytes:
        """Give the prompt's ids where they are wanted; there is no such chunk otherwise."""
        if not self._return_token_ids:
            return b""
        choice = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
            "token_ids": (),
            "prompt_token_ids": self._prompts[index // self._n],
        }
        return self._chunk({"choices": [choice]}, usage)

    def write_logprobs(
        self, writer: LogprobsWriter, tokens: Sequence[ScoredToken], num_top: int
    ) -> Columns:
        """Write what is told of some of a choice's tokens."""
        return writer.completion(tokens, num_top)

    def join_logprobs(self, parts: Sequence[Columns]) -> orjson.Fragment:
        """Give a choice's `logprobs`, from what was written."""
        return completion_logprobs(parts)

    def _wire_choice(self, choice: Choice) -> dict[str, object]:
        ids = self._token_ids(choice)
        if self._return_token_ids:
            ids["prompt_token_ids"] = self._prompts[choice.index // self._n]
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **choice.finish_details,
            **ids,
            **(
                {}
                if choice.prompt_logprobs is None
                else {"prompt_logprobs": choice.prompt_logprobs}
            ),
        }

    def _wire_finish(self) -> dict[str, object]:
        return {"text": ""}


def error_body(error: ApiError) -> bytes:
    """Write an error; the shape is the same in a body and in a stream.

    What a message or a path quotes of the request may be as long as that, and no Unicode.
    """
    return orjson.dumps(
        {
            "error": {
                "message": _encodable(error.message[:_MAX_MESSAGE_CHARS]),
                "type": error.type,
                "param": error.param and _encodable(error.param[:_MAX_PARAM_CHARS]),
                "code": error.code,
            }
        }
    )


def _encodable(text: str) -> str:
    """Replace halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


def model_object(id: str, *, created: int, max_model_len: int) -> dict[str, object]:
    """Describe a served model as the models endpoints do."""
    return {
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "max_model_len": max_model_len,
    }

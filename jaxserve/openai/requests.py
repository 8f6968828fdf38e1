"""The two generation requests: their fields as tables, and the typed requests read from them.

Every field of OpenAI's two requests, and the usual extras of other servers, stands in a table:
applied, `Inert` (changes no answer), or `Neutral` (refused unless its value asks for nothing). A
field in no table is unknown and refused.

Knows neither tokens nor the model: what depends on them is checked where the prompt is made.
"""

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, UnsupportedFieldError
from jaxserve.openai.fields import (
    Boolean,
    Field,
    Inert,
    Integer,
    ListOf,
    Mapped,
    Neutral,
    Number,
    Object,
    OneOf,
    OneOrMany,
    Text,
    Values,
    decode_json,
    read_object,
    table,
)

MAX_CHOICES = 128
# Longer lists and strings keep the event loop from everybody's streams.
MAX_PROMPTS = 1024
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_STOP_CHARS = 1024
MAX_STOPS = 16
# Above every vocabulary: a larger top_k can only be a mistake.
_MAX_TOP_K = 1 << 20
_MAX_TOKENS = (1 << 31) - 1

Prompt = str | tuple[int, ...]
"""A prompt is text to tokenize, or token ids taken as they are."""


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
    def num_chars(self) -> int:
        """Length of the text, over all parts."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(text) for text in self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What both requests have in common.

    Attributes:
        model: None where the request names none.
        max_tokens: None where the request names none.
        seed: any 64 bits, signed or not, as an unsigned integer; None: unseeded.
        top_k: 0 keeps all.
        n: sequences per prompt.
        include_usage: a streamed answer ends in a chunk with the usage.
        ignore_eos: end ids do not end a sequence.
        return_token_ids: answers carry the ids of prompt and output.
    """

    model: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    ignore_eos: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionRequest:
    """POST /v1/chat/completions; `messages` is not empty."""

    messages: tuple[Message, ...]
    options: GenerationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions; `prompts` is not empty.

    Attributes:
        add_special_tokens: text prompts get the model's first token unless they start with it; ids
            never do.
    """

    prompts: tuple[Prompt, ...]
    add_special_tokens: bool
    options: GenerationOptions


def _read_parts(value: object, path: str) -> str | tuple[str, ...]:
    if isinstance(value, list):
        parts = ListOf(Object(_PART_FIELDS), min_items=1, max_items=MAX_PARTS)(value, path)
        return tuple(part[_PART_TEXT] for part in parts)
    return Text()(value, path)


def _read_message(value: object, path: str) -> Message:
    message = read_object(value, path, _MESSAGE_FIELDS)
    role = message[_ROLE]
    # Templates know one role for what the operator says.
    return Message(role="system" if role == "developer" else role, content=message[_CONTENT])


def _read_token_ids(value: object, path: str) -> tuple[int, ...]:
    # One pass for the usual case: an id list may hold a whole context.
    if isinstance(value, list) and value and set(map(type, value)) == {int} and min(value) >= 0:
        return tuple(value)
    return ListOf(Integer(0, _MAX_TOKENS), min_items=1)(value, path)


def _read_prompt(value: object, path: str) -> Prompt:
    return _read_token_ids(value, path) if isinstance(value, list) else Text()(value, path)


def _read_prompts(value: object, path: str) -> tuple[Prompt, ...]:
    if isinstance(value, list) and not (value and type(value[0]) is int):
        return ListOf(_read_prompt, min_items=1, max_items=MAX_PROMPTS)(value, path)
    return (_read_prompt(value, path),)


_PART_TYPE = Field("type", OneOf(("text",)), "text", required=True)
_PART_TEXT = Field("text", Text(), "", required=True)
_PART_FIELDS = table((_PART_TYPE, _PART_TEXT))

_ROLE = Field("role", OneOf(("system", "developer", "user", "assistant")), "", required=True)
_CONTENT: Field[str | tuple[str, ...]] = Field("content", _read_parts, "", required=True)
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

_INCLUDE_USAGE = Field("include_usage", Boolean(), False)
_STREAM_OPTION_FIELDS = table(
    (
        _INCLUDE_USAGE,
        Field("continuous_usage_stats", Neutral((False,)), None),
        Field("include_obfuscation", Neutral((False,)), None),
    )
)

_MODEL: Field[str | None] = Field("model", Text(), None)
_MAX_TOKENS_FIELD: Field[int | None] = Field("max_tokens", Integer(1, _MAX_TOKENS), None)
_TEMPERATURE = Field("temperature", Number(0, 2), 1.0)
_TOP_P = Field("top_p", Number(0, 1, above_minimum=True), 1.0)
_TOP_K = Field("top_k", Integer(-1, _MAX_TOP_K), 0)
_MIN_P = Field("min_p", Number(0, 1), 0.0)
_SEED: Field[int | None] = Field("seed", Integer(-(1 << 63), (1 << 64) - 1), None)
_STOP: Field[tuple[str, ...]] = Field("stop", OneOrMany(Text(1, MAX_STOP_CHARS), MAX_STOPS), ())
_N = Field("n", Integer(1, MAX_CHOICES), 1)
_STREAM = Field("stream", Boolean(), False)
_STREAM_OPTIONS: Field[Values | None] = Field("stream_options", Object(_STREAM_OPTION_FIELDS), None)
_IGNORE_EOS = Field("ignore_eos", Boolean(), False)
_RETURN_TOKEN_IDS = Field("return_token_ids", Boolean(), False)

_SHARED_FIELDS = (
    _MODEL,
    _MAX_TOKENS_FIELD,
    _TEMPERATURE,
    _TOP_P,
    _TOP_K,
    _MIN_P,
    _SEED,
    _STOP,
    _N,
    _STREAM,
    _STREAM_OPTIONS,
    _IGNORE_EOS,
    _RETURN_TOKEN_IDS,
    Field("user", Inert(Text()), None),
    Field("metadata", Inert(Mapped()), None),
    Field("store", Inert(Boolean()), None),
    Field("service_tier", Inert(Text()), None),
    Field("safety_identifier", Inert(Text()), None),
    Field("prompt_cache_key", Inert(Text()), None),
    Field("cache_salt", Inert(Text(min_length=1)), None),
    Field("presence_penalty", Neutral((0,)), None),
    Field("frequency_penalty", Neutral((0,)), None),
    Field("repetition_penalty", Neutral((1,)), None),
    Field("length_penalty", Neutral((1,)), None),
    Field("logit_bias", Neutral(({},)), None),
    Field("prompt_logprobs", Neutral(), None),
    Field("min_tokens", Neutral((0,)), None),
    Field("stop_token_ids", Neutral(([],)), None),
    Field("include_stop_str_in_output", Neutral((False,)), None),
    Field("skip_special_tokens", Neutral((True,)), None),
    Field("spaces_between_special_tokens", Neutral((True, False)), None),
    Field("bad_words", Neutral(([],)), None),
    Field("allowed_token_ids", Neutral(), None),
    Field("truncate_prompt_tokens", Neutral(), None),
    Field("echo", Neutral((False,)), None),
    Field("use_beam_search", Neutral((False,)), None),
    Field("early_stopping", Neutral((False,)), None),
    Field("return_tokens_as_token_ids", Neutral((False,)), None),
    Field("logits_processors", Neutral(([],)), None),
    Field("priority", Neutral((0,)), None),
    Field("request_id", Neutral(), None),
    Field("response_format", Neutral(({"type": "text"},)), None),
    Field("structured_outputs", Neutral(), None),
    Field("guided_json", Neutral(), None),
    Field("guided_regex", Neutral(), None),
    Field("guided_choice", Neutral(), None),
    Field("guided_grammar", Neutral(), None),
    Field("guided_decoding_backend", Neutral(), None),
    Field("guided_whitespace_pattern", Neutral(), None),
    Field("kv_transfer_params", Neutral(), None),
    Field("vllm_xargs", Neutral(({},)), None),
)

_MESSAGES: Field[tuple[Message, ...]] = Field(
    "messages", ListOf(_read_message, min_items=1, max_items=MAX_MESSAGES), (), required=True
)
_MAX_COMPLETION_TOKENS: Field[int | None] = Field(
    "max_completion_tokens", Integer(1, _MAX_TOKENS), None
)
CHAT_FIELDS = table(
    (
        _MESSAGES,
        *_SHARED_FIELDS,
        _MAX_COMPLETION_TOKENS,
        Field("logprobs", Neutral((False,)), None),
        Field("top_logprobs", Neutral((0,)), None),
        Field("tools", Neutral(([],)), None),
        Field("tool_choice", Neutral(("none", "auto")), None),
        Field("parallel_tool_calls", Neutral((True, False)), None),
        Field("functions", Neutral(([],)), None),
        Field("function_call", Neutral(("none", "auto")), None),
        Field("modalities", Neutral((["text"],)), None),
        Field("audio", Neutral(), None),
        Field("prediction", Neutral(), None),
        Field("reasoning_effort", Neutral(("none",)), None),
        Field("thinking_token_budget", Neutral(), None),
        Field("include_reasoning", Neutral((True, False)), None),
        Field("verbosity", Neutral(("medium",)), None),
        Field("web_search_options", Neutral(), None),
        Field("prompt_cache_retention", Inert(Text()), None),
        Field("add_generation_prompt", Neutral((True,)), None),
        Field("continue_final_message", Neutral((False,)), None),
        Field("add_special_tokens", Neutral((False,)), None),
        Field("documents", Neutral(([],)), None),
        Field("chat_template", Neutral(), None),
        Field("chat_template_kwargs", Neutral(({},)), None),
        Field("mm_processor_kwargs", Neutral(({},)), None),
    )
)

_PROMPT: Field[tuple[Prompt, ...]] = Field("prompt", _read_prompts, (), required=True)
_ADD_SPECIAL_TOKENS = Field("add_special_tokens", Boolean(), True)
_BEST_OF: Field[int | None] = Field("best_of", Integer(1, MAX_CHOICES), None)
COMPLETION_FIELDS = table(
    (
        _PROMPT,
        *_SHARED_FIELDS,
        _ADD_SPECIAL_TOKENS,
        _BEST_OF,
        Field("logprobs", Neutral(), None),
        Field("suffix", Neutral(("",)), None),
        Field("prompt_embeds", Neutral(), None),
    )
)


def parse_chat_completion(body: bytes) -> ChatCompletionRequest:
    """Read the body of a chat completion request; raises InvalidRequestError naming the field."""
    values = read_object(decode_json(body), "", CHAT_FIELDS)
    max_tokens, newer = values[_MAX_TOKENS_FIELD], values[_MAX_COMPLETION_TOKENS]
    if max_tokens is not None and newer is not None and max_tokens != newer:
        raise InvalidRequestError(
            f"max_tokens={max_tokens} and max_completion_tokens={newer} contradict each other.",
            param="max_tokens",
        )
    return ChatCompletionRequest(
        messages=values[_MESSAGES],
        options=_options(values, max_tokens if newer is None else newer),
    )


def parse_completion(body: bytes) -> CompletionRequest:
    """Read the body of a completion request; raises InvalidRequestError naming the field."""
    values = read_object(decode_json(body), "", COMPLETION_FIELDS)
    best_of, n = values[_BEST_OF], values[_N]
    if best_of is not None and best_of != n:
        raise UnsupportedFieldError(
            f"best_of={best_of} is not supported by this server unless it equals n={n}.",
            param="best_of",
        )
    return CompletionRequest(
        prompts=values[_PROMPT],
        add_special_tokens=values[_ADD_SPECIAL_TOKENS],
        options=_options(values, values[_MAX_TOKENS_FIELD]),
    )


def _options(values: Values, max_tokens: int | None) -> GenerationOptions:
    stream, stream_options, seed = values[_STREAM], values[_STREAM_OPTIONS], values[_SEED]
    if stream_options is not None and not stream:
        raise InvalidRequestError(
            "stream_options may only be given where stream is true.", param="stream_options"
        )
    return GenerationOptions(
        model=values[_MODEL],
        max_tokens=max_tokens,
        temperature=values[_TEMPERATURE],
        top_p=values[_TOP_P],
        top_k=max(0, values[_TOP_K]),
        min_p=values[_MIN_P],
        seed=None if seed is None else seed & ((1 << 64) - 1),
        stop=values[_STOP],
        n=values[_N],
        stream=stream,
        include_usage=stream_options is not None and stream_options[_INCLUDE_USAGE],
        ignore_eos=values[_IGNORE_EOS],
        return_token_ids=values[_RETURN_TOKEN_IDS],
    )

"""The requests that the endpoints take: their fields as tables, and what is read from them.

Knows neither tokens nor the model: what depends on them is checked where the prompt is made.
"""

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, UnsupportedFieldError
from jaxserve.openai.fields import Field, FieldTable, Values, read_object, table
from jaxserve.openai.guided import GRAMMAR_FIELDS, GrammarRequest, read_grammar
from jaxserve.openai.json_body import decode_json
from jaxserve.openai.messages import CONVERSATION_FIELDS, Conversation, read_conversation
from jaxserve.openai.options import (
    LARGEST_BUDGET,
    MAX_SEQUENCES,
    MODEL,
    OPTION_FIELDS,
    GenerationOptions,
    N,
    read_options,
)
from jaxserve.openai.readers import (
    Boolean,
    Inert,
    Integer,
    ListOf,
    Name,
    Neutral,
    Schema,
    Text,
    TokenIds,
)
from jaxserve.openai.tool_calls import keep_exact_arguments
from jaxserve.openai.tools import CHOICE_FIELDS, TOOLS, ToolUse, read_tool_use
from jaxserve.types import MAX_LOGPROBS

MAX_TOKEN_IDS = 1 << 19
"""Ids of one request: more than any context holds, fewer than keep the event loop from streams."""
# Texts to be judged by a grammar, and characters of all.
MAX_CHECKED = 64
MAX_CHECKED_CHARS = 1 << 18

Prompt = str | tuple[int, ...]
"""A prompt is text to tokenize, or token ids taken as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionRequest:
    """POST /v1/chat/completions.

    Attributes:
        tells_reasoning: the answer has the model's thoughts.
        thought_budget: most tokens of them; None: no limit.
    """

    conversation: Conversation
    tool_use: ToolUse
    tells_reasoning: bool
    thought_budget: int | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """POST /tokenize: a text or a conversation."""

    model: str | None
    source: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """POST /detokenize."""

    model: str | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarCheckRequest:
    """POST /v1/grammar/check: a grammar, tools or both, as they stand in a chat's request."""

    model: str | None
    grammar: GrammarRequest | None
    tool_use: ToolUse
    texts: tuple[str, ...]


_PROMPT_IDS = TokenIds(1, MAX_TOKEN_IDS)


class _Prompt:
    """A text, or a list of token ids."""

    def __call__(self, value: object, path: str) -> Prompt:
        return _PROMPT_IDS(value, path) if isinstance(value, list) else Text()(value, path)

    def schema(self) -> Schema:
        return {"anyOf": [Text().schema(), _PROMPT_IDS.schema()]}


class _Prompts:
    """A text, a list of token ids, or a list of either."""

    _many = ListOf(_Prompt(), min_items=1, max_items=MAX_SEQUENCES)

    def __call__(self, value: object, path: str) -> tuple[Prompt, ...]:
        if not isinstance(value, list) or (value and type(value[0]) is int):
            return (_Prompt()(value, path),)
        num_ids = sum(len(each) for each in value if isinstance(each, list))
        if num_ids > MAX_TOKEN_IDS:
            raise InvalidRequestError(
                f"{path} holds {num_ids} token ids; at most {MAX_TOKEN_IDS} are read.", param=path
            )
        return self._many(value, path)

    def schema(self) -> Schema:
        return {"anyOf": [Text().schema(), _PROMPT_IDS.schema(), self._many.schema()]}


_CHAT_MAX_TOKENS: Field[int | None] = Field(
    "max_tokens",
    Integer(1, LARGEST_BUDGET),
    None,
    "most tokens to generate; default: what the context leaves",
)
_MAX_COMPLETION_TOKENS: Field[int | None] = Field(
    "max_completion_tokens", _CHAT_MAX_TOKENS.read, None, "the newer name of max_tokens"
)
_CHAT_ECHO = Field(
    "echo", Boolean(), False, "let the text of the last message come first, where it is the model's"
)
_CHAT_LOGPROBS = Field(
    "logprobs", Boolean(), False, "tell the log-probabilities of the answer's tokens"
)
_TOP_LOGPROBS: Field[int | None] = Field(
    "top_logprobs",
    Integer(0, MAX_LOGPROBS),
    None,
    "with each, so many of the likeliest tokens; needs logprobs",
)
_INCLUDE_REASONING = Field(
    "include_reasoning", Boolean(), True, "false: leave the model's thoughts out of the answer"
)
_THOUGHT_BUDGET: Field[int | None] = Field(
    "thinking_token_budget",
    Integer(-1, LARGEST_BUDGET),
    None,
    "most tokens of the model's thoughts, which are closed then; -1: no limit",
)
CHAT_FIELDS = table(
    (
        *CONVERSATION_FIELDS,
        *OPTION_FIELDS,
        _CHAT_MAX_TOKENS,
        _MAX_COMPLETION_TOKENS,
        _CHAT_ECHO,
        _CHAT_LOGPROBS,
        _TOP_LOGPROBS,
        *CHOICE_FIELDS,
        _INCLUDE_REASONING,
        _THOUGHT_BUDGET,
        Field("functions", Neutral(([],)), None),
        Field("function_call", Neutral(("none", "auto")), None),
        Field("modalities", Neutral((["text"],)), None),
        Field("audio", Neutral(), None),
        Field("prediction", Neutral(), None),
        Field("verbosity", Neutral(("medium",)), None),
        Field("web_search_options", Neutral(), None),
        Field("prompt_cache_retention", Inert(Text()), None),
    )
)

_PROMPT: Field[tuple[Prompt, ...]] = Field(
    "prompt",
    _Prompts(),
    (),
    f"a text, token ids, or a list of either; prompts times n: at most {MAX_SEQUENCES}",
    required=True,
)
_MAX_TOKENS: Field[int | None] = Field(
    "max_tokens",
    Integer(0, LARGEST_BUDGET),
    None,
    "most tokens to generate; default: 16; 0 only with echo",
)
_ECHO = Field("echo", Boolean(), False, "let the prompt's text precede the answer's")
_ADD_SPECIAL_TOKENS = Field(
    "add_special_tokens", Boolean(), True, "let a text begin with the model's first token"
)
_BEST_OF: Field[int | None] = Field(
    "best_of", Integer(1, MAX_SEQUENCES), None, "only the value of n"
)
_LOGPROBS: Field[int | None] = Field(
    "logprobs",
    Integer(0, MAX_LOGPROBS),
    None,
    "tell the log-probabilities of the answer's tokens, with so many of the likeliest",
)
COMPLETION_FIELDS = table(
    (
        _PROMPT,
        *OPTION_FIELDS,
        _MAX_TOKENS,
        _ECHO,
        _ADD_SPECIAL_TOKENS,
        _BEST_OF,
        _LOGPROBS,
        Field("suffix", Neutral(("",)), None),
        Field("prompt_embeds", Neutral(), None),
    )
)

_TEXT = Field("prompt", Text(), "", "the text", required=True)
_RETURN_TOKEN_STRS = Field(
    "return_token_strs", Boolean(), False, "tell the tokens' spellings as well"
)
TOKENIZE_FIELDS = table((MODEL, _TEXT, _ADD_SPECIAL_TOKENS, _RETURN_TOKEN_STRS))
TOKENIZE_CHAT_FIELDS = table((MODEL, *CONVERSATION_FIELDS, _RETURN_TOKEN_STRS))

_TOKENS: Field[tuple[int, ...]] = Field(
    "tokens", TokenIds(0, MAX_TOKEN_IDS), (), "the ids", required=True
)
DETOKENIZE_FIELDS = table((MODEL, _TOKENS))

_TEXTS: Field[tuple[str, ...]] = Field(
    "texts", ListOf(Text(max_length=MAX_CHECKED_CHARS), max_items=MAX_CHECKED), (), "to be judged"
)
GRAMMAR_CHECK_FIELDS = table((MODEL, *GRAMMAR_FIELDS, TOOLS, *CHOICE_FIELDS, _TEXTS))


_SESSION = Field(
    "session", Name(), "", "a session's name: its prompt_cache_key or X-Session-ID", required=True
)
RELEASE_FIELDS = table((_SESSION,))
FLUSH_FIELDS = table(())


def parse_chat_completion(body: bytes) -> ChatCompletionRequest:
    """Read the body of a chat completion request; raises InvalidRequestError naming the field."""
    return _chat_completion(_decoded(body))


def _chat_completion(value: object) -> ChatCompletionRequest:
    values = read_object(value, "", CHAT_FIELDS)
    max_tokens, newer = values[_CHAT_MAX_TOKENS], values[_MAX_COMPLETION_TOKENS]
    if max_tokens is not None and newer is not None and max_tokens != newer:
        raise InvalidRequestError(
            f"max_tokens={max_tokens} and max_completion_tokens={newer} contradict each other.",
            param="max_tokens",
        )
    top = values[_TOP_LOGPROBS]
    if top and not values[_CHAT_LOGPROBS]:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
    options = read_options(
        values,
        max_tokens=max_tokens if newer is None else newer,
        logprobs=(top or 0) if values[_CHAT_LOGPROBS] else None,
        echo=values[_CHAT_ECHO],
    )
    budget = values[_THOUGHT_BUDGET]
    return ChatCompletionRequest(
        conversation=read_conversation(values),
        tool_use=read_tool_use(values),
        tells_reasoning=values[_INCLUDE_REASONING],
        thought_budget=None if budget is None or budget < 0 else budget,
        options=options,
    )


def parse_completion(body: bytes) -> CompletionRequest:
    """Read the body of a completion request; raises InvalidRequestError naming the field."""
    return _completion(decode_json(body))


def _completion(value: object) -> CompletionRequest:
    values = read_object(value, "", COMPLETION_FIELDS)
    best_of, n = values[_BEST_OF], values[N]
    if best_of is not None and best_of != n:
        raise UnsupportedFieldError(
            f"best_of={best_of} is not supported by this server unless it equals n={n}.",
            param="best_of",
        )
    prompts = values[_PROMPT]
    if len(prompts) * n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={n} exceed {MAX_SEQUENCES} sequences.", param="n"
        )
    max_tokens = values[_MAX_TOKENS]
    if max_tokens == 0 and not values[_ECHO]:
        raise InvalidRequestError("max_tokens may be 0 only with echo.", param="max_tokens")
    return CompletionRequest(
        prompts=prompts,
        add_special_tokens=values[_ADD_SPECIAL_TOKENS],
        options=read_options(
            values, max_tokens=max_tokens, logprobs=values[_LOGPROBS], echo=values[_ECHO]
        ),
    )


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Read the body of a tokenize request; raises InvalidRequestError naming the field."""
    value = _decoded(body)
    is_chat = _is_chat(value)
    fields: FieldTable = TOKENIZE_CHAT_FIELDS if is_chat else TOKENIZE_FIELDS
    values = read_object(value, "", fields)
    return TokenizeRequest(
        model=values[MODEL],
        source=read_conversation(values) if is_chat else values[_TEXT],
        add_special_tokens=is_chat or values[_ADD_SPECIAL_TOKENS],
        return_token_strs=values[_RETURN_TOKEN_STRS],
    )


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Read the body of a detokenize request; raises InvalidRequestError naming the field."""
    values: Values = read_object(decode_json(body), "", DETOKENIZE_FIELDS)
    return DetokenizeRequest(model=values[MODEL], tokens=values[_TOKENS])


def parse_explain(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    """Read the body of either generation request; a completion's must have one prompt."""
    value = _decoded(body)
    if _is_chat(value):
        return _chat_completion(value)
    request = _completion(value)
    if len(request.prompts) > 1:
        raise InvalidRequestError(
            f"prompt must be one, not {len(request.prompts)}, to be explained.", param="prompt"
        )
    return request


def parse_release(body: bytes) -> str:
    """Read the body of a release; gives the session's name."""
    values: Values = read_object(decode_json(body), "", RELEASE_FIELDS)
    return values[_SESSION]


def parse_flush(body: bytes) -> None:
    """Read the body of a flush, which may be empty and says nothing."""
    if body:
        read_object(decode_json(body), "", FLUSH_FIELDS)


def parse_grammar_check(body: bytes) -> GrammarCheckRequest:
    """Read the body of a grammar check; raises InvalidRequestError naming the field."""
    values: Values = read_object(decode_json(body), "", GRAMMAR_CHECK_FIELDS)
    grammar, tool_use = read_grammar(values), read_tool_use(values)
    if grammar is None and not tool_use.offered:
        raise InvalidRequestError(
            "a grammar is required, such as a response_format, or tools.",
            param="response_format",
            code="missing_required_parameter",
        )
    num_chars = sum(len(text) for text in values[_TEXTS])
    if num_chars > MAX_CHECKED_CHARS:
        raise InvalidRequestError(
            f"texts have {num_chars} characters in all; at most {MAX_CHECKED_CHARS} are judged.",
            param="texts",
        )
    return GrammarCheckRequest(
        model=values[MODEL], grammar=grammar, tool_use=tool_use, texts=values[_TEXTS]
    )


def _decoded(body: bytes) -> object:
    """Decode a body that may be a chat's; its calls' arguments stay as they were written."""
    value = decode_json(body)
    if _is_chat(value):
        keep_exact_arguments(value, body)
    return value


def _is_chat(value: object) -> bool:
    return isinstance(value, dict) and "messages" in value

"""What both generation requests have in common: their fields, and the typed options read from them.

Every field of OpenAI's two requests, and the usual extras of other servers, stands in a table:
applied, `Inert` (changes no answer), or `Neutral` (refused unless its value asks for nothing). A
field in no table is unknown and refused.
"""

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.fields import Field, Object, Values, table
from jaxserve.openai.guided import ENSURE_COMPLETE, GRAMMAR_FIELDS, GrammarRequest, read_grammar
from jaxserve.openai.readers import (
    Boolean,
    Inert,
    Integer,
    ListOf,
    Mapped,
    Name,
    Neutral,
    Number,
    OneOrMany,
    RequestId,
    Schema,
    Text,
    TokenBiases,
    TokenIds,
)
from jaxserve.types import MAX_BAD_WORDS, MAX_LOGPROBS

MAX_SEQUENCES = 128
"""Sequences of one request: its prompts times n."""

MAX_TEXT_CHARS = 1 << 20
"""Characters of a text that are tokenized in any case; more only where a context may hold them."""

MAX_PROMPT_SCORES = 1 << 20
"""Log-probabilities of prompts' tokens that one answer tells, about 60 bytes each."""

# Longer lists and strings keep the event loop from everybody's streams.
MAX_STOP_CHARS = 1024
MAX_STOPS = 16
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_IDS = 4096
# Above every vocabulary: a larger top_k can only be a mistake.
_MAX_TOP_K = 1 << 20
LARGEST_BUDGET = (1 << 31) - 1
MAX_TIMEOUT_S = 86_400.0
# Each size is looked for at each token.
MAX_PATTERN_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Some ids, [min_size, max_size] of them, `min_count` times in a row."""

    min_size: int
    max_size: int
    min_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What a request asks of its generation; None: it does not say.

    Attributes:
        seed: any 64 bits, signed or not, as an unsigned integer.
        top_k: 0 keeps all.
        n: sequences per prompt.
        include_usage: a streamed answer ends in a chunk with the usage.
        continuous_usage: every chunk of it carries the usage so far.
        ignore_eos: end ids do not end a sequence.
        return_token_ids: answers carry the ids of prompt and output.
        logprobs: log-probabilities of output tokens are told, with so many of the likeliest.
        prompt_logprobs: the same for the prompt's tokens.
        truncate_prompt_tokens: only the last so many tokens of the prompt count; -1: all that the
            context can hold.
        cache_salt: only requests of the same one share cached prefixes.
        session: whose cached prefix is kept for longer.
        echo: the prompt's text precedes the answer's.
        grammar: what an answer has to be; None: anything.
        ensure_complete: it is to be that even where max_tokens ends it.
        timeout_s: the answer is cut so long after its start.
        repetition: it is cut where it repeats itself.
    """

    model: str | None
    request_id: str | None
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    skip_special_tokens: bool
    n: int
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    ignore_eos: bool
    return_token_ids: bool
    tokens_as_ids: bool
    logprobs: int | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    cache_salt: str | None
    session: str | None
    echo: bool
    grammar: GrammarRequest | None = None
    ensure_complete: bool = False
    timeout_s: float | None
    repetition: Repetition | None


class _Truncation:
    """How many of a prompt's last tokens count; -1: as many as possible."""

    _count = Integer(1, LARGEST_BUDGET)

    def __call__(self, value: object, path: str) -> int:
        count = Integer(-1, LARGEST_BUDGET)(value, path)
        if count == 0:
            raise InvalidRequestError(f"{path} must be -1 or at least 1, not 0.", param=path)
        return count

    def schema(self) -> Schema:
        return {"anyOf": [{"enum": [-1]}, self._count.schema()]}


_INCLUDE_USAGE = Field("include_usage", Boolean(), False, "end in a chunk with the usage")
_CONTINUOUS_USAGE = Field(
    "continuous_usage_stats",
    Boolean(),
    False,
    "give the usage so far in every chunk; only with include_usage",
)
_STREAM_OPTION_FIELDS = table(
    (_INCLUDE_USAGE, _CONTINUOUS_USAGE, Field("include_obfuscation", Neutral((False,)), None))
)

MODEL: Field[str | None] = Field("model", Name(), None, "the served model's name; may be left out")
N = Field("n", Integer(1, MAX_SEQUENCES), 1, "answers to each prompt")

_MIN_TOKENS = Field(
    "min_tokens", Integer(0, LARGEST_BUDGET), 0, "least tokens to generate before any stop counts"
)
_TEMPERATURE: Field[float | None] = Field(
    "temperature",
    Number(0, 2),
    None,
    "0 takes the likeliest token; default: generation_config.json's, or 1",
)
_TOP_P: Field[float | None] = Field(
    "top_p",
    Number(0, 1, above_minimum=True),
    None,
    "sample from the likeliest tokens of this mass; default: generation_config.json's, or 1",
)
_TOP_K: Field[int | None] = Field(
    "top_k",
    Integer(-1, _MAX_TOP_K),
    None,
    "sample from so many of the likeliest tokens, 0 or -1: all;"
    " default: generation_config.json's, or all",
)
_MIN_P: Field[float | None] = Field(
    "min_p",
    Number(0, 1),
    None,
    "drop tokens less likely than this share of the likeliest;"
    " default: generation_config.json's, or 0",
)
_PRESENCE = Field(
    "presence_penalty", Number(-2, 2), 0.0, "subtracted from the logits of generated tokens"
)
_FREQUENCY = Field(
    "frequency_penalty", Number(-2, 2), 0.0, "the same, times how often each was generated"
)
_REPETITION: Field[float | None] = Field(
    "repetition_penalty",
    Number(0, 10, above_minimum=True),
    None,
    "divides positive logits of tokens of prompt and answer, multiplies negative ones;"
    " default: generation_config.json's, or 1",
)
_LOGIT_BIAS: Field[tuple[tuple[int, float], ...]] = Field(
    "logit_bias", TokenBiases(100, MAX_BIASES), (), "by token id, added to its logit"
)
_ALLOWED_TOKEN_IDS: Field[tuple[int, ...] | None] = Field(
    "allowed_token_ids", TokenIds(1, MAX_ALLOWED_IDS), None, "the only ids that may be generated"
)
_BAD_WORDS: Field[tuple[str, ...]] = Field(
    "bad_words",
    ListOf(Text(1, MAX_BAD_WORD_CHARS), max_items=MAX_BAD_WORDS // 2),
    (),
    "texts whose tokens, with or without a space before, are never generated in that order",
)
_SEED: Field[int | None] = Field(
    "seed", Integer(-(1 << 63), (1 << 64) - 1), None, "same seed, same request, same tokens"
)
_STOP: Field[tuple[str, ...]] = Field(
    "stop", OneOrMany(Text(1, MAX_STOP_CHARS), MAX_STOPS), (), "strings that end an answer"
)
_STOP_TOKEN_IDS: Field[tuple[int, ...]] = Field(
    "stop_token_ids", TokenIds(0, MAX_STOP_TOKEN_IDS), (), "ids that end an answer, as end ids do"
)
_INCLUDE_STOP = Field(
    "include_stop_str_in_output", Boolean(), False, "keep in the text what ended it"
)
_SKIP_SPECIAL = Field(
    "skip_special_tokens", Boolean(), True, "leave control tokens out of the text"
)
_PRIORITY = Field(
    "priority",
    Integer(-(1 << 31), (1 << 31) - 1),
    0,
    "of requests that wait, the least comes first",
)
_STREAM = Field("stream", Boolean(), False, "answer as server-sent events")
_STREAM_OPTIONS: Field[Values | None] = Field(
    "stream_options",
    Object(_STREAM_OPTION_FIELDS),
    None,
    "only where stream is true; include_usage: end in a chunk with the usage;"
    " continuous_usage_stats: with include_usage, give the usage so far in every chunk",
)
_IGNORE_EOS = Field("ignore_eos", Boolean(), False, "go on after the model's end ids")
_RETURN_TOKEN_IDS = Field("return_token_ids", Boolean(), False, "tell the ids of prompt and answer")
_TOKENS_AS_IDS = Field(
    "return_tokens_as_token_ids", Boolean(), False, "write tokens of logprobs as token_id:ID"
)
_PROMPT_LOGPROBS: Field[int | None] = Field(
    "prompt_logprobs",
    Integer(0, MAX_LOGPROBS),
    None,
    "tell the log-probabilities of the prompt's tokens, with so many of the likeliest;"
    " not in streams",
)
_TRUNCATE: Field[int | None] = Field(
    "truncate_prompt_tokens",
    _Truncation(),
    None,
    "take only the last so many tokens of a prompt; -1: what the context holds beside the answer",
)
_REQUEST_ID: Field[str | None] = Field(
    "request_id", RequestId(), None, "the request's id, where no X-Request-Id header gives one"
)

_CACHE_SALT: Field[str | None] = Field(
    "cache_salt", Name(), None, "only requests of the same salt share cached prefixes"
)
_PROMPT_CACHE_KEY: Field[str | None] = Field(
    "prompt_cache_key",
    Name(),
    None,
    "names a session, whose prefix stays cached for --session-grace-s;"
    " so does the header X-Session-ID",
)

_TIMEOUT: Field[float | None] = Field(
    "timeout_s",
    Number(0, MAX_TIMEOUT_S, above_minimum=True),
    None,
    "seconds after which an answer is cut, waiting included",
)
_MAX_SIZE = Field("max_pattern_size", Integer(1, MAX_PATTERN_SIZE), 0, required=True)
_MIN_SIZE = Field("min_pattern_size", Integer(1, MAX_PATTERN_SIZE), 1)
_MIN_COUNT = Field("min_count", Integer(2, 1 << 20), 0, required=True)
_REPETITION_DETECTION: Field[Values | None] = Field(
    "repetition_detection",
    Object(table((_MAX_SIZE, _MIN_SIZE, _MIN_COUNT))),
    None,
    "cut an answer that repeats min_pattern_size to max_pattern_size tokens min_count times in a"
    " row",
)

OPTION_FIELDS = (
    MODEL,
    _MIN_TOKENS,
    _TEMPERATURE,
    _TOP_P,
    _TOP_K,
    _MIN_P,
    _PRESENCE,
    _FREQUENCY,
    _REPETITION,
    _LOGIT_BIAS,
    _ALLOWED_TOKEN_IDS,
    _BAD_WORDS,
    _SEED,
    _STOP,
    _STOP_TOKEN_IDS,
    _INCLUDE_STOP,
    _SKIP_SPECIAL,
    N,
    _PRIORITY,
    _STREAM,
    _STREAM_OPTIONS,
    _IGNORE_EOS,
    _RETURN_TOKEN_IDS,
    _TOKENS_AS_IDS,
    _PROMPT_LOGPROBS,
    _TRUNCATE,
    _REQUEST_ID,
    _CACHE_SALT,
    _PROMPT_CACHE_KEY,
    _TIMEOUT,
    _REPETITION_DETECTION,
    Field("user", Inert(Text()), None),
    Field("metadata", Inert(Mapped()), None),
    Field("store", Inert(Boolean()), None),
    Field("service_tier", Inert(Text()), None),
    Field("safety_identifier", Inert(Text()), None),
    Field("spaces_between_special_tokens", Inert(Boolean()), None),
    Field("length_penalty", Neutral((1,)), None),
    Field("use_beam_search", Neutral((False,)), None),
    Field("early_stopping", Neutral((False,)), None),
    Field("logits_processors", Neutral(([],)), None),
    *GRAMMAR_FIELDS,
    ENSURE_COMPLETE,
    Field("guided_decoding_backend", Neutral(("auto",)), None),
    Field("guided_whitespace_pattern", Neutral(), None),
    Field("kv_transfer_params", Neutral(), None),
    Field("vllm_xargs", Neutral(({},)), None),
)


def read_options(
    values: Values, *, max_tokens: int | None, logprobs: int | None, echo: bool
) -> GenerationOptions:
    """Take the options out of what a table with OPTION_FIELDS read.

    The others are not quite the same in both requests.
    """
    stream, stream_options, seed = values[_STREAM], values[_STREAM_OPTIONS], values[_SEED]
    if stream_options is not None and not stream:
        raise InvalidRequestError(
            "stream_options may only be given where stream is true.", param="stream_options"
        )
    if stream and values[_PROMPT_LOGPROBS] is not None:
        raise InvalidRequestError(
            "prompt_logprobs are not told in streams.", param="prompt_logprobs"
        )
    if max_tokens is not None and values[_MIN_TOKENS] > max_tokens:
        raise InvalidRequestError(
            f"min_tokens={values[_MIN_TOKENS]} exceeds max_tokens={max_tokens}.",
            param="min_tokens",
        )
    top_k, grammar = values[_TOP_K], read_grammar(values)
    if values[ENSURE_COMPLETE] and grammar is None:
        raise InvalidRequestError(
            "ensure_complete needs a grammar, such as a response_format.", param="ensure_complete"
        )
    tells_usage = stream_options is not None and stream_options[_INCLUDE_USAGE]
    return GenerationOptions(
        model=values[MODEL],
        request_id=values[_REQUEST_ID],
        max_tokens=max_tokens,
        min_tokens=values[_MIN_TOKENS],
        temperature=values[_TEMPERATURE],
        top_p=values[_TOP_P],
        top_k=None if top_k is None else max(0, top_k),
        min_p=values[_MIN_P],
        presence_penalty=values[_PRESENCE],
        frequency_penalty=values[_FREQUENCY],
        repetition_penalty=values[_REPETITION],
        logit_bias=values[_LOGIT_BIAS],
        allowed_token_ids=values[_ALLOWED_TOKEN_IDS],
        bad_words=values[_BAD_WORDS],
        seed=None if seed is None else seed & ((1 << 64) - 1),
        stop=values[_STOP],
        stop_token_ids=values[_STOP_TOKEN_IDS],
        include_stop=values[_INCLUDE_STOP],
        skip_special_tokens=values[_SKIP_SPECIAL],
        n=values[N],
        priority=values[_PRIORITY],
        stream=stream,
        include_usage=tells_usage,
        # As vLLM has it: usage in chunks only where it ends the stream as well.
        continuous_usage=stream_options is not None
        and tells_usage
        and stream_options[_CONTINUOUS_USAGE],
        ignore_eos=values[_IGNORE_EOS],
        return_token_ids=values[_RETURN_TOKEN_IDS],
        tokens_as_ids=values[_TOKENS_AS_IDS],
        logprobs=logprobs,
        prompt_logprobs=values[_PROMPT_LOGPROBS],
        truncate_prompt_tokens=values[_TRUNCATE],
        cache_salt=values[_CACHE_SALT],
        session=values[_PROMPT_CACHE_KEY],
        echo=echo,
        grammar=grammar,
        ensure_complete=values[ENSURE_COMPLETE],
        timeout_s=values[_TIMEOUT],
        repetition=_read_repetition(values[_REPETITION_DETECTION]),
    )


def _read_repetition(values: Values | None) -> Repetition | None:
    if values is None:
        return None
    repetition = Repetition(
        min_size=values[_MIN_SIZE], max_size=values[_MAX_SIZE], min_count=values[_MIN_COUNT]
    )
    if repetition.min_size > repetition.max_size:
        raise InvalidRequestError(
            f"min_pattern_size={repetition.min_size} exceeds"
            f" max_pattern_size={repetition.max_size}",
            param="repetition_detection.min_pattern_size",
        )
    return repetition

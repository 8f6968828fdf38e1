"""What a request asks of the engine: a sequence per prompt and sample, its budget and its seed."""

import secrets
from collections.abc import Sequence
from typing import TypeVar

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.http.prompts import check_vocabulary
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.options import GenerationOptions
from jaxserve.types import MAX_BAD_WORD_TOKENS, GenerationRequest, SamplingParams

T = TypeVar("T")

# OpenAI's default; a chat's is what is left of the context.
COMPLETION_MAX_TOKENS = 16

_MASK = (1 << 64) - 1


def plan_sequences(
    prompts: Sequence[tuple[int, ...]],
    options: GenerationOptions,
    model: ServedModel,
    *,
    request_id: str,
    param: str,
    default_max_tokens: int | None,
    tells_echo: bool,
    session: str | None,
    max_sequences: int,
) -> list[GenerationRequest]:
    """Plan sequence p * n + i for sample i of prompt p.

    `param` is the field that holds the prompts. Where the request names no budget, it is
    `default_max_tokens`, or less where the context ends before; None takes all of the context.
    `tells_echo`: the prompt's tokens are told with the answer's.
    """
    if len(prompts) * options.n > max_sequences:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={options.n} exceed {max_sequences} sequences.",
            param="n" if options.n > 1 else param,
        )
    bad_words = _bad_words(options, model)
    _check_options(options, bad_words, model)
    # Clients may send the same request id twice at once; the engine's must differ.
    unique_id = f"{request_id}.{secrets.token_hex(4)}"
    return [
        GenerationRequest(
            request_id=f"{unique_id}.{p * options.n + i}",
            prompt_ids=prompt,
            sampling=_sampling(
                prompt, i, options, bad_words, model, param, default_max_tokens, tells_echo
            ),
            priority=options.priority,
            cache_salt=options.cache_salt,
            session=session,
        )
        for p, prompt in enumerate(prompts)
        for i in range(options.n)
    ]


def prompt_limit(
    options: GenerationOptions, model: ServedModel, *, default_max_tokens: int | None
) -> int | None:
    """Return how many of a prompt's last tokens count; None: all.

    `default_max_tokens` is as in `plan_sequences`.
    """
    if options.truncate_prompt_tokens != -1:
        return options.truncate_prompt_tokens
    budget = default_max_tokens if options.max_tokens is None else options.max_tokens
    return max(model.max_model_len - max(budget or 0, options.min_tokens, 1), 1)


def derive_seed(seed: int, sample: int) -> int:
    """Give the 64-bit seed of a sample: the seed itself for sample 0, SplitMix64 of it for others.

    It does not depend on the prompt's place in its request, so a prompt's answer does not either.
    """
    if sample == 0:
        return seed
    z = (seed + sample * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _sampling(
    prompt: tuple[int, ...],
    sample: int,
    options: GenerationOptions,
    bad_words: tuple[tuple[int, ...], ...],
    model: ServedModel,
    param: str,
    default_max_tokens: int | None,
    tells_echo: bool,
) -> SamplingParams:
    defaults = model.defaults

    def choose(wanted: T | None, default: T) -> T:
        return default if wanted is None else wanted

    top_k = choose(options.top_k, defaults.top_k)
    max_tokens = _budget(len(prompt), options.max_tokens, default_max_tokens, model, param)
    if options.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens={options.min_tokens} exceeds the {max_tokens} tokens that this answer may"
            " have; max_tokens can raise that as far as the context goes.",
            param="min_tokens",
        )
    told = [options.prompt_logprobs, options.logprobs if tells_echo else None]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        seed=secrets.randbits(64) if options.seed is None else derive_seed(options.seed, sample),
        temperature=choose(options.temperature, defaults.temperature),
        top_k=top_k if top_k < model.vocab_size else 0,
        top_p=choose(options.top_p, defaults.top_p),
        min_p=choose(options.min_p, defaults.min_p),
        stop_token_ids=_end_ids(options, model),
        logit_bias=options.logit_bias,
        allowed_token_ids=(
            None if options.allowed_token_ids is None else frozenset(options.allowed_token_ids)
        ),
        bad_words=bad_words,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=choose(options.repetition_penalty, defaults.repetition_penalty),
        num_logprobs=options.logprobs,
        num_prompt_logprobs=max((n for n in told if n is not None), default=None),
    )


def _check_options(
    options: GenerationOptions, bad_words: Sequence[tuple[int, ...]], model: ServedModel
) -> None:
    """Refuse ids that the model does not know, and options that leave nothing to sample."""
    check_vocabulary([i for i, _ in options.logit_bias], model, param="logit_bias")
    check_vocabulary(options.stop_token_ids, model, param="stop_token_ids")
    if options.allowed_token_ids is None:
        return
    check_vocabulary(options.allowed_token_ids, model, param="allowed_token_ids")
    banned = {ids[0] for ids in bad_words if len(ids) == 1}
    if options.min_tokens:
        banned |= _end_ids(options, model)
    if banned.issuperset(options.allowed_token_ids):
        raise InvalidRequestError(
            "bad_words and min_tokens ban every one of allowed_token_ids.",
            param="allowed_token_ids",
        )


def _end_ids(options: GenerationOptions, model: ServedModel) -> frozenset[int]:
    ends = frozenset() if options.ignore_eos else model.end_token_ids
    return ends.union(options.stop_token_ids)


def _bad_words(options: GenerationOptions, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokenize bad words as they are spelled, and as they are inside a text: behind a space."""
    sequences: list[tuple[int, ...]] = []
    for i, word in enumerate(options.bad_words):
        for spelling in (word, f" {word.lstrip()}"):
            ids = tuple(model.tokenizer.encode(spelling, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"bad_words[{i}] has {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are"
                    " looked for.",
                    param=f"bad_words[{i}]",
                )
            if ids and ids not in sequences:
                sequences.append(ids)
    return tuple(sequences)


def _budget(
    num_prompt_tokens: int,
    wanted: int | None,
    default: int | None,
    model: ServedModel,
    param: str,
) -> int:
    limit = model.max_model_len
    # Clients that shorten a conversation tell this error by these words, not by its code.
    known_phrase = "This model's maximum context length"
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"{known_phrase} is {limit} tokens; the prompt has {num_prompt_tokens} tokens, which"
            " leaves no room for an answer.",
            param=param,
        )
    if wanted is None:
        return room if default is None else min(default, room)
    # An echo alone: the engine's one token is dropped.
    wanted = max(wanted, 1)
    if wanted > room:
        raise ContextLengthError(
            f"{known_phrase} is {limit} tokens; the prompt has {num_prompt_tokens} tokens, and"
            f" max_tokens is {wanted}: {num_prompt_tokens + wanted} in all.",
            param=param,
        )
    return wanted

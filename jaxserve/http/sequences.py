"""What a request asks of the engine: a sequence per prompt and sample, its budget and its seed."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.http.prompts import check_vocabulary, context_phrase
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.options import GenerationOptions
from jaxserve.openai.responses import Answer
from jaxserve.types import MAX_BAD_WORD_TOKENS, GenerationRequest, SamplingParams

T = TypeVar("T")

_MASK = (1 << 64) - 1


def plan_sequences(
    prompts: Sequence[tuple[int, ...]],
    options: GenerationOptions,
    model: ServedModel,
    kind: type[Answer],
    *,
    request_id: str,
    session: str | None,
) -> list[GenerationRequest]:
    """Plan sequence p * n + i for sample i of prompt p; the prompts fit the context.

    Where the prompt's tokens are to be scored, its first sample alone does that.
    """
    bad_words = _bad_words(options, model)
    _check_options(options, bad_words, model)
    base = _sampling(options, bad_words, model, kind)
    # Clients may send the same request id twice at once; the engine's must differ.
    unique_id = f"{request_id}.{secrets.token_hex(4)}"
    requests = []
    for p, prompt in enumerate(prompts):
        max_tokens = _budget(len(prompt), options, model, kind)
        for i in range(options.n):
            sampling = replace(
                base,
                max_tokens=max_tokens,
                seed=secrets.randbits(64) if options.seed is None else derive_seed(options.seed, i),
                num_prompt_logprobs=None if i else base.num_prompt_logprobs,
            )
            requests.append(
                GenerationRequest(
                    request_id=f"{unique_id}.{p * options.n + i}",
                    prompt_ids=prompt,
                    sampling=sampling,
                    priority=options.priority,
                    cache_salt=options.cache_salt,
                    session=session,
                )
            )
    return requests


def prompt_limit(options: GenerationOptions, model: ServedModel, kind: type[Answer]) -> int | None:
    """Return how many of a prompt's last tokens count; None: all."""
    if options.truncate_prompt_tokens != -1:
        return options.truncate_prompt_tokens
    return max(prompt_room(options, model, kind), 1)


def prompt_room(options: GenerationOptions, model: ServedModel, kind: type[Answer]) -> int:
    """Return how many tokens of the context an answer's budget leaves to a prompt."""
    budget = kind.default_max_tokens if options.max_tokens is None else options.max_tokens
    return model.max_model_len - max(budget or 0, options.min_tokens, 1)


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
    options: GenerationOptions,
    bad_words: tuple[tuple[int, ...], ...],
    model: ServedModel,
    kind: type[Answer],
) -> SamplingParams:
    """Return what all sequences of a request have in common; budget and seed are theirs."""
    defaults = model.defaults

    def choose(wanted: T | None, default: T) -> T:
        return default if wanted is None else wanted

    top_k = choose(options.top_k, defaults.top_k)
    tells_echo = options.echo and kind.tells_echo
    told = [options.prompt_logprobs, options.logprobs if tells_echo else None]
    return SamplingParams(
        max_tokens=1,
        seed=0,
        min_tokens=options.min_tokens,
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
    num_prompt_tokens: int, options: GenerationOptions, model: ServedModel, kind: type[Answer]
) -> int:
    """Return the most tokens that an answer may have."""
    room = model.max_model_len - num_prompt_tokens
    if options.max_tokens is None:
        default = kind.default_max_tokens
        budget = room if default is None else min(default, room)
    else:
        # An echo alone: the engine's one token is dropped.
        budget = max(options.max_tokens, 1)
    if budget > room:
        raise ContextLengthError(
            f"{context_phrase(model)}; the prompt has {num_prompt_tokens} tokens, and max_tokens"
            f" is {budget}: {num_prompt_tokens + budget} in all.",
            param=kind.prompt_param,
        )
    if options.min_tokens > budget:
        raise InvalidRequestError(
            f"min_tokens={options.min_tokens} exceeds the {budget} tokens that this answer may"
            " have; max_tokens can raise that as far as the context goes.",
            param="min_tokens",
        )
    return budget

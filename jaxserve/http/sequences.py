"""What a request asks of the engine: a sequence per prompt and sample, its budget and its seed."""

import secrets
from collections.abc import Sequence

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.requests import GenerationOptions
from jaxserve.types import GenerationRequest, SamplingParams

_MASK = (1 << 64) - 1


def plan_sequences(
    prompts: Sequence[tuple[int, ...]],
    options: GenerationOptions,
    model: ServedModel,
    *,
    request_id: str,
    param: str,
    default_max_tokens: int | None,
    max_sequences: int,
) -> list[GenerationRequest]:
    """Plan sequence p * n + i for sample i of prompt p.

    `param` is the field that holds the prompts. Where the request names no budget, it is
    `default_max_tokens`, or less where the context ends before; None takes all of the context.
    """
    if len(prompts) * options.n > max_sequences:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={options.n} exceed {max_sequences} sequences.",
            param="n" if options.n > 1 else param,
        )
    # Clients may send the same request id twice at once; the engine's must differ.
    unique_id = f"{request_id}.{secrets.token_hex(4)}"
    return [
        GenerationRequest(
            request_id=f"{unique_id}.{p * options.n + i}",
            prompt_ids=prompt,
            sampling=_sampling(prompt, i, options, model, param, default_max_tokens),
        )
        for p, prompt in enumerate(prompts)
        for i in range(options.n)
    ]


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
    model: ServedModel,
    param: str,
    default_max_tokens: int | None,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=_budget(len(prompt), options.max_tokens, default_max_tokens, model, param),
        seed=secrets.randbits(64) if options.seed is None else derive_seed(options.seed, sample),
        temperature=options.temperature,
        top_k=options.top_k if options.top_k < model.vocab_size else 0,
        top_p=options.top_p,
        min_p=options.min_p,
        stop_token_ids=frozenset() if options.ignore_eos else model.end_token_ids,
    )


def _budget(
    num_prompt_tokens: int,
    wanted: int | None,
    default: int | None,
    model: ServedModel,
    param: str,
) -> int:
    limit = model.max_model_len
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens, which leaves no room for an answer"
            f" in the context of {limit} tokens.",
            param=param,
        )
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}: "
            f"{num_prompt_tokens + wanted} in all, beyond the context of {limit} tokens.",
            param=param,
        )
    return wanted

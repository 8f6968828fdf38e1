"""What a request's options make of the logits, word for word in float64, one row at a time.

Written from what the fields mean in OpenAI's and vLLM's APIs; it knows nothing of tables or slots.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxserve.types import SamplingParams

Float64Array = npt.NDArray[np.float64]


def adjusted(
    logits_V: npt.NDArray[np.floating],
    sampling: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> Float64Array:
    """Return the logits that the id after these is sampled from; -inf: never."""
    z_V = logits_V.astype(np.float64)
    banned = banned_ids(sampling, output_ids, len(z_V))
    for token_id, bias in sampling.logit_bias:
        z_V[token_id] += bias
    counts = Counter(output_ids)
    for token_id in {*prompt_ids, *output_ids}:
        if z_V[token_id] > 0:
            z_V[token_id] /= sampling.repetition_penalty
        else:
            z_V[token_id] *= sampling.repetition_penalty
    for token_id, count in counts.items():
        z_V[token_id] -= sampling.frequency_penalty * count
        z_V[token_id] -= sampling.presence_penalty
    z_V[sorted(banned)] = -np.inf
    return z_V


def banned_ids(sampling: SamplingParams, output_ids: Sequence[int], vocab_size: int) -> set[int]:
    """Return the ids that may not come next."""
    banned: set[int] = set()
    if sampling.allowed_token_ids is not None:
        banned |= set(range(vocab_size)) - sampling.allowed_token_ids
    if len(output_ids) < sampling.min_tokens:
        banned |= sampling.stop_token_ids
    for *before, last in sampling.bad_words:
        if list(output_ids[len(output_ids) - len(before) :]) == before:
            banned.add(last)
    return banned

"""Masks of grammars that the device does not keep, made on the host.

Device thread only. A guide goes along with the ids that the host knows; the device's own state, of
grammars that it keeps, is one step ahead of that.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from jaxserve.engine.request import Request
from jaxserve.types import Guidance, Guide

Words = npt.NDArray[np.uint32]


def host_masks(requests: Iterable[Request]) -> list[tuple[int, Words]]:
    """Return the slots that need a mask for the token they are about to sample, and the masks."""
    return [
        (request.slot, _mask(request, request.guide, request.guidance))
        for request in requests
        if request.grammar_path == "host"
        and request.guide is not None
        and request.guidance is not None
    ]


def _mask(request: Request, guide: Guide, guidance: Guidance) -> Words:
    """Go along with what was read since, and tell what may follow: as the device does it."""
    request.catch_up(guide)
    words = _in_time(request, guide, guidance)
    ends = np.zeros_like(words)
    for token_id in guidance.end_ids:
        if token_id < 32 * len(words):
            ends[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    text = words & ~ends
    if guide.may_end:
        return text | ends
    return text if text.any() else words


def _in_time(request: Request, guide: Guide, guidance: Guidance) -> Words:
    if guidance.ensures_complete:
        max_left = request.sampling.max_tokens - len(request.output_ids) - 1
        words = guide.allowed_words(max_left)
        if guide.may_end or words.any():
            return words
    return guide.allowed_words()

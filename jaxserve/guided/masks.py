"""Masks over token ids, packed: bit t % 32 (least significant first) of word t // 32 is token t."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def num_words(num_ids: int) -> int:
    """Return W, the words of a mask over so many ids."""
    return -(-num_ids // 32)


def packed(is_set_V: NDArray[np.bool_], width: int | None = None) -> Words:
    """Pack a mask, to `width` words where given; ids past its end are not set."""
    words_W = np.zeros(num_words(len(is_set_V)) if width is None else width, "<u4")
    bits = np.packbits(is_set_V, bitorder="little")
    words_W.view(np.uint8)[: len(bits)] = bits
    return words_W.astype(np.uint32, copy=False)


def unpacked(words_W: Words) -> NDArray[np.bool_]:
    """Return a mask as bool [32 W]."""
    bits = np.unpackbits(words_W.astype("<u4").view(np.uint8), bitorder="little")
    return bits.astype(np.bool_)


def has_id(words_W: Words, token_id: int) -> bool:
    """Tell whether an id is set."""
    return bool(words_W[token_id >> 5] >> (token_id & 31) & 1)


def with_ids(words_W: Words, token_ids: Iterable[int]) -> Words:
    """Return a mask with these ids set as well."""
    changed = words_W.copy()
    for token_id in token_ids:
        changed[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return changed

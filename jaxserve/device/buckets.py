"""The few shapes that step programs are compiled for, and what fits them; it knows no arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxserve.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendBucket:
    """One compiled size of the extend program.

    Attributes:
        tokens: token rows of the program, a multiple of `block`.
        block: rows that chunks are laid out in: a chunk takes ceil(len / block) blocks of its own.
    """

    tokens: int
    block: int

    def fits(self, lengths: Iterable[int]) -> bool:
        """Say whether chunks of these lengths fit one call."""
        return sum(-(-length // self.block) for length in lengths) * self.block <= self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendChunk:
    """Known tokens of one sequence, to be written at positions [start, start + len(token_ids)).

    Attributes:
        sample: True where these are the last known tokens: the id at position start + len is
            sampled.
        full_start: full-attention layers have what they need of the positions before this one, in
            pages that others may be reading: they write none of it.
        targets: the known ids that follow the first of these tokens, one each, where their
            log-probabilities are wanted; such a chunk has an extend of the smallest bucket alone.
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    sample: bool
    full_start: int = 0
    targets: Sequence[int] = ()


def smallest_extend(buckets: Sequence[ExtendBucket], lengths: Sequence[int]) -> ExtendBucket:
    """Return the smallest of ascending buckets that chunks of these lengths fit."""
    for bucket in buckets:
        if bucket.fits(lengths):
            return bucket
    raise InvariantError(f"chunks of {lengths} tokens fit no extend bucket")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBucket:
    """One compiled size of the decode program.

    Attributes:
        rows: sequences of a step.
        table_size: page-table entries a row can use.
    """

    rows: int
    table_size: int


def smallest_fitting(sizes: Sequence[int], needed: int) -> int:
    """Return the smallest of ascending sizes that is at least `needed`."""
    return next(size for size in sizes if size >= needed)

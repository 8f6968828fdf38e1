"""What the engine asks of the device: the seam that the real ModelRunner and a fake both fill.

Contract. Calls return as soon as the work is queued, and the device does it in call order. A call
captures its arguments: later changes of pages or slots do not reach work that is already queued.
Device thread only.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.device.buckets import ExtendBucket, ExtendChunk
from jaxserve.models.config import AttentionKind
from jaxserve.types import Guidance, SamplingParams, TokenLogprobs


class PendingTokens(Protocol):
    """Ids that the device is still computing; all methods wait for them."""

    def token_ids(self) -> list[int]:
        """Wait until the call's work is done, also where it samples nothing.

        Returns one id per sampled row, in the call's order.
        """
        ...

    def logprobs(self) -> list[TokenLogprobs]:
        """Return the same ids' log-probabilities; meaningless for rows that want none."""
        ...

    def target_logprobs(self) -> list[TokenLogprobs]:
        """Return those of the chunk's targets, of a call whose chunk has any."""
        ...


class RunnerSizes(Protocol):
    """The fixed sizes that a schedule must respect."""

    @property
    def num_pages(self) -> int:
        """Full-attention pages of the KV store, the scratch page 0 included."""
        ...

    @property
    def num_sliding_pages(self) -> int:
        """Sliding layers' pages, the scratch page 0 included."""
        ...

    @property
    def window(self) -> int:
        """Keys that a sliding layer sees, the token's own included."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...

    @property
    def num_slots(self) -> int:
        """Rows of the decode batch."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and output."""
        ...

    @property
    def extend_buckets(self) -> tuple[ExtendBucket, ...]:
        """Ascending by tokens."""
        ...


class Runner(RunnerSizes, Protocol):
    """The device's side of a step."""

    def open_slot(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Give the slot to a sequence: its sampling, the ids so far, empty page tables."""
        ...

    def open_grammar(
        self,
        slot: int,
        guidance: Guidance,
        *,
        state: int,
        end_position: int,
        live_slots: Collection[int],
    ) -> bool:
        """Keep the tokens of an open slot to a grammar, from a state of its image on.

        Slots that are not live no longer need theirs. `end_position` is the first one that the
        budget does not reach. False: there is no image, or no room for it; then each token needs
        `write_masks` before its step is queued.
        """
        ...

    def set_grammar_state(self, slot: int, state: int) -> None:
        """Set where a slot's next extend is in the image of its grammar when it samples."""
        ...

    def count_tokens(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Note generated ids that an extend takes in; decodes do so of their own accord.

        `output_ids` are all that the sequence has so far, these included.
        """
        ...

    def write_masks(self, masks: Sequence[tuple[int, npt.NDArray[np.uint32]]]) -> None:
        """Set the next token's mask of slots; bit b of word w is token 32·w + b."""
        ...

    def set_pages(self, slot: int, start: int, pages: Sequence[int], kind: AttentionKind) -> None:
        """Set entries [start, start + len(pages)) of the slot's page table of a kind."""
        ...

    def copy_pages(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy keys and values of pages, at most num_slots times.

        A copy is the source and destination of a full-attention page, then of a sliding one. All
        sources are read before any destination is written.
        """
        ...

    def extend(self, chunks: Sequence[ExtendChunk]) -> PendingTokens:
        """Write the KV of chunks that fit a bucket, one a slot; sample where one says so."""
        ...

    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> PendingTokens:
        """Run each slot's last sampled id at positions[i] and sample the id at positions[i] + 1.

        The last sampled id never leaves the device for this, so a decode can be queued before it is
        read.
        """
        ...

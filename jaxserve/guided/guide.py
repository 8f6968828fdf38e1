"""One sequence's way through a grammar, on the host, a token at a time: `Guide`s of types.py."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.host import HostMatcher
from jaxserve.guided.tables import DEAD_STATE, START_STATE, TokenTables


class TablesGuide:
    """Goes through tables; its states are theirs."""

    def __init__(
        self,
        tables: TokenTables,
        distance_S: NDArray[np.int64] | None = None,
        forced_id_S: NDArray[np.int32] | None = None,
    ) -> None:
        """`distance_S` has the tokens to an end, the end id included.

        `forced_id_S` has the only id of each state's mask, -1 where that has others.
        """
        self._tables = tables
        self._distance_S = distance_S
        self._forced_id_S = forced_id_S
        self._state = START_STATE

    @property
    def state(self) -> int:
        """The state, -1 after the text's end."""
        return self._state

    @property
    def may_end(self) -> bool:
        """Whether the text may end here, or has ended."""
        return self._state == DEAD_STATE or bool(self._tables.accepting_S[self._state])

    def allowed_words(self, max_left: int | None = None) -> NDArray[np.uint32]:
        """Return the mask of the state; nothing after the text's end."""
        masks_DW = self._tables.masks_DW
        if self._state == DEAD_STATE:
            return np.zeros_like(masks_DW[0])
        words: NDArray[np.uint32] = masks_DW[self._tables.mask_id_S[self._state]]
        if max_left is None or self._distance_S is None:
            return words
        next_C = self._tables.next_SC[self._state]
        in_time_C = (next_C >= 0) & (self._distance_S[next_C] <= max_left)
        packed = np.packbits(in_time_C[self._tables.class_of_V], bitorder="little")
        in_time = np.zeros_like(words)
        in_time.view(np.uint8)[: len(packed)] = packed
        return in_time & words

    def forced_ids(self, limit: int) -> Sequence[int]:
        """Return the first of the ids that must follow, at most so many."""
        ids: list[int] = []
        state = self._state
        while self._forced_id_S is not None and state != DEAD_STATE and len(ids) < limit:
            token_id = int(self._forced_id_S[state])
            if token_id < 0:
                break
            ids.append(token_id)
            state = self._tables.advance(state, token_id)
        return ids

    def advance(self, token_id: int) -> None:
        """Go on behind a token; one that is not allowed ends the text."""
        if self._state != DEAD_STATE:
            self._state = self._tables.advance(self._state, token_id)


class MatcherGuide:
    """Goes along with a matcher, which is its own from now on; there are no states to tell."""

    state = START_STATE

    def __init__(self, matcher: HostMatcher, *, num_words: int) -> None:
        """`num_words` are those of a mask."""
        self._matcher = matcher
        self._num_words = num_words
        self._has_ended = False

    @property
    def may_end(self) -> bool:
        """Whether the text may end here, or has ended."""
        return self._has_ended or self._matcher.accepting

    def allowed_words(self, max_left: int | None = None) -> NDArray[np.uint32]:
        """Return the mask of the tokens that may follow; nothing after the text's end."""
        words = np.zeros(self._num_words, np.uint32)
        if not self._has_ended:
            self._matcher.fill_mask(words)
        return words

    def forced_ids(self, limit: int) -> Sequence[int]:
        """Return the first of the ids that must follow, at most so many."""
        return () if self._has_ended else self._matcher.forced_ids()[:limit]

    def advance(self, token_id: int) -> None:
        """Go on behind a token; one that is not allowed ends the text."""
        self._has_ended = self._has_ended or not self._matcher.advance(token_id)

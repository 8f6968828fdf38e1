"""One sequence's way through a grammar, on the host, a token at a time: `Guide`s of types.py."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.masks import packed, with_ids
from jaxserve.guided.tables import (
    DEAD_STATE,
    START_STATE,
    Grammar,
    HostGrammar,
    TokenTables,
)
from jaxserve.guided.triggered import Forced, Opening, Thought, Trigger
from jaxserve.types import Guide


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
        return packed(in_time_C[self._tables.class_of_V]) & words

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


class OpenedGuide:
    """Lets a text go before a grammar that has no tables, as `triggered` does for those that do."""

    state = START_STATE

    def __init__(
        self, start: Callable[[], Guide], opening: Trigger | Thought, free_words: NDArray[np.uint32]
    ) -> None:
        """`free_words` is the mask of that text, the ids of `opening` left out."""
        self._start = start
        self._opening = opening
        self._returns = isinstance(opening, Trigger)
        self._trigger_id = opening.token_id if isinstance(opening, Trigger) else opening.end_id
        # May still begin the text that goes before.
        self._start_id = None if isinstance(opening, Trigger) else opening.start_id
        self._free_words = with_ids(free_words, [self._trigger_id])
        self._guide = None if self._start_id is None else start()

    @property
    def may_end(self) -> bool:
        """Whether the text may end here, or has ended."""
        return self._returns if self._guide is None else self._guide.may_end

    def allowed_words(self, max_left: int | None = None) -> NDArray[np.uint32]:
        """Return the mask of the tokens that may follow."""
        if self._guide is None:
            return self._free_words
        words = self._guide.allowed_words(max_left)
        return words if self._start_id is None else with_ids(words, [self._start_id])

    def forced_ids(self, limit: int) -> Sequence[int]:
        """Return the first of the ids that must follow, at most so many."""
        if self._guide is None or self._start_id is not None:
            return ()
        return self._guide.forced_ids(limit)

    def advance(self, token_id: int) -> None:
        """Go on behind a token."""
        is_start = token_id == self._start_id
        self._start_id = None
        if is_start:
            self._guide = None
        elif self._guide is None:
            if token_id == self._trigger_id:
                self._guide = self._start()
        else:
            self._guide.advance(token_id)
            if self._returns and self._guide.may_end:
                self._guide = None


class ForcedGuide:
    """Lets some tokens, and nothing else, go before a grammar."""

    state = START_STATE

    def __init__(self, start: Callable[[], Guide], forced: Forced, num_words: int) -> None:
        """`num_words` are those of a mask."""
        self._start = start
        self._left = [*forced.token_ids]
        self._num_words = num_words
        self._guide: Guide | None = None

    @property
    def may_end(self) -> bool:
        """Whether the text may end here, or has ended."""
        return self._guide is not None and self._guide.may_end

    def allowed_words(self, max_left: int | None = None) -> NDArray[np.uint32]:
        """Return the mask of the tokens that may follow."""
        if self._guide is not None:
            return self._guide.allowed_words(max_left)
        return with_ids(np.zeros(self._num_words, np.uint32), self._left[:1])

    def forced_ids(self, limit: int) -> Sequence[int]:
        """Return the first of the ids that must follow, at most so many."""
        return self._left[:limit] if self._guide is None else self._guide.forced_ids(limit)

    def advance(self, token_id: int) -> None:
        """Go on behind a token."""
        if self._guide is not None:
            self._guide.advance(token_id)
            return
        del self._left[0]
        if not self._left:
            self._guide = self._start()


def start_of(
    grammar: Grammar, host_tokenizer: Callable[[], HostTokenizer], *, num_words: int
) -> Callable[[], Guide]:
    """Return what gives guides of a grammar, on tables or by a matcher.

    `host_tokenizer` gives what a matcher needs; `num_words` are those of a mask.
    """
    if not isinstance(grammar, HostGrammar):
        return lambda: TablesGuide(grammar)
    matcher = HostMatcher(host_tokenizer(), grammar)
    return lambda: MatcherGuide(matcher.copy(), num_words=num_words)


def opened_start(
    start: Callable[[], Guide],
    opening: Opening,
    *,
    vocab_size: int,
    is_text_V: NDArray[np.bool_],
    num_words: int,
) -> Callable[[], Guide]:
    """Return what gives guides of a grammar and what goes before it, as `opened` does for tables.

    `num_words` are those of a mask.
    """
    if isinstance(opening, Forced):
        return lambda: ForcedGuide(start, opening, num_words)
    is_free_V = np.ones(vocab_size, np.bool_) if isinstance(opening, Trigger) else is_text_V
    free_words = packed(is_free_V, num_words)
    return lambda: OpenedGuide(start, opening, free_words)

"""Text that a grammar leaves no choice about: written in one way only, the tokenizer's own.

A forced text can be cut into tokens in many ways. Of those only the canonical one stays in the
tables, so that its tokens are certain before they are sampled: whoever runs the tables may take
them in at once, or sample them one by one, and gets the same. The last token of a forced text is
left open unless something ends there: with what comes next it could be one token.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.tables import START_STATE, TokenTables

MAX_FORCED_BYTES = 256
"""Of a text that is tokenized at once; the rest is when it is reached."""

_PLANE_16_LEAD = b"\xf4"
_OPEN, _UNKNOWN = -1, -2


class CanonicalTables(NamedTuple):
    """Tables with one way through forced texts; `id_S` is the only id of a state, -1: none is.

    Where an id is forced, no other is in the state's mask, though one of equal bytes may be in its
    class. States that no text gets to are as they were.
    """

    tables: TokenTables
    id_S: NDArray[np.int32]


def canonical(
    tables: TokenTables,
    encode: Callable[[str], Sequence[int]],
    *,
    never: Collection[int] = (),
) -> CanonicalTables:
    """Leave the canonical tokens of forced texts alone in the masks.

    `encode` gives a text's ids without a BOS. Ids of `never` are forced nowhere, and the text that
    they would begin is left as it is.
    """
    id_S = _Spelling(tables, encode, never).ids()
    state_F = np.flatnonzero(id_S >= 0)
    class_F = tables.class_of_V[id_S[state_F]]
    next_SC = tables.next_SC.copy()
    next_SC[state_F] = -1
    next_SC[state_F, class_F] = tables.next_SC[state_F, class_F]

    ids, which_F = np.unique(id_S[state_F], return_inverse=True)
    own_KW = np.zeros((len(ids), tables.masks_DW.shape[1]), np.uint32)
    own_KW[np.arange(len(ids)), ids >> 5] = np.uint32(1) << (ids & 31).astype(np.uint32)
    mask_id_S = tables.mask_id_S.astype(np.intp)
    mask_id_S[state_F] = len(tables.masks_DW) + which_F
    used, mask_id_S = np.unique(mask_id_S, return_inverse=True)
    made = replace(
        tables,
        next_SC=next_SC,
        mask_id_S=mask_id_S.reshape(-1).astype(np.int32),
        masks_DW=np.concatenate([tables.masks_DW, own_KW])[used],
    )
    for array in (made.next_SC, made.mask_id_S, made.masks_DW, id_S):
        array.setflags(write=False)
    return CanonicalTables(made, id_S)


class _Spelling:
    """Finds the forced id of each state that a text can get to."""

    def __init__(
        self,
        tables: TokenTables,
        encode: Callable[[str], Sequence[int]],
        never: Collection[int],
    ) -> None:
        self._tables = tables
        self._encode = encode
        self._never = never
        may_be_forced_S = ~tables.accepting_S & (tables.forced_byte_S >= 0)
        self._id_S = np.where(may_be_forced_S, _UNKNOWN, _OPEN).astype(np.int32)
        self._note_single_ids()

    def ids(self) -> NDArray[np.int32]:
        tables, id_S = self._tables, self._id_S
        is_reached_S = np.zeros(len(id_S), np.bool_)
        new = [START_STATE]
        while new:
            is_reached_S[new] = True
            # One more, for -1.
            is_next_S = np.zeros(len(id_S) + 1, np.bool_)
            for state in new:
                if id_S[state] == _UNKNOWN:
                    self._spell(state)
                if id_S[state] >= 0:
                    is_next_S[tables.advance(state, int(id_S[state]))] = True
            is_open_N = id_S[new] < 0
            is_next_S[tables.next_SC[np.asarray(new)[is_open_N]]] = True
            new = np.flatnonzero(is_next_S[:-1] & ~is_reached_S).tolist()
        return np.maximum(id_S, _OPEN)

    def _note_single_ids(self) -> None:
        """Note states with one id alone in their masks."""
        tables = self._tables
        num_ids_D = np.bitwise_count(tables.masks_DW).sum(axis=1)
        for mask in np.flatnonzero(num_ids_D == 1):
            word = int(np.flatnonzero(tables.masks_DW[mask])[0])
            token_id = 32 * word + int(tables.masks_DW[mask, word]).bit_length() - 1
            is_forced_S = (tables.mask_id_S == mask) & ~tables.accepting_S
            self._id_S[is_forced_S] = _OPEN if token_id in self._never else token_id

    def _spell(self, state: int) -> None:
        """Tokenize what must follow a state, and note the ids of the states on that way."""
        way = self._way(state)
        self._id_S[state] = _OPEN
        for on_way, token_id in way:
            if token_id in self._never:
                return
            if on_way == state or self._id_S[on_way] == _UNKNOWN:
                self._id_S[on_way] = token_id

    def _way(self, state: int) -> list[tuple[int, int]]:
        """Return the states and ids of the text that must follow, up to where it is open."""
        tables = self._tables
        run = tables.forced_bytes(state, MAX_FORCED_BYTES)
        # A control token that is part of the grammar: nothing merges with it.
        text_bytes, mark, _ = run.partition(_PLANE_16_LEAD)
        text = text_bytes.decode(errors="ignore")
        if not text or not text_bytes.startswith(text.encode()):
            return []
        way: list[tuple[int, int]] = []
        for token_id in self._encode(text):
            following = tables.advance(state, token_id)
            if following < 0:
                # Not how the grammar wants it written.
                return way[:-1]
            way.append((state, token_id))
            state = following
        is_whole = len(text.encode()) == len(text_bytes)
        is_over = bool(tables.accepting_S[state]) and bool((tables.next_SC[state] < 0).all())
        return way if is_whole and (mark or is_over) else way[:-1]

"""Grammars that begin in mid-stream: nothing is asked of a text until a token calls for it.

A tool call in a text that may hold none, or JSON behind a thought. The free text is one more state
of the tables, so who runs them need not know.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.tables import DEAD_STATE, TokenTables

FREE_STATE = 0


class Trigger(NamedTuple):
    """Any text, which may end; behind the token the grammar, and behind that any text again."""

    token_id: int


class Thought(NamedTuple):
    """A thought goes before the grammar: text that only its marker ends.

    `start_id` is None where the prompt has begun it; else there may be none.
    """

    end_id: int
    start_id: int | None


class Forced(NamedTuple):
    """These tokens, and nothing else, go before the grammar."""

    token_ids: tuple[int, ...]


Opening = Trigger | Thought | Forced
"""What goes before a grammar."""


def anything(vocab_size: int) -> TokenTables:
    """Return tables that allow every id, and an end everywhere."""
    mask_W = np.zeros(-(-vocab_size // 32), np.uint32)
    packed = np.packbits(np.ones(vocab_size, np.bool_), bitorder="little")
    mask_W.view(np.uint8)[: len(packed)] = packed
    made = TokenTables(
        class_of_V=np.ones(vocab_size, np.uint16),
        next_SC=np.array([[DEAD_STATE, FREE_STATE]], np.int16),
        mask_id_S=np.zeros(1, np.int32),
        masks_DW=mask_W[None],
        accepting_S=np.ones(1, np.bool_),
        forced_byte_S=np.full(1, -1, np.int16),
        forced_next_S=np.full(1, -1, np.int16),
    )
    made.freeze()
    return made


def opened(
    tables: TokenTables, opening: Opening, *, vocab_size: int, is_text_V: NDArray[np.bool_]
) -> TokenTables:
    """Return tables of a grammar and what goes before it; raises as these functions do."""
    if isinstance(opening, Trigger):
        return triggered(tables, opening.token_id, vocab_size=vocab_size, returns=True)
    if isinstance(opening, Forced):
        return behind_ids(tables, opening)
    return behind_thought(tables, opening, is_text_V)


_MAX_STATES = int(np.iinfo(np.int16).max)


def triggered(
    tables: TokenTables, trigger_id: int, *, vocab_size: int, returns: bool
) -> TokenTables:
    """Return tables that begin in free text, and pass to the given ones behind `trigger_id`.

    In free text every id below `vocab_size` is allowed, control tokens too, and the text may end.
    `returns`: free text follows where the grammar may end, and the trigger may come again; else
    nothing does. Where the grammar may end and may go on, what it allows is taken as its own.

    Raises:
        ValueError: the tables have as many states as there can be.
    """
    num_states, num_classes = tables.next_SC.shape
    if num_states >= _MAX_STATES:
        raise ValueError(f"{num_states} states leave no room for another one")
    class_of_V = np.zeros(max(vocab_size, len(tables.class_of_V)), np.uint16)
    class_of_V[: len(tables.class_of_V)] = tables.class_of_V
    old_class = int(class_of_V[trigger_id])
    class_of_V[trigger_id] = num_classes

    next_SC = np.full((num_states + 1, num_classes + 1), FREE_STATE, np.int16)
    next_SC[FREE_STATE, num_classes] = 1
    own_SC = np.where(tables.next_SC >= 0, tables.next_SC + 1, -1).astype(np.int16)
    next_SC[1:, :num_classes] = own_SC
    next_SC[1:, num_classes] = own_SC[:, old_class]
    accepting_S = np.append(True, tables.accepting_S)
    if returns:
        is_left_SC = accepting_S[:, None] & (next_SC < 0)
        next_SC = np.where(is_left_SC, next_SC[FREE_STATE], next_SC)
        # What a state with no way on leads to is free text already.
        is_over_S = accepting_S & (np.append(-1, tables.next_SC.max(axis=1)) < 0)
        is_over_S[FREE_STATE] = False
        next_SC = np.where((next_SC > 0) & is_over_S[next_SC], FREE_STATE, next_SC)

    width = -(-len(class_of_V) // 32)
    masks_DW = np.zeros((len(tables.masks_DW) + 1, width), np.uint32)
    masks_DW[:-1, : tables.masks_DW.shape[1]] = tables.masks_DW
    everything = np.packbits(np.ones(len(class_of_V), np.bool_), bitorder="little")
    masks_DW[-1].view(np.uint8)[: len(everything)] = everything
    free_mask = len(masks_DW) - 1
    mask_id_S = np.append(free_mask, tables.mask_id_S).astype(np.int32)
    if returns:
        mask_id_S[accepting_S] = free_mask
    forced_next_S = np.where(tables.forced_next_S >= 0, tables.forced_next_S + 1, -1)
    made = replace(
        tables,
        class_of_V=class_of_V,
        next_SC=next_SC.astype(np.int16),
        mask_id_S=mask_id_S,
        masks_DW=masks_DW,
        accepting_S=accepting_S,
        forced_byte_S=np.append(np.int16(-1), tables.forced_byte_S),
        forced_next_S=np.append(-1, forced_next_S).astype(np.int16),
    )
    made.freeze()
    return made


def behind_thought(
    tables: TokenTables, thought: Thought, is_text_V: NDArray[np.bool_]
) -> TokenTables:
    """Return tables of a thought and what follows it.

    A thought is any number of tokens of `is_text_V`; it cannot end the text.

    Raises:
        ValueError: the tables have as many states as there can be.
    """
    num_states, num_classes = tables.next_SC.shape
    lead = 1 if thought.start_id is None else 2
    inside = lead - 1
    if num_states + lead > _MAX_STATES:
        raise ValueError(f"{num_states} states leave no room for {lead} more")
    # Classes of before, in two each: those of text and others. The markers are of their own.
    class_V = 2 * tables.class_of_V.astype(np.int64) + 2
    class_V += is_text_V
    old_class_V = tables.class_of_V
    own = [thought.end_id] if thought.start_id is None else [thought.end_id, thought.start_id]
    class_V[own] = 2 * num_classes + 4 + np.arange(len(own))
    # Class 0 has to be one that is allowed nowhere.
    _, first, class_of_V = np.unique(class_V, return_index=True, return_inverse=True)
    class_of_V += 1
    is_text_C = np.append(False, is_text_V[first])
    is_text_C[class_of_V[own]] = False

    next_SC = np.full((num_states + lead, len(first) + 1), DEAD_STATE, np.int16)
    old_SC = np.where(tables.next_SC >= 0, tables.next_SC + lead, DEAD_STATE)
    next_SC[lead:, 1:] = old_SC[:, old_class_V[first]]
    next_SC[inside, is_text_C] = inside
    next_SC[inside, class_of_V[thought.end_id]] = lead
    accepting_S = np.append(np.zeros(lead, np.bool_), tables.accepting_S)
    if thought.start_id is not None:
        next_SC[0] = next_SC[lead]
        next_SC[0, class_of_V[thought.start_id]] = inside
        accepting_S[0] = accepting_S[lead]
    masks = [_packed(next_SC[state, class_of_V] >= 0, tables.masks_DW) for state in range(lead)]
    first_mask = len(tables.masks_DW)
    made = replace(
        tables,
        class_of_V=class_of_V.astype(np.uint16),
        next_SC=next_SC,
        mask_id_S=np.append(first_mask + np.arange(lead), tables.mask_id_S).astype(np.int32),
        masks_DW=np.concatenate([tables.masks_DW, masks]),
        accepting_S=accepting_S,
        forced_byte_S=_prepended([-1] * lead, tables.forced_byte_S),
        forced_next_S=_prepended(
            [-1] * lead, np.where(tables.forced_next_S >= 0, tables.forced_next_S + lead, -1)
        ),
    )
    made.freeze()
    return made


def behind_ids(tables: TokenTables, forced: Forced) -> TokenTables:
    """Return tables of some tokens and what follows them; one of them at least.

    Raises:
        ValueError: the tables have as many states as there can be.
    """
    num_states, num_classes = tables.next_SC.shape
    lead = len(forced.token_ids)
    if num_states + lead > _MAX_STATES:
        raise ValueError(f"{num_states} states leave no room for {lead} more")
    # Each of the tokens gets a class of its own.
    own = {token_id: num_classes + i for i, token_id in enumerate(dict.fromkeys(forced.token_ids))}
    class_of_V = tables.class_of_V.copy()
    class_of_V[list(own)] = list(own.values())
    old_classes = [*range(num_classes), *tables.class_of_V[list(own)].tolist()]
    next_SC = np.full((num_states + lead, len(old_classes)), DEAD_STATE, np.int16)
    old_SC = np.where(tables.next_SC >= 0, tables.next_SC + lead, DEAD_STATE)
    next_SC[lead:] = old_SC[:, old_classes]
    for state, token_id in enumerate(forced.token_ids):
        next_SC[state, own[token_id]] = state + 1
    masks = [_packed(next_SC[state, class_of_V] >= 0, tables.masks_DW) for state in range(lead)]
    first_mask = len(tables.masks_DW)
    made = replace(
        tables,
        class_of_V=class_of_V,
        next_SC=next_SC,
        mask_id_S=np.append(first_mask + np.arange(lead), tables.mask_id_S).astype(np.int32),
        masks_DW=np.concatenate([tables.masks_DW, masks]),
        accepting_S=np.append(np.zeros(lead, np.bool_), tables.accepting_S),
        forced_byte_S=_prepended([-1] * lead, tables.forced_byte_S),
        forced_next_S=_prepended(
            [-1] * lead, np.where(tables.forced_next_S >= 0, tables.forced_next_S + lead, -1)
        ),
    )
    made.freeze()
    return made


def _prepended(first: Sequence[int], others: NDArray[np.int16]) -> NDArray[np.int16]:
    return np.append(np.array(first, np.int16), others).astype(np.int16)


def _packed(is_set_V: NDArray[np.bool_], masks_DW: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Pack a mask to as many words as others have."""
    words: NDArray[np.uint32] = np.zeros_like(masks_DW[0])
    packed = np.packbits(is_set_V, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words

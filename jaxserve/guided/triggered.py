"""Grammars that begin in mid-stream: nothing is asked of a text until a token calls for it.

A tool call in a text that may hold none, or JSON behind a thought. The free text is one more state
of the tables, so who runs them need not know.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.guided.masks import num_words, packed
from jaxserve.guided.tables import (
    DEAD_STATE,
    MAX_CLASSES,
    MAX_STATES,
    START_STATE,
    TablesTooLargeError,
    TokenTables,
)

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
    made = TokenTables(
        class_of_V=np.ones(vocab_size, np.uint16),
        next_SC=np.array([[DEAD_STATE, FREE_STATE]], np.int16),
        mask_id_S=np.zeros(1, np.int32),
        masks_DW=packed(np.ones(vocab_size, np.bool_))[None],
        accepting_S=np.ones(1, np.bool_),
        forced_byte_S=np.full(1, -1, np.int16),
        forced_next_S=np.full(1, -1, np.int16),
    )
    made.freeze()
    return made


def opened(
    tables: TokenTables, opening: Opening, *, vocab_size: int, is_text_V: NDArray[np.bool_]
) -> TokenTables:
    """Return tables of a grammar and what goes before it.

    Raises:
        TablesTooLargeError: there is no room for the states and classes before the grammar's.
    """
    if isinstance(opening, Trigger):
        return triggered(tables, opening.token_id, vocab_size=vocab_size)
    if isinstance(opening, Forced):
        return behind_ids(tables, opening)
    return behind_thought(tables, opening, is_text_V)


def triggered(tables: TokenTables, trigger_id: int, *, vocab_size: int) -> TokenTables:
    """Return tables that begin in free text, and pass to the given ones behind `trigger_id`.

    In free text every id below `vocab_size` is allowed, control tokens too, and the text may end.
    Free text follows where the grammar may end, and the trigger may come again. Where the grammar
    may end and may go on, what it allows is taken as its own. Raises as `opened`.
    """
    num_classes = tables.next_SC.shape[1]
    class_of_V = np.zeros(max(vocab_size, len(tables.class_of_V)), np.uint16)
    class_of_V[: len(tables.class_of_V)] = tables.class_of_V
    next_SC = _moves(tables, 1, [*range(num_classes), int(class_of_V[trigger_id])])
    class_of_V[trigger_id] = num_classes
    next_SC[FREE_STATE] = FREE_STATE
    next_SC[FREE_STATE, num_classes] = 1

    accepting_S = np.append(True, tables.accepting_S)
    is_left_SC = accepting_S[:, None] & (next_SC < 0)
    next_SC = np.where(is_left_SC, next_SC[FREE_STATE], next_SC)
    # What a state with no way on leads to is free text already.
    is_over_S = accepting_S & (np.append(-1, tables.next_SC.max(axis=1)) < 0)
    is_over_S[FREE_STATE] = False
    next_SC = np.where((next_SC > 0) & is_over_S[next_SC], FREE_STATE, next_SC).astype(np.int16)

    made = _with_states_before(tables, class_of_V, next_SC, [True])
    mask_id_S = np.where(accepting_S, made.mask_id_S[FREE_STATE], made.mask_id_S)
    made = replace(made, mask_id_S=mask_id_S)
    made.freeze()
    return made


def behind_thought(
    tables: TokenTables, thought: Thought, is_text_V: NDArray[np.bool_]
) -> TokenTables:
    """Return tables of a thought and what follows it.

    A thought is any number of tokens of `is_text_V`; it cannot end the text. Raises as `opened`.
    """
    num_classes = tables.next_SC.shape[1]
    lead = 1 if thought.start_id is None else 2
    inside = lead - 1
    # Classes of before, in two each: those of text and others. The markers are of their own.
    class_V = 2 * tables.class_of_V.astype(np.int64) + 2
    class_V += is_text_V
    own = [thought.end_id] if thought.start_id is None else [thought.end_id, thought.start_id]
    class_V[own] = 2 * num_classes + 4 + np.arange(len(own))
    # Class 0 has to be one that is allowed nowhere.
    _, first, class_of_V = np.unique(class_V, return_index=True, return_inverse=True)
    class_of_V += 1
    is_text_C = np.append(False, is_text_V[first])
    is_text_C[class_of_V[own]] = False

    next_SC = _moves(tables, lead, [0, *tables.class_of_V[first].tolist()])
    next_SC[inside, is_text_C] = inside
    next_SC[inside, class_of_V[thought.end_id]] = lead
    accepting = [False] * lead
    if thought.start_id is not None:
        next_SC[0] = next_SC[lead]
        next_SC[0, class_of_V[thought.start_id]] = inside
        accepting[0] = bool(tables.accepting_S[START_STATE])
    return _with_states_before(tables, class_of_V.astype(np.uint16), next_SC, accepting)


def behind_ids(tables: TokenTables, forced: Forced) -> TokenTables:
    """Return tables of some tokens, at least one, and what follows them; raises as `opened`."""
    num_classes = tables.next_SC.shape[1]
    lead = len(forced.token_ids)
    # Each of the tokens gets a class of its own.
    own = {token_id: num_classes + i for i, token_id in enumerate(dict.fromkeys(forced.token_ids))}
    old_classes = [*range(num_classes), *tables.class_of_V[list(own)].tolist()]
    next_SC = _moves(tables, lead, old_classes)
    class_of_V = tables.class_of_V.copy()
    class_of_V[list(own)] = list(own.values())
    for state, token_id in enumerate(forced.token_ids):
        next_SC[state, own[token_id]] = state + 1
    return _with_states_before(tables, class_of_V, next_SC, [False] * lead)


def _moves(tables: TokenTables, lead: int, old_classes: Sequence[int]) -> NDArray[np.int16]:
    """Return the moves of some tables behind `lead` states that lead nowhere yet.

    By new class: `old_classes` says what each has been.

    Raises:
        TablesTooLargeError: that would be too many states or classes.
    """
    num_states = lead + len(tables.next_SC)
    if num_states > MAX_STATES or len(old_classes) > MAX_CLASSES:
        raise TablesTooLargeError
    next_SC = np.full((num_states, len(old_classes)), DEAD_STATE, np.int16)
    next_SC[lead:] = _behind(tables.next_SC, lead)[:, old_classes]
    return next_SC


def _with_states_before(
    tables: TokenTables,
    class_of_V: NDArray[np.uint16],
    next_SC: NDArray[np.int16],
    accepting: Sequence[bool],
) -> TokenTables:
    """Return tables with states before theirs, one for each of `accepting`.

    `next_SC` is what `_moves` gave, with the ways of these states.
    """
    lead, num_masks = len(accepting), len(tables.masks_DW)
    width = num_words(len(class_of_V))
    masks_DW = np.zeros((num_masks + lead, width), np.uint32)
    masks_DW[:num_masks, : tables.masks_DW.shape[1]] = tables.masks_DW
    for state in range(lead):
        masks_DW[num_masks + state] = packed(next_SC[state, class_of_V] >= 0)
    none = np.full(lead, -1, np.int16)
    made = replace(
        tables,
        class_of_V=class_of_V,
        next_SC=next_SC,
        mask_id_S=np.append(num_masks + np.arange(lead), tables.mask_id_S).astype(np.int32),
        masks_DW=masks_DW,
        accepting_S=np.append(accepting, tables.accepting_S),
        forced_byte_S=np.append(none, tables.forced_byte_S),
        forced_next_S=np.append(none, _behind(tables.forced_next_S, lead)),
    )
    made.freeze()
    return made


def _behind(states: NDArray[np.int16], lead: int) -> NDArray[np.int16]:
    """Return states as they are numbered behind `lead` others; none stays none."""
    return np.where(states >= 0, states + np.int16(lead), np.int16(DEAD_STATE))

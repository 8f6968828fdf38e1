"""Grammars that begin in mid-stream: nothing is asked of a text until a token calls for it.

A tool call in a text that may hold none, or JSON behind a thought. The free text is one more state
of the tables, which allows every token, so who runs them need not know.
"""

from dataclasses import replace

import numpy as np

from jaxserve.guided.tables import TokenTables

FREE_STATE = 0

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
    for array in (made.class_of_V, made.next_SC, made.mask_id_S, made.masks_DW, made.accepting_S):
        array.setflags(write=False)
    return made

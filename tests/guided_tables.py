"""Token tables made by hand or by chance, for tests of what runs them."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from jaxserve.guided.tables import TokenTables

Int16 = npt.NDArray[np.int16]


def tables_of(
    class_of_V: npt.NDArray[np.uint16], next_SC: Int16, accepting: Collection[int]
) -> TokenTables:
    """Make tables of what the rest follows from."""
    allowed_SV = next_SC[:, class_of_V] >= 0
    masks_DV, mask_id_S = np.unique(allowed_SV, axis=0, return_inverse=True)
    num_words = -(-len(class_of_V) // 32)
    masks_DW = np.zeros((len(masks_DV), num_words), np.uint32)
    packed = np.packbits(masks_DV, axis=1, bitorder="little")
    masks_DW.view(np.uint8)[:, : packed.shape[1]] = packed
    num_states = len(next_SC)
    none_S = np.full(num_states, -1, np.int16)
    return TokenTables(
        class_of_V=class_of_V,
        next_SC=next_SC,
        mask_id_S=mask_id_S.reshape(-1).astype(np.int32),
        masks_DW=masks_DW,
        accepting_S=np.isin(np.arange(num_states), list(accepting)),
        forced_byte_S=none_S,
        forced_next_S=none_S,
    )


def random_tables(
    seed: int, *, vocab_size: int, num_states: int = 20, num_classes: int = 12, num_special: int = 8
) -> TokenTables:
    """Make a grammar by chance: each state leads on, or to an end, which all can reach.

    The first `num_special` ids are in class 0, as end ids are.
    """
    rng = np.random.default_rng(seed)
    class_of_V = rng.integers(1, num_classes, vocab_size).astype(np.uint16)
    class_of_V[:num_special] = 0
    next_SC = rng.integers(0, num_states, (num_states, num_classes)).astype(np.int16)
    next_SC[rng.random(next_SC.shape) < 0.7] = -1
    # One way from every state to the next; the last is an end with nothing behind it.
    for state in range(num_states - 1):
        next_SC[state, rng.integers(1, num_classes)] = state + 1
    next_SC[-1] = -1
    next_SC[:, 0] = -1
    accepting = {num_states - 1, *rng.integers(1, num_states, 3).tolist()}
    return tables_of(class_of_V, next_SC, accepting)


def words_of(*texts: Collection[int], vocab_size: int) -> TokenTables:
    """Make a grammar of a few id sequences."""
    nodes: list[dict[int, int]] = [{}]
    accepting = set()
    for text in texts:
        state = 0
        for token_id in text:
            if token_id not in nodes[state]:
                nodes.append({})
                nodes[state][token_id] = len(nodes) - 1
            state = nodes[state][token_id]
        accepting.add(state)
    used = sorted({token_id for node in nodes for token_id in node})
    class_of_V = np.zeros(vocab_size, np.uint16)
    class_of_V[used] = np.arange(1, len(used) + 1)
    next_SC = np.full((len(nodes), len(used) + 1), -1, np.int16)
    for state, node in enumerate(nodes):
        for token_id, target in node.items():
            next_SC[state, class_of_V[token_id]] = target
    return tables_of(class_of_V, next_SC, accepting)

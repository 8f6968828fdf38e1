"""Text that a grammar leaves no choice about, as the tokens a tokenizer would write it in.

They are drafts: who appends them verifies them like any others. Any thread.
"""

from collections.abc import Callable, Sequence

from jaxserve.guided.tables import TokenTables


def forced_tokens(
    tables: TokenTables, state: int, encode: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """Return the tokens of the text that must follow a state; () where there is a choice.

    `encode` gives a text's ids without a BOS. The last token is held back unless the text ends
    behind it: with what comes next it could be one token.
    """
    run = tables.forced_bytes(state)
    text = run.decode(errors="ignore")
    whole = len(text.encode()) == len(run)
    ids = list(encode(text)) if text else []
    taken: list[int] = []
    for token_id in ids:
        following = tables.advance(state, token_id)
        if following < 0:
            # Not how the grammar wants it written: what fits so far stays.
            return tuple(taken)
        taken.append(token_id)
        state = following
    ends = whole and bool(tables.accepting_S[state]) and bool((tables.next_SC[state] < 0).all())
    return tuple(taken if ends else taken[:-1])

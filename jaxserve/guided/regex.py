r"""Regular expressions, as JSON Schema means them, to automata over UTF-8.

outlines-core builds the automaton, over a vocabulary of the 256 bytes. `^` and `$` become two
characters that stand before and behind the text and are taken out of the automaton again, so that
they may stand anywhere in an expression. Texts have no characters of plane 16 (U+100000 on): these
two are of it, and so are the characters that stand for control tokens.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import outlines_core

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import DEAD, Dfa, from_table, nothing
from jaxserve.guided.regex_syntax import MARKS, to_rust

_BEGIN: Final = "\U0010fffe"
_END: Final = "\U0010ffff"
_OPENING: Final = "\U0010fffd"
_PLANE_16_LEAD = 0xF4

_END_ID = 256
_VOCABULARY = outlines_core.Vocabulary(_END_ID, {bytes([byte]): [byte] for byte in range(256)})


@lru_cache(maxsize=512)
def search(pattern: str) -> Dfa:
    """Return the texts in which an expression matches somewhere.

    Raises:
        SchemaError: it is no regular expression, or has look-around or back-references.
    """
    rest = f"[^{_OPENING}]*"
    return _strip_marks(f"{rest}(?:{_marked(pattern)}){rest}")


def full_match(pattern: str) -> Dfa:
    """Return the texts that an expression matches from end to end; errors as in `search`."""
    return _strip_marks(f"{_BEGIN}?(?:{_marked(pattern)}){_END}?")


@lru_cache(maxsize=256)
def engine_full_match(expression: str) -> Dfa:
    """Return the texts that an expression in the engine's own syntax matches from end to end.

    Its negated classes and dots must leave plane 16 out.
    """
    return _texts(_build(expression))


def plain_syntax(pattern: str) -> str:
    """Return an expression in Rust's syntax, `^` and `$` as they are; errors as in `search`."""
    return to_rust(pattern, begin="^", end="$")


def _marked(pattern: str) -> str:
    return to_rust(pattern, begin=_BEGIN, end=_END)


def any_text() -> Dfa:
    """Return all texts in UTF-8 without characters of plane 16."""
    return engine_full_match(f"[^{MARKS}]*")


def _build(expression: str) -> Dfa:
    r"""Return the automaton of an expression in the engine's syntax, over raw bytes.

    A character that no text has stands in front: without it the engine would also prepare for
    matches that begin anywhere, and counted repetitions would grow exponentially. `\z` makes it
    take the longest alternative, not the first.
    """
    try:
        index = outlines_core.Index(rf"{_OPENING}(?:{expression})\z", _VOCABULARY)
    except ValueError as error:
        raise SchemaError(f"the regular expression cannot be used: {error}") from error
    transitions = index.get_transitions()
    start = index.get_initial_state()
    for byte in _OPENING.encode():
        start = transitions.get(start, {}).get(byte)
        if start is None:
            return nothing()
    finals = index.get_final_states()
    order = {start: 0}
    states = [start]
    table: list[list[int]] = []
    for state in states:
        row = [DEAD] * 256
        for byte, following in transitions.get(state, {}).items():
            if byte == _END_ID:
                continue
            if following not in order:
                order[following] = len(states)
                states.append(following)
            row[byte] = order[following]
        table.append(row)
    accepting = np.array([state in finals for state in states], np.bool_)
    return from_table(np.array(table, np.int32), accepting)


def _texts(dfa: Dfa) -> Dfa:
    """Keep what has no character of plane 16 and no byte that is in no UTF-8."""
    table = dfa.moves.by_byte().copy()
    table[:, _PLANE_16_LEAD:] = DEAD
    return from_table(table, dfa.accepting_S)


def _strip_marks(expression: str) -> Dfa:
    """Return the texts that an expression matches with the marks put round them."""
    dfa = _build(expression)
    start, taken = dfa.walk(_BEGIN.encode())
    if taken < len(_BEGIN.encode()):
        return nothing()
    table = dfa.moves.by_byte().copy()
    state = np.arange(dfa.num_states)
    for byte in _END.encode():
        state = np.where(state == DEAD, DEAD, table[state, byte])
    accepting = (state != DEAD) & dfa.accepting_S[state]
    table[:, _PLANE_16_LEAD:] = DEAD
    return from_table(table, accepting, start)

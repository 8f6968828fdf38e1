"""Values of which nothing is asked, as automata, and what lists and objects have in common."""

from dataclasses import dataclass
from functools import lru_cache

from jaxserve.guided.automaton import Dfa
from jaxserve.guided.composing import Nfa
from jaxserve.guided.notation import Notation
from jaxserve.guided.number_ranges import ANY_NUMBER
from jaxserve.guided.numbers import numbers
from jaxserve.guided.regex import any_text
from jaxserve.guided.strings import ANY_LENGTH

FREE_DEPTH = 5
"""How deep lists and objects nest in a value of which nothing is asked."""


@dataclass(slots=True)
class Ends:
    """Where a fragment begins and ends in the workshop."""

    source: int
    end: int


@lru_cache(maxsize=16)
def any_value(depth: int, notation: Notation) -> Dfa:
    """Return all values, nested at most so deep."""
    nfa = Nfa()
    end = nfa.node()
    nfa.choices(0, (b"null", b"true", b"false"), end)
    nfa.embed(0, numbers(ANY_NUMBER), end)
    nfa.embed(0, notation.string(any_text(), ANY_LENGTH), end)
    if depth:
        part = any_value(depth - 1, notation)
        for brackets in (b"[]", b"{}"):
            first, after = nfa.node(), nfa.node()
            nfa.literal(0, brackets[:1], first)
            nfa.literal(first, brackets[1:], end)
            item = nfa.node()
            nfa.skip(first, item)
            value = _any_name(nfa, item, notation) if brackets == b"{}" else item
            nfa.embed(value, part, after)
            nfa.literal(after, brackets[1:], end)
            nfa.choices(after, notation.commas, item)
    return nfa.determinize(end)


def _any_name(nfa: Nfa, source: int, notation: Notation) -> int:
    after, value = nfa.node(), nfa.node()
    nfa.embed(source, notation.names(any_text(), ANY_LENGTH), after)
    nfa.choices(after, notation.colons, value)
    return value

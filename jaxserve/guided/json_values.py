"""JSON values of which nothing is asked, as automata, and what lists and objects have in common."""

from dataclasses import dataclass
from functools import lru_cache

from jaxserve.guided.automaton import Dfa
from jaxserve.guided.composing import Nfa
from jaxserve.guided.number_ranges import ANY_NUMBER
from jaxserve.guided.numbers import numbers
from jaxserve.guided.strings import any_string

FREE_DEPTH = 5
"""How deep lists and objects nest in a value of which nothing is asked."""


@dataclass(slots=True)
class Ends:
    """Where a fragment begins and ends in the workshop."""

    source: int
    end: int


@lru_cache(maxsize=16)
def any_value(depth: int, *, compact: bool) -> Dfa:
    """Return all JSON values, nested at most so deep."""
    nfa = Nfa()
    end = nfa.node()
    nfa.choices(0, (b"null", b"true", b"false"), end)
    nfa.embed(0, numbers(ANY_NUMBER), end)
    nfa.embed(0, any_string(), end)
    if depth:
        part = any_value(depth - 1, compact=compact)
        for brackets in (b"[]", b"{}"):
            first, after = nfa.node(), nfa.node()
            nfa.literal(0, brackets[:1], first)
            nfa.literal(first, brackets[1:], end)
            item = nfa.node()
            nfa.skip(first, item)
            value = _any_key(nfa, item, compact) if brackets == b"{}" else item
            nfa.embed(value, part, after)
            nfa.literal(after, brackets[1:], end)
            separator(nfa, after, b",", item, compact)
    return nfa.determinize(end)


def _any_key(nfa: Nfa, source: int, compact: bool) -> int:
    after, value = nfa.node(), nfa.node()
    nfa.embed(source, any_string(), after)
    separator(nfa, after, b":", value, compact)
    return value


def separator(nfa: Nfa, source: int, mark: bytes, target: int, compact: bool) -> None:
    """Write a comma or a colon, and the space that may follow it."""
    nfa.choices(source, (mark,) if compact else (mark, mark + b" "), target)

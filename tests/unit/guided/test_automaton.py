"""Automata against languages that are easy to tell by other means."""

import itertools

import pytest

from jaxserve.guided.automaton import (
    AutomatonTooLargeError,
    Dfa,
    difference,
    explore,
    intersection,
    minimize,
    nothing,
    product,
)
from jaxserve.guided.composing import Nfa, literals

WORDS = [b"".join(word) for n in range(5) for word in itertools.product([b"a", b"b"], repeat=n)]


def language(dfa: Dfa) -> set[bytes]:
    return {word for word in WORDS if dfa.accepts(word)}


def at_least_two_a() -> Dfa:
    return explore(
        0, lambda count, byte: min(count + (byte == ord("a")), 2), lambda n: n == 2, b"ab", 10
    )


def test_a_set_of_texts_is_itself() -> None:
    texts = {b"", b"a", b"ab", b"abb", b"b"}

    assert language(literals(texts)) == texts


def test_products_are_set_operations() -> None:
    texts = literals([b"a", b"aa", b"ab", b"aba"])

    assert language(intersection(texts, at_least_two_a())) == {b"aa", b"aba"}
    assert language(difference(texts, at_least_two_a())) == {b"a", b"ab"}
    assert intersection(texts, literals([b"bb"])).is_empty
    assert difference(texts, texts).is_empty


def test_a_workshop_joins_copies_loops_and_skips() -> None:
    nfa = Nfa()
    middle, end = nfa.node(), nfa.node()
    nfa.embed(0, literals([b"a", b"ab"]), middle)
    nfa.skip(middle, 0)  # any number of them
    nfa.literal(middle, b"b", end)

    def is_in(word: bytes) -> bool:
        ways = {0}  # texts of a and ab, then one b
        return any(word[-1:] == b"b" and split_up(word[:-1]) for _ in ways)

    def split_up(word: bytes) -> bool:
        pieces = (b"a", b"ab")
        return any(
            word == piece or (word.startswith(piece) and split_up(word[len(piece) :]))
            for piece in pieces
        )

    assert language(nfa.determinize(end)) == {word for word in WORDS if is_in(word)}


def test_minimal_automata_have_as_many_states_as_rests() -> None:
    # Rests of a text with at least two a: none, one or two of them are still missing.
    squared = product(at_least_two_a(), at_least_two_a(), lambda a, b: a and b)

    assert minimize(squared).num_states == 3


def test_states_that_lead_nowhere_are_dropped() -> None:
    nfa = Nfa()
    end, lost = nfa.node(), nfa.node()
    nfa.literal(0, b"ab", end)
    nfa.literal(0, b"aab", lost)

    assert nfa.determinize(end).num_states == 3
    assert nothing().is_empty


def test_walking_tells_where_a_text_goes_wrong() -> None:
    dfa = literals([b"abb"])

    assert dfa.walk(b"aba")[1] == 2
    assert dfa.walk(b"ab")[1] == 2
    assert not dfa.accepts(b"ab")


def test_limits_are_kept() -> None:
    with pytest.raises(AutomatonTooLargeError):
        explore(0, lambda count, _: count + 1, lambda _: True, b"a", 100)
    with pytest.raises(AutomatonTooLargeError):
        Nfa(limit=10).literal(0, b"a" * 20, 0)
    with pytest.raises(AutomatonTooLargeError):
        product(literals([b"ab"]), literals([b"ab"]), lambda a, b: a and b, limit=1)

"""Regular expressions against Python's own, on every short text."""

import itertools
import re

import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided import regex

TEXTS = ["".join(text) for n in range(4) for text in itertools.product('abc0 "\n-é', repeat=n)]

PATTERNS = [
    *("", "^", "^$", "a|ab", "a.*?", "^abc", "abc$", "(^a|b$)", "a^b", "x*", "^[^a]b$"),
    *("[^a]b", r"\d", r"^\d+$", r"\Sb", r"^\W$", r"\ba\b", r"a\Bb", "^(?:a|b)+c?$"),
    *("^(ab|a)(b c)?$", r"^[\]\-a]+$", "^[a-]b$", "[0-9]{2}", r"^.$", r"\u0061", r"^[\s]$", "b|"),
]


def python_says(pattern: str, text: str) -> bool:
    # Python's dot takes more, and its $ also stands before a last newline.
    own = pattern.replace("$", r"\Z").replace(".", "[^\n\r]")
    return re.search(own, text, re.ASCII) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_search_finds_what_python_finds(pattern: str) -> None:
    dfa = regex.search(pattern)

    wrong = [text for text in TEXTS if dfa.accepts(text.encode()) != python_says(pattern, text)]

    assert not wrong


@pytest.mark.parametrize("pattern", ["a|ab", "^a|b$", "^ab$", "a.*?", "(a|ab)(c|)"])
def test_full_match_takes_all_of_the_text(pattern: str) -> None:
    dfa = regex.full_match(pattern)

    for text in TEXTS:
        assert dfa.accepts(text.encode()) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a)(b", "[a", "(?=a)", "(?<!a)b", r"(a)\1", r"\q", "a{2,1}", "\\", r"\ud800"],
)
def test_what_is_no_automaton_is_refused(pattern: str) -> None:
    with pytest.raises(SchemaError):
        regex.search(pattern)


def test_characters_that_stand_for_edges_cannot_be_named() -> None:
    for pattern in ("\U0010fffea", r"\u{10FFFE}a", r"\udbff\udffea"):
        with pytest.raises(SchemaError, match="plane 16"):
            regex.search(pattern)


def test_texts_are_whole_characters_outside_of_plane_16() -> None:
    dfa = regex.search("")

    assert dfa.accepts("é日🙂\U000fffff".encode())
    for text in (b"\xff", b"\xc3", b"\xed\xa0\x80", "\U00100000".encode()):
        assert not dfa.accepts(text)


def test_counted_repetitions_do_not_explode() -> None:
    assert regex.full_match("(?:.){0,200}").num_states < 2_000
    assert regex.full_match("(a|aa|aaa){1,30}b").num_states < 100

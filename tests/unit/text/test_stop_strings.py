"""Stop strings: what is released, what is held back, what is found."""

import pytest

from jaxserve.errors import InvariantError
from jaxserve.text.stop_strings import StopAutomaton, StopStrings


def test_without_stop_strings_text_passes_through() -> None:
    stops = StopStrings(StopAutomaton(()))
    assert [stops.push(part) for part in ("a <", "EN", "")] == ["a <", "EN", ""]
    assert stops.finish() == ""
    assert stops.hit is None


def test_a_stop_string_over_three_parts() -> None:
    stops = StopStrings(StopAutomaton(("<END>",)))
    assert [stops.push(part) for part in ("a <", "EN", "D>x")] == ["a ", "", ""]
    assert stops.hit == "<END>"
    assert stops.finish() == ""


def test_what_turns_out_to_be_no_stop_string_is_released() -> None:
    stops = StopStrings(StopAutomaton(("<END>",)))
    assert [stops.push(part) for part in ("a <", "EN", "Q")] == ["a ", "", "<ENQ"]
    assert stops.hit is None


def test_what_is_held_back_at_the_end_is_released() -> None:
    stops = StopStrings(StopAutomaton(("<END>",)))
    assert stops.push("a <EN") == "a "
    assert stops.finish() == "<EN"
    assert stops.finish() == ""


def test_only_the_part_that_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(StopAutomaton(("aab",)))
    assert [stops.push(character) for character in "aaaab"] == ["", "", "a", "a", ""]
    assert stops.hit == "aab"


def test_text_after_the_stop_string_is_dropped() -> None:
    stops = StopStrings(StopAutomaton(("\n",)))
    assert stops.push("one\ntwo") == "one"
    assert stops.push("three") == ""


@pytest.mark.parametrize(
    ("stops", "text", "released", "hit"),
    [
        (("END", "END>"), "a END> b", "a ", "END"),  # complete first, though a longer one begins so
        (("xEND", "END"), "a xEND b", "a ", "xEND"),  # complete together: the longer one
        (("abcd", "bc"), "abcd", "a", "bc"),  # complete first, inside of one that began earlier
        (("b", "a"), "ccab", "cc", "a"),  # the order of the list has no say
    ],
)
def test_which_of_several_counts(
    stops: tuple[str, ...], text: str, released: str, hit: str
) -> None:
    stop_strings = StopStrings(StopAutomaton(stops))
    assert stop_strings.push(text) == released
    assert stop_strings.hit == hit


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(InvariantError):
        StopStrings(StopAutomaton(("a", "")))

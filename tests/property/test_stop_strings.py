"""However the text is cut into parts, stop strings act as a search of the whole text would."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.stop_strings import StopAutomaton, StopStrings

# Two letters, so that stop strings overlap, nest and repeat.
WORDS = st.text("ab", min_size=1, max_size=5)


def naive(stops: list[str], text: str, start: int) -> tuple[str, str | None]:
    """Search behind `start`: no stop string ends before."""
    for end in range(start + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(WORDS, max_size=4),
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 30), max_size=8),
    st.integers(0, 4),
)
def test_any_split_equals_searching_the_whole(
    stops: list[str], text: str, cuts: list[int], num_safe: int
) -> None:
    stop_strings = StopStrings(StopAutomaton(stops))
    released, safe = "", 0
    for i, (start, end) in enumerate(pairwise([0, *sorted(cuts), len(text)])):
        if i < num_safe:
            safe = len(text[:end])
        released += stop_strings.push(text[start:end], may_end=i >= num_safe)
        # No more is held back than could become a stop string.
        if stop_strings.hit is None:
            held = text[:end][len(released) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    released += stop_strings.finish()
    assert (released, stop_strings.hit) == naive(stops, text, safe)

"""Grammars laid out for the device, or for the host where they do not fit."""

from functools import partial

import pytest

from jaxserve.guided import tables, triggered
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.masks import has_id
from jaxserve.guided.triggered import Forced, Thought
from jaxserve.http.layouts import Layouts
from jaxserve.types import Grammar
from tests.grammars import CONTROL_ID, longest_first, tiny_vocabulary

VOCABULARY = tiny_vocabulary()
AB = compile_grammar(tables.GrammarSpec(kind="regex", source="ab|ax"), VOCABULARY)
OPENINGS = (Thought(CONTROL_ID, None), Forced((ord("!"),)))
"""From the inside out: a token that is forced, and behind it a thought."""


def layouts(arena_rows: int = 4_000) -> Layouts:
    return Layouts(
        VOCABULARY,
        encode=partial(longest_first, VOCABULARY),
        vocab_size=VOCABULARY.size,
        arena_rows=arena_rows,
    )


def takes(grammar: Grammar, *token_ids: int) -> bool | None:
    """Whether a text may be so and end there; None: it may not begin so."""
    guide = grammar.start()
    for token_id in token_ids:
        if not has_id(guide.allowed_words(), token_id):
            return None
        guide.advance(token_id)
    return guide.may_end


@pytest.mark.parametrize("has_room", [True, False])
def test_what_goes_before_full_tables_goes_before_them_on_the_host(
    monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    if not has_room:
        monkeypatch.setattr(triggered, "MAX_STATES", 1)
    made = layouts().lay_out("ab", AB, OPENINGS, ())

    assert (made.image is not None) is (made.host_reason is None) is has_room
    assert takes(made, *b"!thought", CONTROL_ID, *b"ax") is True
    assert takes(made, *b"!thought", CONTROL_ID, *b"a") is False
    assert takes(made, *b"!", CONTROL_ID, *b"b") is takes(made, *b"thought") is None


def test_tables_that_the_device_has_no_room_for_are_walked_on_the_host() -> None:
    made = layouts(arena_rows=3).lay_out("ab", AB, (), ())

    assert made.image is None
    assert made.host_reason == "its tables are too large for the device"
    assert takes(made, *b"ab") is True

"""Guides on the host: what their masks allow is what they can go on with."""

import numpy as np
import pytest

from jaxserve.guided.guide import MatcherGuide, TablesGuide
from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.tables import HostGrammar
from jaxserve.guided.vocabulary import GrammarVocabulary
from tests.grammars import ids_of
from tests.guided_tables import words_of

# Bytes twice, as tokenizers with a fallback have them, some longer pieces, and a control token.
PIECES: dict[int, str | int] = {
    **{byte: byte for byte in range(256)},
    **{256 + i: piece for i, piece in enumerate(["a", "b", "ab", "abc", "x", "xx"])},
    262: "<end>",
}
VOCABULARY = GrammarVocabulary.build(PIECES, control_ids=(262,))


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('start: "a" start "b" | "ab"', ["ab", "aabb", "aaabbb"]),
        ('start: "abc" /x+/', ["abcx", "abcxxx"]),  # its first three bytes are forced
        ('start: "x" | "q"', ["x", "q"]),
    ],
)
def test_a_matcher_allows_nothing_that_it_does_not_take(source: str, texts: list[str]) -> None:
    pytest.importorskip("llguidance")
    matcher = HostMatcher(HostTokenizer(VOCABULARY), HostGrammar(text=source, reason="a stack"))
    rng = np.random.default_rng(len(source))
    for _ in range(20):
        guide = MatcherGuide(matcher.copy(), num_words=9)
        text = b""
        while following := sorted(ids_of(guide.allowed_words())):
            token_id = int(rng.choice(following))
            guide.advance(token_id)
            text += VOCABULARY.token_bytes[token_id]
            assert any(whole.encode().startswith(text[:6]) for whole in texts) or len(text) > 6
            if guide.may_end and (rng.random() < 0.3 or len(text) > 12):
                break
            if len(text) > 40:
                return
        assert guide.may_end
        guide.advance(262)
        assert ids_of(guide.allowed_words()) == set()
        assert guide.may_end


def test_a_guide_of_tables_keeps_to_what_is_in_time() -> None:
    tables = words_of((10,), (11, 12, 13), vocab_size=100)
    guide = TablesGuide(tables, np.array([2, 1, 3, 2, 1]))

    def allowed_within(max_left: int | None) -> set[int]:
        return ids_of(guide.allowed_words(max_left))

    assert allowed_within(None) == allowed_within(3) == {10, 11}
    assert allowed_within(2) == allowed_within(1) == {10}
    assert allowed_within(0) == set()
    guide.advance(11)
    assert (guide.state, guide.may_end) == (2, False)
    guide.advance(10)
    assert (guide.state, guide.may_end, allowed_within(9)) == (-1, True, set())

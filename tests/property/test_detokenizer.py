"""However the ids are cut into pushes, the text is the library's own decoding of all of them."""

from itertools import pairwise
from pathlib import Path

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny_tokenizer"
LIBRARY = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
TOKENIZER = Tokenizer.load(TINY)
ID_OF_BYTE = {piece: i for i, piece in TOKENIZER.pieces.items() if isinstance(piece, int)}

# Bytes often, and whole characters of them; also special ids and ids that do not exist.
CHARACTERS = st.characters(min_codepoint=0x80, codec="utf-8").map(
    lambda character: [ID_OF_BYTE[byte] for byte in character.encode()]
)
PARTS = st.one_of(
    st.lists(st.sampled_from(list(ID_OF_BYTE.values())), min_size=1, max_size=2),
    CHARACTERS,
    st.integers(0, TOKENIZER.vocab_size + 3).map(lambda token_id: [token_id]),
)


@st.composite
def pushes(draw: st.DrawFn) -> list[list[int]]:
    ids = [token_id for part in draw(st.lists(PARTS, max_size=12)) for token_id in part]
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=8))
    return [ids[start:end] for start, end in pairwise([0, *sorted(cuts), len(ids)])]


@given(pushes(), st.booleans())
def test_any_split_equals_decoding_at_once(
    id_lists: list[list[int]], skip_special_tokens: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip_special_tokens)
    text = "".join([detokenizer.push(ids) for ids in id_lists]) + detokenizer.finish()
    all_ids = [token_id for ids in id_lists for token_id in ids]
    assert text == LIBRARY.decode(all_ids, skip_special_tokens=skip_special_tokens)


@given(st.text())
def test_encoding_and_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False)
    # The vocabulary spells a space as U+2581, so that sign itself comes back as a space.
    assert detokenizer.push(ids) + detokenizer.finish() == text.replace("\u2581", " ")

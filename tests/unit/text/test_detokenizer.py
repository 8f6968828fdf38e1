"""Text from ids as they come: what is released when."""

from pathlib import Path

import pytest

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "data" / "tiny_tokenizer"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    id_of_byte = {piece: i for i, piece in tokenizer.pieces.items() if isinstance(piece, int)}
    return [id_of_byte[byte] for byte in data]


def test_plain_pieces_are_released_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" the cat", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) == " the cat"
    assert detokenizer.finish() == ""


def test_a_character_of_several_bytes_comes_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in byte_ids(tokenizer, "€".encode())] == ["", "", ""]
    assert detokenizer.push(tokenizer.encode("a", add_special_tokens=False)) == "€a"


def test_bytes_at_the_end_come_with_finish(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(byte_ids(tokenizer, "€".encode())) == ""
    assert detokenizer.finish() == "€"
    assert detokenizer.finish() == ""


def test_incomplete_bytes_at_the_end_are_replaced(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(byte_ids(tokenizer, "€".encode()[:2]))
    assert detokenizer.finish() == "\ufffd\ufffd"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<bos>a<turn|>", add_special_tokens=False)
    assert Detokenizer(tokenizer).push(ids) == "a"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "<bos>a<turn|>"


def test_ids_outside_the_vocabulary_are_no_text(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push([tokenizer.vocab_size + 5]) == ""

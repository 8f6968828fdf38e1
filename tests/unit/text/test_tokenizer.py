"""Encoding: BOS by our rule alone, special tokens by name, and what is refused at load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ModelLoadError
from jaxserve.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "data" / "tiny_tokenizer"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def write_variant(folder: Path, **changes: Any) -> Path:
    """Write the tiny tokenizer with some of tokenizer.json's fields replaced."""
    fields = json.loads((TINY / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(fields | changes))
    return folder


def test_bos_goes_in_front_when_asked(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.bos_id not in plain
    assert tokenizer.encode("the cat", add_special_tokens=True) == [tokenizer.bos_id, *plain]


def test_bos_spelled_in_the_text_is_not_doubled(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<bos>the cat", add_special_tokens=True)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids == tokenizer.encode("<bos>the cat", add_special_tokens=False)


def test_empty_text_with_bos(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("", add_special_tokens=True) == [tokenizer.bos_id]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_files_post_processor_has_no_say(tmp_path: Path, add_special_tokens: bool) -> None:
    special = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    post_processor = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    with_bos = Tokenizer.load(write_variant(tmp_path, post_processor=post_processor))
    ids = with_bos.encode("the cat", add_special_tokens=add_special_tokens)
    assert ids.count(2) == int(add_special_tokens)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_variant(
        tmp_path,
        truncation={
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    for text in ("a", "a long text of many tokens"):
        assert Tokenizer.load(folder).encode(text, add_special_tokens=False) == tokenizer.encode(
            text, add_special_tokens=False
        )


def test_special_tokens_in_the_text_become_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|turn>", add_special_tokens=False) == [105]


def test_another_models_marker_is_plain_text(tokenizer: Tokenizer) -> None:
    assert not tokenizer.special_ids & {
        *tokenizer.encode("<end_of_turn>", add_special_tokens=False)
    }


def test_token_id_of_an_unknown_name_is_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("<turn|>") == 106
    assert tokenizer.token_id("<end_of_turn>") is None


def test_id_to_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.id_to_token(2) == "<bos>"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 1024
    assert {0, 1, 2, 105, 106} <= tokenizer.special_ids
    assert tokenizer.token_id("a") not in tokenizer.special_ids


@given(
    st.lists(
        st.text(max_size=40)
        | st.sampled_from([" " * 70, "\n" * 70, "<bos>", "<|turn>", "\u2581" * 9, "the cat"])
    )
)
def test_no_token_takes_more_characters_than_the_longest_piece(parts: list[str]) -> None:
    text = "".join(parts)
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer.longest_piece == 32
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert num_tokens * tokenizer.longest_piece >= len(text)


def taking_blanks(fields: dict[str, Any]) -> dict[str, Any]:
    first, *others = fields["added_tokens"]
    # Of a control token, that is refused.
    word = {**first, "id": 1024, "content": "word", "special": False, "lstrip": True}
    return {"added_tokens": [first, *others, word]}


def without_a_byte(fields: dict[str, Any]) -> dict[str, Any]:
    model = fields["model"]
    vocab = {"other" if piece == "<0xC3>" else piece: i for piece, i in model["vocab"].items()}
    return {"model": {**model, "vocab": vocab}}


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        lambda _: {"normalizer": {"type": "NFC"}},
        lambda fields: {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [fields["normalizer"], {"type": "NFC"}],
            }
        },
        lambda _: {
            "normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "\u2581"}
        },
        lambda _: {
            "normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": "\u2581"}
        },
        lambda _: {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        },
        lambda _: {"pre_tokenizer": {"type": "Whitespace"}},
        lambda fields: {"model": {**fields["model"], "byte_fallback": False}},
        taking_blanks,
        without_a_byte,
    ],
)
def test_where_characters_may_vanish_there_is_no_longest_piece(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    fields = json.loads((TINY / "tokenizer.json").read_text())
    assert Tokenizer.load(write_variant(tmp_path, **change(fields))).longest_piece is None


def test_bos_token_may_be_an_object(tmp_path: Path) -> None:
    write_variant(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<mask>"}}')
    assert Tokenizer.load(tmp_path).bos_id == 4


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["[", "[]", '{"chat_template": [{"name": "default"}]}'])
def test_damaged_config_is_refused(tmp_path: Path, content: str) -> None:
    write_variant(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_unknown_bos_token_is_refused(tmp_path: Path) -> None:
    write_variant(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<start>"}')
    with pytest.raises(ModelLoadError, match="'<start>'"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ],
)
def test_another_decoder_is_refused(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    with pytest.raises(ModelLoadError, match="decoder"):
        Tokenizer.load(write_variant(tmp_path, decoder=decoder))

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.openai import json_body
from jaxserve.openai.json_body import decode_json


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (rb'"a\ud800b"', "a\ufffdb"),
        (rb'"\udc00"', "\ufffd"),
        (rb'"\uD800\uD800\uDC00"', "\ufffd\U00010000"),
        (rb'"\ud83d\ude00 \ud83d"', "😀 \ufffd"),
        (rb'"\\ud800 \ud800"', "\\ud800 \ufffd"),
        (rb'{"\ud800":1}', {"\ufffd": 1}),
        (b'{"a":1,"a":2}', {"a": 2}),
    ],
)
def test_decoding(body: bytes, value: object) -> None:
    assert decode_json(body) == value


@pytest.mark.parametrize("body", [b"", b"{", b"\xef\xbb\xbf{}", b"NaN", b"1e999", rb'["\ud800",]'])
def test_undecodable(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="line 1, column") as caught:
        decode_json(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("body", [b"[%s]" % b",".join([b"1"] * 90), b"[" * 90 + b"]" * 90])
def test_too_many_values_are_refused_unread(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_JSON_VALUES", 91)
    decode_json(body)
    monkeypatch.setattr(json_body, "MAX_JSON_VALUES", 89)
    with pytest.raises(InvalidRequestError, match=r"has 90 commas, .* at most 89 are read"):
        decode_json(body)


def test_a_body_of_many_escapes_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    body = rb'"\\\\\\\\\ud800"'
    monkeypatch.setattr(json_body, "_MAX_ESCAPES", 9)
    assert decode_json(body) == "\\" * 4 + "\ufffd"
    monkeypatch.setattr(json_body, "_MAX_ESCAPES", 8)
    with pytest.raises(InvalidRequestError):
        decode_json(body)


def test_repairs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "_MAX_REPAIRS", 2)
    assert decode_json(rb'"\ud800\ud800"') == "\ufffd\ufffd"
    with pytest.raises(InvalidRequestError):
        decode_json(rb'"\ud800\ud800\ud800"')

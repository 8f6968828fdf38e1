import math
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError, UnsupportedFieldError
from jaxserve.openai.fields import Field, Object, read_object, table
from jaxserve.openai.readers import (
    MAX_DEPTH,
    Boolean,
    Inert,
    Integer,
    ListOf,
    Mapped,
    Name,
    Neutral,
    Number,
    OneOf,
    OneOrMany,
    Reader,
    RequestId,
    Text,
    TokenBiases,
    TokenIds,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("reader", "value", "expected"),
    [
        (Boolean(), True, True),
        (Integer(-1, 5), -1, -1),
        (Integer(-1, 5), 5, 5),
        (Number(0, 2), 0, 0.0),
        (Number(0, 2), 2.0, 2.0),
        (Number(0, 1, above_minimum=True), 1e-9, 1e-9),
        (Text(), "", ""),
        (OneOf(("a", "b")), "b", "b"),
        (ListOf(Boolean()), [True, False], (True, False)),
        (OneOrMany(Text(), 2), "a", ("a",)),
        (OneOrMany(Text(), 2), ["a", "b"], ("a", "b")),
        (Mapped(), {"a": [1]}, {"a": [1]}),
        (Neutral((0,)), 0.0, None),
        (Neutral((0,)), -0.0, None),
        (Neutral(({"type": "text"},)), {"type": "text"}, None),
        (Inert(Text()), "x", None),
        (Name(), "a/b", "a/b"),
        (RequestId(), "a-1~!", "a-1~!"),
        (TokenIds(), [], ()),
        (TokenIds(1, 2), [0, 5], (0, 5)),
        (TokenBiases(100, 2), {"10": 1, "9": -100}, ((9, -100.0), (10, 1.0))),
        (Mapped(), {"a": nested(MAX_DEPTH - 1)}, {"a": nested(MAX_DEPTH - 1)}),
    ],
)
def test_accepted(reader: Reader[object], value: object, expected: object) -> None:
    assert reader(value, "f") == expected


@pytest.mark.parametrize(
    ("reader", "value", "path"),
    [
        (Boolean(), 1, "f"),
        (Boolean(), "true", "f"),
        (Integer(-1, 5), True, "f"),
        (Integer(-1, 5), 1.0, "f"),
        (Integer(-1, 5), "1", "f"),
        (Integer(-1, 5), -2, "f"),
        (Integer(-1, 5), 6, "f"),
        (Number(0, 2), True, "f"),
        (Number(0, 2), "1", "f"),
        (Number(0, 2), math.nan, "f"),
        (Number(0, 2), math.inf, "f"),
        (Number(0, 2), -0.1, "f"),
        (Number(0, 2), 2.1, "f"),
        (Number(0, 1, above_minimum=True), 0, "f"),
        (Text(), 1, "f"),
        (Text(min_length=1), "", "f"),
        (OneOf(("a", "b")), "c", "f"),
        (OneOf(("a", "b")), 1, "f"),
        (ListOf(Boolean()), {}, "f"),
        (ListOf(Boolean()), [True, 1], "f[1]"),
        (ListOf(Boolean(), min_items=1), [], "f"),
        (ListOf(Boolean(), max_items=1), [True, True], "f"),
        (OneOrMany(Text(), 1), ["a", "b"], "f"),
        (OneOrMany(Text(), 1), 5, "f"),
        (Mapped(), [], "f"),
        (Neutral((0,)), False, "f"),
        (Neutral((True,)), 1, "f"),
        (Neutral(), 0, "f"),
        (Inert(Text()), 5, "f"),
        (Name(), "", "f"),
        (Name(), "a\ufffd", "f"),
        (Name(3), "abcd", "f"),
        (RequestId(), "a b", "f"),
        (RequestId(), "a\n", "f"),
        (RequestId(), "\ufffd", "f"),
        (RequestId(), "x" * 129, "f"),
        (TokenIds(), (), "f"),
        (TokenIds(), [1, True], "f[1]"),
        (TokenIds(), [1, 1.0], "f[1]"),
        (TokenIds(), [1, -1], "f[1]"),
        (TokenIds(), [1, 10**9], "f[1]"),
        (TokenIds(), [1, 2, "3", -1], "f[2]"),
        (TokenIds(1), [], "f"),
        (TokenIds(0, 1), [1, 1], "f"),
        (TokenBiases(100, 2), [], "f"),
        (TokenBiases(100, 2), {"1": 0, "2": 0, "3": 0}, "f"),
        (TokenBiases(100, 2), {"1": 101}, "f.1"),
        (TokenBiases(100, 2), {"01": 1}, "f"),
        (TokenBiases(100, 2), {"1\n": 1}, "f"),
        (TokenBiases(100, 2), {"\u0661": 1}, "f"),
        (Mapped(), {"a": nested(MAX_DEPTH)}, "f"),
        (Object(table([Field("a", Text(), "")])), {"a": 1}, "f.a"),
        (Object(table([Field("a", Text(), "")])), {"b": 1}, "f.b"),
        (Object(table([Field("a", Text(), "", required=True)])), {}, "f.a"),
        (Object(table([])), [], "f"),
    ],
)
def test_refused(reader: Reader[object], value: object, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        reader(value, "f")
    assert caught.value.param == path
    assert caught.value.message.startswith(path) or caught.value.code == "unknown_parameter"


def test_neutral_refuses_as_unsupported() -> None:
    with pytest.raises(UnsupportedFieldError):
        Neutral((0,))(1, "f")


def test_null_is_absent() -> None:
    field = Field("a", Integer(0, 9), 7)
    assert read_object({"a": None}, "", table([field]))[field] == 7
    assert read_object({}, "", table([field]))[field] == 7
    assert read_object({"a": 1}, "", table([field]))[field] == 1


def test_required_field_must_not_be_null() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_object({"a": None}, "", table([Field("a", Text(), "", required=True)]))
    assert (caught.value.param, caught.value.code) == ("a", "missing_required_parameter")


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Integer(0, 1)("x" * 10_000, "f")
    assert len(caught.value.message) < 120


@pytest.mark.parametrize(
    ("neutral", "value", "message"),
    [
        (Neutral(([],)), [1], "x is not supported by this server, except as []; it was a list."),
        (Neutral(("none", "auto")), "q", 'x is not supported by this server, except as "none" or'),
        (Neutral(), 3, "x is not supported by this server; it was 3."),
    ],
)
def test_what_is_not_supported_is_a_sentence(neutral: Neutral, value: object, message: str) -> None:
    with pytest.raises(UnsupportedFieldError) as refusal:
        neutral(value, "x")
    assert refusal.value.message.startswith(message)

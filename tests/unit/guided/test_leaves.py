"""Strings, numbers and formats."""

import datetime
import ipaddress
import json
import random
from dataclasses import replace
from decimal import Decimal

import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided import regex
from jaxserve.guided.formats import ENFORCED, REFUSED, format_texts
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.number_ranges import (
    ANY_INTEGER,
    ANY_NUMBER,
    Bound,
    NumberRange,
    number_texts,
)
from jaxserve.guided.numbers import numbers
from jaxserve.guided.strings import Length, any_string, quoted

GOOD_STRINGS = [
    *('""', '"a"', '"é日🙂"', r'"\u00e9"', r'"\ud83d\ude00x"', r'"\n\t\"\\\/\b\f\r"', '"\x7f"'),
    *(r'"\u0000"', r'"\uABcd"', r'"\u0022"'),
]
BAD_STRINGS = [
    *('"', '"\n"', r'"\x"', r'"\ud800"', r'"\ude00"', r'"\ud83dx"', r'"\ud83d\u0041"', '"a""'),
    *(r'"\u00g0"', r'"\u00"', "'a'"),
]


@pytest.mark.parametrize("text", GOOD_STRINGS)
def test_all_escapes_of_json_are_accepted(text: str) -> None:
    json.loads(text)

    assert any_string().accepts(text.encode())


@pytest.mark.parametrize("text", BAD_STRINGS)
def test_nothing_else_is(text: str) -> None:
    assert not any_string().accepts(text.encode())


def test_lengths_count_characters_however_they_are_written() -> None:
    dfa = any_string(Length(2, 3))

    for text in ['"ab"', '"éé日"', r'"\ud83d\ude00xx"', r'"\u0041\n"', '"🙂🙂"']:
        assert dfa.accepts(text.encode()), text
    for text in ['"a"', '"abcd"', r'"\ud83d\ude00"', r'"\ud83d\ude00xyz"', '"🙂"']:
        assert not dfa.accepts(text.encode()), text


@pytest.mark.parametrize("most", [1, 200, 2000])
def test_an_upper_bound_is_exact(most: int) -> None:
    dfa = any_string(Length(0, most))

    assert dfa.accepts(('"' + "é" * most + '"').encode())
    assert not dfa.accepts(('"' + "é" * (most + 1) + '"').encode())
    assert dfa.num_states < 20_000


def test_a_pattern_speaks_of_characters_and_not_of_how_they_are_written() -> None:
    dfa = quoted(regex.search("^a.c$"))

    for text in [r'"a\"c"', r'"a\u0022c"', r'"\u0061\ud83d\ude00c"', r'"a\\c"', '"aéc"']:
        assert dfa.accepts(text.encode()), text
    for text in [r'"a\c"', '"a"c"', r'"a\nc"', '"abbc"']:
        assert not dfa.accepts(text.encode()), text


def random_number(rng: random.Random) -> str:
    whole = rng.choice(["0", str(rng.randint(1, 9)), str(rng.randint(10, 5000))])
    places = rng.choice([0, 0, 1, 2, 3])
    fraction = "".join(rng.choice("0012579") for _ in range(places))
    return rng.choice(["", "-"]) + whole + ("." + fraction if places else "")


def random_range(rng: random.Random) -> NumberRange:
    wanted = replace(ANY_NUMBER, integer=rng.choice([None, None, True, False]))
    if rng.random() < 0.6:
        wanted = wanted.at_least(Bound(Decimal(random_number(rng)), rng.random() < 0.5))
    if rng.random() < 0.6:
        wanted = wanted.at_most(Bound(Decimal(random_number(rng)), rng.random() < 0.5))
    factors = [Decimal(factor) for factor in ("0.25", "3", "0.01", "7", "1.5", "1")]
    if rng.random() < 0.4:
        wanted = replace(wanted, multiples=frozenset([rng.choice(factors)]))
    if rng.random() < 0.3:
        wanted = replace(wanted, not_multiples=frozenset([rng.choice(factors)]))
    if rng.random() < 0.3:
        wanted = replace(wanted, excluded=frozenset([Decimal(random_number(rng))]))
    return wanted


def test_ranges_of_numbers_are_exact() -> None:
    rng = random.Random(3)
    for _ in range(25):
        wanted = replace(random_range(rng), excluded=frozenset([Decimal("123456789")]))
        dfa = numbers(wanted)
        edges = [b.value for b in (wanted.least, wanted.most) if b is not None]
        texts = [random_number(rng) for _ in range(100)] + [f"{edge:f}" for edge in edges]
        for text in texts:
            right = Decimal(text) in wanted and not (wanted.integer and "." in text)
            assert dfa.accepts(text.encode()) == right, (wanted, text)


def test_free_numbers_are_those_of_json() -> None:
    for text in ["0", "-0.5", "1e5", "1E+5", "2.5e-3", "-0"]:
        assert numbers(ANY_NUMBER).accepts(text.encode()), text
    for text in [".5", "1.", "+1", "00", "NaN", "0x1F", "--1", "1e", "-"]:
        assert not numbers(ANY_NUMBER).accepts(text.encode()), text
    assert not numbers(ANY_INTEGER).accepts(b"1.0")


def test_single_numbers_are_written_as_given_and_as_integers() -> None:
    assert number_texts(Decimal("1.0")) == {b"1", b"1.0"}
    assert number_texts(Decimal("1e3")) == {b"1000"}
    assert number_texts(Decimal("-0.50")) == {b"-0.50"}


def test_a_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(SchemaError, match="digits"):
        numbers(ANY_NUMBER.at_least(Bound(Decimal("1e9999"), inclusive=True)))


def test_dates_are_those_of_the_calendar() -> None:
    dfa = format_texts("date")
    assert dfa is not None
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2024, 2100, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                    right = True
                except ValueError:
                    right = False
                assert dfa.accepts(text.encode()) == right, text


def test_addresses_are_those_of_the_standard() -> None:
    dfa = format_texts("ipv6")
    assert dfa is not None
    rng = random.Random(1)
    parts = ["1", ":", "::", "ab:", "1:", "f:", "1.2.3.4", ":"]
    for _ in range(3000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 9)))
        try:
            ipaddress.IPv6Address(text)
            right = True
        except ValueError:
            right = False
        assert dfa.accepts(text.encode()) == right, text


def test_every_format_of_the_standard_is_enforced_or_refused() -> None:
    assert all(format_texts(name) is not None for name in ENFORCED)
    for name in REFUSED:
        with pytest.raises(SchemaError, match=name):
            format_texts(name)
    assert format_texts("int32") is None


def test_single_strings_have_no_raw_character_of_plane_16() -> None:
    assert scalar_text('é"\U0010ffff') == "é".join(['"', ""]).encode() + rb'\"\udbff\udfff"'

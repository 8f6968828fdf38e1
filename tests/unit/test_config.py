"""Settings: what is in range, and that a refusal names the flag."""

import math
from argparse import ArgumentTypeError
from typing import Any

import pytest

from jaxserve.config import ServeConfig, serve_flags, size_in_bytes
from jaxserve.errors import ConfigError


def test_the_defaults_are_in_range() -> None:
    ServeConfig().check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch", 0),
        ("max_model_len", 1),
        ("kv_cache_bytes", 0),
        ("max_waiting_requests", 0),
        ("max_waiting_tokens", -1),
        ("prefill_stall_factor", -0.1),
        ("drain_s", -1.0),
        ("drain_s", math.nan),
        ("heartbeat_s", -0.001),
        ("max_body_bytes", 0),
        ("port", -1),
        ("port", 65536),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value}"):
        ServeConfig(**{name: value}).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_batch", 1), ("max_model_len", 2), ("drain_s", 0.0), ("port", 0), ("port", 65535)],
)
def test_the_least_value_is_in_range(name: str, value: Any) -> None:
    ServeConfig(**{name: value}).check()


def test_a_regular_expression_that_is_none_is_refused() -> None:
    ServeConfig(drop_from_system=("^a.*$", "b")).check()
    with pytest.raises(ConfigError, match=r"--drop-from-system '\(' is wrong"):
        ServeConfig(drop_from_system=("b", "(")).check()


@pytest.mark.parametrize("name", ["api_key", "cors_origin", "served_model_name"])
@pytest.mark.parametrize(("value", "why"), [("", "empty"), (" ", "empty"), ("\udce9", "UTF-8")])
def test_a_text_that_nobody_could_send_is_refused(name: str, value: str, why: str) -> None:
    setting: Any = value if name == "served_model_name" else ("fine", value)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.* {why}"):
        ServeConfig(**{name: setting}).check()


def test_every_setting_says_what_it_does() -> None:
    assert all(setting.metadata["help"] for setting in serve_flags())


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("2K", 2000), ("1.5MB", 1_500_000), ("2GiB", 2 << 30), ("1 Ti", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.2.3", "G", "1iB", "1e9", "1 gib"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no size: bytes, or such as 500M or 2GiB"):
        size_in_bytes(text)

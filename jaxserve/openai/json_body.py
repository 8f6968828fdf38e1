"""A request's body as JSON, at a cost that is bounded before it is paid."""

import re

import orjson

from jaxserve.errors import InvalidRequestError

MAX_JSON_VALUES = 1 << 20
"""Values of one body, or so: its commas, brackets and braces, those within strings counted too.

Each may become an object of 100 bytes, all at once, while every stream waits.
"""

# Bodies with more of either are left as they are, and refused.
_MAX_ESCAPES = 1 << 20
_MAX_REPAIRS = 1 << 16

# From somewhere outside of an escape to the next escaped surrogate that is no half of a pair.
_TO_LONE_SURROGATE = re.compile(
    rb"(?:[^\\]++"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\(?!u[dD][89a-fA-F][0-9a-fA-F]{2})."
    rb")*+(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)


def decode_json(body: bytes) -> object:
    """Decode a request body.

    Escaped lone surrogates become U+FFFD: refused, they would stay in a chat's history for ever.
    orjson itself refuses a byte order mark, NaN and nesting deeper than about 1,000 levels.
    """
    if len(body) > MAX_JSON_VALUES:
        num_values = sum(body.count(sign) for sign in b",[{")
        if num_values > MAX_JSON_VALUES:
            raise InvalidRequestError(
                f"The body has {num_values} commas, brackets and braces;"
                f" at most {MAX_JSON_VALUES} are read."
            )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        repaired = repair_surrogates(body)
        if repaired != body:
            try:
                return orjson.loads(repaired)
            except orjson.JSONDecodeError:
                pass
        raise InvalidRequestError(
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).",
            code="invalid_json",
        ) from error


def repair_surrogates(body: bytes) -> bytes:
    """Return JSON with the escaped lone surrogates of its strings replaced by U+FFFD."""
    parts: list[bytes] = []
    start = 0
    if body.count(b"\\") > _MAX_ESCAPES:
        return body
    for _ in range(_MAX_REPAIRS):
        found = _TO_LONE_SURROGATE.match(body, start)
        if found is None:
            break
        parts += [body[start : found.start("lone")], rb"\ufffd"]
        start = found.end()
    return b"".join((*parts, body[start:]))

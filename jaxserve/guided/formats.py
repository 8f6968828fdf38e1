"""The formats of JSON Schema that are enforced, as regular expressions over characters.

Each accepts only what its standard does. Where a standard allows what nobody writes (leap seconds,
quoted mailboxes, IPv6 addresses in URIs, labels of 63 characters), a narrower language is taken.
Other names that the standard defines are refused; names that it does not know are annotations.
"""

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import Dfa
from jaxserve.guided.regex import engine_full_match

_TWO_DIGIT_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_TWO_DIGIT_LEAP}|(?:{_TWO_DIGIT_LEAP}00))"  # 0000 is not a year
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# Without leap seconds: which minutes have one is not in the text.
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

# At most 4 labels of at most 24 characters: within the 253 of a name, without counting it.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,22}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,24}"
# The local part without quotes, at most 2 atoms of 24: within its 64 characters.
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})?@{_HOSTNAME}"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    "(?:"
    + "|".join(
        [
            f"(?:{_H16}:){{6}}{_LS32}",
            f"::(?:{_H16}:){{5}}{_LS32}",
            *(
                f"(?:(?:{_H16}:){{0,{before}}}{_H16})?::(?:{_H16}:){{{4 - before}}}{_LS32}"
                for before in range(5)
            ),
            f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
            f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
        ]
    )
    + ")"
)

_PCHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_SEGMENT_NO_COLON = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})+"
_USER = "(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?"
_REGISTERED = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
# No address in brackets: all its forms take ten times the states of the rest.
_AUTHORITY = f"{_USER}{_REGISTERED}(?::[0-9]*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_HIERARCHY = f"//{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_HIERARCHY}|{_PCHAR}+(?:/{_PCHAR}*)*|){_TAIL}"
_URI_REFERENCE = f"(?:{_URI}|(?:{_HIERARCHY}|{_SEGMENT_NO_COLON}(?:/{_PCHAR}*)*|){_TAIL})"
_POINTER_CHAR = r"(?:[^/~\x{10FFFD}-\x{10FFFF}]|~[01])"

_EXPRESSIONS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "json-pointer": f"(?:/{_POINTER_CHAR}*)*",
}
ENFORCED = tuple(sorted(_EXPRESSIONS))
REFUSED = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "regex",
    "relative-json-pointer",
    "uri-template",
)


def format_texts(name: str) -> Dfa | None:
    """Return a format's texts, None where the standard knows no such format.

    Raises:
        SchemaError: the standard has the format, and it is not enforced here.
    """
    expression = _EXPRESSIONS.get(name)
    if expression is not None:
        return engine_full_match(expression)
    if name in REFUSED:
        raise SchemaError(
            f"format {name!r} cannot be enforced; these can: {', '.join(ENFORCED)}",
            code="unsupported_schema",
        )
    return None


def expression_of(name: str) -> str:
    """Return the expression of an enforced format, in the engine's syntax."""
    return _EXPRESSIONS[name]

"""What is asked of a JSON number's value, and how one value is written.

Values are exact decimals: 0.30 is a multiple of 0.1, and 1.0 is an integer, though an `integer` is
written without a fraction.
"""

from dataclasses import dataclass, replace
from decimal import Decimal

from jaxserve.errors import SchemaError

MAX_DIGITS = 400
"""Of a bound or factor, before and behind the point."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit, and whether it is itself within."""

    value: Decimal
    inclusive: bool


@dataclass(frozen=True, slots=True)
class NumberRange:
    """What is asked of a number.

    Attributes:
        integer: True: only integers; False: only others; None: both.
        multiples, not_multiples: it is a multiple of each, of none.
        excluded: values that it does not have.
    """

    integer: bool | None = None
    least: Bound | None = None
    most: Bound | None = None
    multiples: frozenset[Decimal] = frozenset()
    not_multiples: frozenset[Decimal] = frozenset()
    excluded: frozenset[Decimal] = frozenset()

    def at_least(self, bound: Bound) -> "NumberRange":
        """Return this with a lower bound, which may change nothing."""
        if self.least is not None and (
            (bound.value, not bound.inclusive) <= (self.least.value, not self.least.inclusive)
        ):
            return self
        return replace(self, least=bound)

    def at_most(self, bound: Bound) -> "NumberRange":
        """Return this with an upper bound, which may change nothing."""
        if self.most is not None and (
            (bound.value, bound.inclusive) >= (self.most.value, self.most.inclusive)
        ):
            return self
        return replace(self, most=bound)

    def __contains__(self, value: Decimal) -> bool:
        whole = value == value.to_integral_value()
        return bool(
            (self.integer is None or self.integer == whole)
            and (self.least is None or _above(value, self.least))
            and (self.most is None or _above(value.copy_negate(), _negated(self.most)))
            and all(is_multiple(value, factor) for factor in self.multiples)
            and not any(is_multiple(value, factor) for factor in self.not_multiples)
            and value not in self.excluded
        )

    @property
    def is_empty(self) -> bool:
        """Whether the bounds leave nothing; False does not promise that something is left."""
        if self.least is None or self.most is None:
            return False
        if self.least.value == self.most.value:
            return self.least.value not in self
        return self.least.value > self.most.value


ANY_NUMBER = NumberRange()
ANY_INTEGER = NumberRange(integer=True)


def number_texts(value: Decimal) -> frozenset[bytes]:
    """Return how one value is written: as an integer where it is one, and as it was given.

    Raises:
        SchemaError: it has too many digits.
    """
    ratio(value)
    given = str(value)
    texts = {given if "E" not in given and "." in given else _plain(value)}
    if value == value.to_integral_value():
        texts.add(_plain(value.to_integral_value()))
    return frozenset(text.encode() for text in texts)


def _plain(value: Decimal) -> str:
    """Return a number without an exponent; "-0" is 0."""
    if value == 0:
        return "0"
    return f"{value:f}"


def _above(value: Decimal, bound: Bound) -> bool:
    return value > bound.value or (bound.inclusive and value == bound.value)


def _negated(bound: Bound) -> Bound:
    return Bound(bound.value.copy_negate(), bound.inclusive)


def ratio(value: Decimal) -> tuple[int, int]:
    """Return a number as digits and how many of them stand behind the point."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or abs(exponent) + len(digits) > 2 * MAX_DIGITS:
        raise SchemaError(f"a number has more than {MAX_DIGITS} digits", code="schema_too_complex")
    whole = int("".join(map(str, digits)) or "0") * 10 ** max(exponent, 0)
    return (-whole if sign else whole), max(-exponent, 0)


def is_multiple(value: Decimal, factor: Decimal) -> bool:
    """Say whether a number is an integer times another."""
    (a, a_places), (b, b_places) = ratio(value), ratio(factor)
    places = max(a_places, b_places)
    remainder: int = a * 10 ** (places - a_places) % (b * 10 ** (places - b_places))
    return remainder == 0

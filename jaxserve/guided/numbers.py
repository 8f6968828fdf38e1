"""JSON numbers within bounds, as automata over their digits.

Where anything is asked of a number's value it is written without an exponent.
"""

from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import AutomatonTooLargeError, Dfa, explore, minimize
from jaxserve.guided.number_ranges import ANY_INTEGER, ANY_NUMBER, NumberRange, ratio
from jaxserve.guided.regex import engine_full_match

MAX_FRACTION_DIGITS = 15
"""Of a number with a fraction, before and behind the point: a double tells all of them apart."""

MAX_REMAINDERS = 10_000
MAX_STATES = 20_000

_ALPHABET = b"-.0123456789"


@lru_cache(maxsize=256)
def numbers(wanted: NumberRange) -> Dfa:
    """Return the texts of the numbers within a range.

    Raises:
        SchemaError: a bound has too many digits, or counting remainders takes too many states.
    """
    if wanted == ANY_NUMBER:
        return engine_full_match(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
    if wanted == ANY_INTEGER:
        return engine_full_match(r"-?(?:0|[1-9][0-9]*)")
    reader = _Reader(wanted)
    try:
        return minimize(explore(reader.start(), reader.step, reader.accepts, _ALPHABET, MAX_STATES))
    except AutomatonTooLargeError:
        raise SchemaError(
            "the number's bounds and factors together are too complex", code="schema_too_complex"
        ) from None


class _State(NamedTuple):
    """What is known after some digits.

    `phase`: "start", "minus", "zero", "whole", "point", "fraction". `compared`: for each limit,
    how many of its digits the number's were compared with, and -1, 0 or 1 for less, equal, greater
    so far. `remainders`: for each factor. `fraction`: whether a digit behind the point is not 0.
    `digits`: how many there were, not counting a leading zero, up to MAX_FRACTION_DIGITS.
    """

    phase: str
    negative: bool
    compared: tuple[tuple[int, int], ...]
    remainders: tuple[tuple[int, int], ...]
    fraction: bool
    digits: int


class _Limit:
    """A magnitude that the number's own is compared with, digit by digit."""

    def __init__(self, value: Decimal) -> None:
        digits, places = ratio(value.copy_abs())
        text = str(digits).rjust(places + 1, "0")
        self.whole = text[: len(text) - places].encode()
        self.fraction = text[len(text) - places :].encode().rstrip(b"0")

    def whole_digit(self, known: tuple[int, int], digit: int) -> tuple[int, int]:
        """Compare a digit before the point, as if both had as many."""
        count, order = known
        if count < len(self.whole):
            order = order or _sign(digit - self.whole[count])
        # One more than the limit has: greater for good.
        return (count + 1, order) if count < len(self.whole) else (len(self.whole) + 1, 1)

    def end_of_whole(self, known: tuple[int, int]) -> tuple[int, int]:
        """Return the comparison once the number of digits is known."""
        count, order = known
        return (0, order if count == len(self.whole) else _sign(count - len(self.whole)))

    def fraction_digit(self, known: tuple[int, int], digit: int) -> tuple[int, int]:
        """Compare a digit behind the point."""
        count, order = known
        if order:
            return (0, order)
        limit = self.fraction[count] if count < len(self.fraction) else ord("0")
        order = _sign(digit - limit)
        return (0, order) if order else (min(count + 1, len(self.fraction)), 0)

    def end(self, known: tuple[int, int]) -> int:
        """Return the comparison at the end of the number's fraction."""
        count, order = known
        return order or (-1 if count < len(self.fraction) else 0)


class _Reader:
    """Reads numbers digit by digit, and says which ones are within a range."""

    def __init__(self, wanted: NumberRange) -> None:
        self._wanted = wanted
        self._bounds = [bound for bound in (wanted.least, wanted.most) if bound is not None]
        excluded = sorted(wanted.excluded)
        self._values = [bound.value for bound in self._bounds] + excluded
        self._limits = [_Limit(value) for value in self._values]
        self._factors = [*sorted(wanted.multiples), *sorted(wanted.not_multiples)]
        self._scaled = [ratio(factor) for factor in self._factors]
        if any(whole > MAX_REMAINDERS for whole, _ in self._scaled):
            raise SchemaError(
                f"a factor of multipleOf has more than {MAX_REMAINDERS} remainders",
                code="schema_too_complex",
            )

    def start(self) -> _State:
        """Return the state before the first character."""
        return _State(
            "start",
            False,
            ((0, 0),) * len(self._limits),
            ((0, 0),) * len(self._factors),
            False,
            0,
        )

    def step(self, state: _State, byte: int) -> _State | None:
        """Return the state after a character; None where it cannot come."""
        if byte == ord("-"):
            return state._replace(phase="minus", negative=True) if state.phase == "start" else None
        if byte == ord("."):
            if state.phase not in ("zero", "whole") or self._wanted.integer is True:
                return None
            if state.digits == MAX_FRACTION_DIGITS:
                return None
            ended = self._end_of_whole(state)
            return state._replace(phase="point", compared=ended)
        if state.phase in ("point", "fraction"):
            return self._fraction_digit(state, byte)
        if state.phase == "zero":
            return None
        is_zero = state.phase in ("start", "minus") and byte == ord("0")
        counted = self._wanted.integer is not True and not is_zero
        return state._replace(
            phase="zero" if is_zero else "whole",
            digits=min(state.digits + counted, MAX_FRACTION_DIGITS),
            compared=tuple(
                limit.whole_digit(known, byte)
                for limit, known in zip(self._limits, state.compared, strict=True)
            ),
            remainders=tuple(
                ((remainder * 10 + byte - ord("0")) % whole, 0)
                for (remainder, _), (whole, _) in zip(state.remainders, self._scaled, strict=True)
            ),
        )

    def accepts(self, state: _State) -> bool:
        """Whether the number may end here, and is within the range."""
        if state.phase not in ("zero", "whole", "fraction"):
            return False
        if self._wanted.integer is False and not state.fraction:
            return False
        return self._compares(state) and self._divides(state)

    def _end_of_whole(self, state: _State) -> tuple[tuple[int, int], ...]:
        pairs = zip(self._limits, state.compared, strict=True)
        return tuple(limit.end_of_whole(known) for limit, known in pairs)

    def _fraction_digit(self, state: _State, byte: int) -> _State | None:
        if state.digits == MAX_FRACTION_DIGITS:
            return None
        remainders = []
        for (remainder, count), (whole, places) in zip(state.remainders, self._scaled, strict=True):
            if count < places:
                remainders.append(((remainder * 10 + byte - ord("0")) % whole, count + 1))
            elif byte == ord("0") or remainder == whole:
                remainders.append((remainder, count))
            else:
                # More places than the factor has: a multiple of it no more, for good.
                remainders.append((whole, count))
        return state._replace(
            phase="fraction",
            compared=tuple(
                limit.fraction_digit(known, byte)
                for limit, known in zip(self._limits, state.compared, strict=True)
            ),
            remainders=tuple(remainders),
            fraction=state.fraction or byte != ord("0"),
            digits=state.digits + 1,
        )

    def _compares(self, state: _State) -> bool:
        known = state.compared if state.phase == "fraction" else self._end_of_whole(state)
        orders = [limit.end(one) for limit, one in zip(self._limits, known, strict=True)]
        signed = [
            _order(state.negative, order, value)
            for order, value in zip(orders, self._values, strict=True)
        ]
        num_bounds = len(self._bounds)
        for bound, order in zip(self._bounds, signed[:num_bounds], strict=True):
            inside = order > 0 if bound is self._wanted.least else order < 0
            if not inside and not (bound.inclusive and order == 0):
                return False
        return all(signed[num_bounds:])

    def _divides(self, state: _State) -> bool:
        num_multiples = len(self._wanted.multiples)
        for index, ((remainder, count), (whole, places)) in enumerate(
            zip(state.remainders, self._scaled, strict=True)
        ):
            is_multiple = (
                remainder < whole and remainder * 10 ** max(places - count, 0) % whole == 0
            )
            if is_multiple != (index < num_multiples):
                return False
        return True


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _order(negative: bool, magnitude_order: int, limit: Decimal) -> int:
    """Compare a number with a limit, given how their magnitudes compare."""
    if limit == 0:
        return -magnitude_order if negative else magnitude_order
    if negative != (limit < 0):
        # A number that is -0 compares as 0 would: its magnitude is less than the limit's.
        return -1 if negative else 1
    return -magnitude_order if negative else magnitude_order

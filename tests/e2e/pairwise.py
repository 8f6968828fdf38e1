"""All pairs: few rows in which every two levels of different factors meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, object]


def all_pairs(
    factors: Mapping[str, Sequence[object]], *, is_allowed: Callable[[Row], bool]
) -> Iterator[Row]:
    """Yield rows, one level of each factor, until every pair that some row may have was in one.

    `is_allowed` judges rows and beginnings of rows: what it refuses, no more factors may mend. The
    rows are the same each time.
    """
    open_pairs = {
        ((a, i), (b, j))
        for a, b in combinations(factors, 2)
        for i, one in enumerate(factors[a])
        for j, other in enumerate(factors[b])
        if is_allowed({a: one, b: other})
    }
    while open_pairs:
        first = min(open_pairs)
        chosen = dict(first)
        for name in factors:
            if name not in chosen:
                chosen[name] = _best_level(name, chosen, factors, open_pairs, is_allowed)
        pairs = {(x, y) for x, y in combinations([(name, chosen[name]) for name in factors], 2)}
        if not open_pairs & pairs:
            raise AssertionError(f"no row may have {first}")
        open_pairs -= pairs
        yield {name: factors[name][chosen[name]] for name in factors}


def _best_level(
    name: str,
    chosen: Mapping[str, int],
    factors: Mapping[str, Sequence[object]],
    open_pairs: set[tuple[tuple[str, int], tuple[str, int]]],
    is_allowed: Callable[[Row], bool],
) -> int:
    """Return the level that closes most pairs with what is chosen, the first of equals."""

    def num_closed(level: int) -> int:
        this = (name, level)
        return sum(
            (this, other) in open_pairs or (other, this) in open_pairs for other in chosen.items()
        )

    row = {other: factors[other][level] for other, level in chosen.items()}
    levels = [
        level for level, value in enumerate(factors[name]) if is_allowed({**row, name: value})
    ]
    return max(levels, key=lambda level: (num_closed(level), -level))

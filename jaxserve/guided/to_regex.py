"""A small automaton over ASCII as a regular expression."""

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import DEAD, Dfa

MAX_STATES = 400
MAX_LENGTH = 200_000


def to_regex(dfa: Dfa) -> str:
    """Return an expression of an automaton's texts, by taking out one state after another.

    Raises:
        SchemaError: it is too large for that.
    """
    count = dfa.num_states
    if count > MAX_STATES:
        raise _too_complex()
    start, end = count, count + 1
    edges: dict[int, dict[int, str]] = {state: {} for state in range(count + 2)}
    table = dfa.moves.by_byte()
    for state in range(count):
        targets: dict[int, list[int]] = {}
        for byte in range(0x80):
            if table[state, byte] != DEAD:
                targets.setdefault(int(table[state, byte]), []).append(byte)
        edges[state] = {target: _class(found) for target, found in targets.items()}
        if dfa.accepting_S[state]:
            edges[state][end] = ""
    edges[start][0] = ""
    # States with few ways through them first: expressions stay short.
    left = set(range(count))
    while left:
        state = min(left, key=lambda x: len(edges[x]) * sum(x in out for out in edges.values()))
        left.discard(state)
        _take_out(edges, state)
        if sum(len(text) for out in edges.values() for text in out.values()) > MAX_LENGTH:
            raise _too_complex()
    return edges[start].get(end, "[^\\x00-\\x{10FFFF}]")


def _take_out(edges: dict[int, dict[int, str]], state: int) -> None:
    out = edges.pop(state)
    loop = out.pop(state, None)
    repeated = "" if loop is None else f"(?:{loop})*"
    for targets in edges.values():
        first = targets.pop(state, None)
        if first is None:
            continue
        for target, last in out.items():
            way = f"{_group(first)}{repeated}{_group(last)}"
            other = targets.get(target)
            targets[target] = way if other is None else f"{other}|{way}"


def _group(expression: str) -> str:
    return f"(?:{expression})" if "|" in expression else expression


def _class(found: list[int]) -> str:
    """Return a class of bytes, as ranges."""
    ranges: list[list[int]] = []
    for byte in found:
        if ranges and ranges[-1][1] == byte - 1:
            ranges[-1][1] = byte
        else:
            ranges.append([byte, byte])
    text = "".join(
        f"\\x{first:02X}" if first == last else f"\\x{first:02X}-\\x{last:02X}"
        for first, last in ranges
    )
    return f"[{text}]"


def _too_complex() -> SchemaError:
    return SchemaError("a number's bounds are too complex", code="schema_too_complex")

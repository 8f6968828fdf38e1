"""Regular expressions, as JSON Schema means them, to automata over UTF-8.

outlines-core builds the automaton, over a vocabulary of the 256 bytes. What is written in ECMA 262's
syntax is first written in its engine's: classes such as `\\d` are ASCII, and `^` and `$` become two
characters that stand before and behind the text and are taken out of the automaton again, so that
they may stand anywhere in an expression. Texts have no characters of plane 16 (U+100000 on): these
two are of it, and so are the characters that stand for control tokens.
"""

import re
from functools import lru_cache
from typing import Final

import numpy as np
import outlines_core

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import DEAD, Dfa, from_table, nothing

_BEGIN: Final = "\U0010fffe"
_END: Final = "\U0010ffff"
_OPENING: Final = "\U0010fffd"
_MARKS = r"\x{10FFFD}-\x{10FFFF}"
_PLANE_16_LEAD = 0xF4

_END_ID = 256
_VOCABULARY = outlines_core.Vocabulary(_END_ID, {bytes([byte]): [byte] for byte in range(256)})
_SPACES = (
    r"\t\n\x{B}\f\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
)
_SHORTHANDS = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_ANY = rf"[^\n\r\x{{2028}}\x{{2029}}{_MARKS}]"
_WORD_BOUNDARY = {"b": r"(?-u:\b)", "B": r"(?-u:\B)"}
_HEX_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_HIGH_LOW = re.compile(r"u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP](\{[^{}]*\}|[A-Za-z])")
_GROUP = re.compile(r"\(\?(?::|i\)|P?<[A-Za-z_][A-Za-z0-9_]*>)")
_LITERAL_ESCAPES = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\f", "v": r"\x{B}", "0": r"\x{0}"}
_PUNCTUATION = set("^$\\.*+?()[]{}|/-&~#\"'`!%,:;<=>@_ ")


def search(pattern: str) -> Dfa:
    """Return the texts in which an expression matches somewhere.

    Raises:
        SchemaError: it is no regular expression, or has look-around or back-references.
    """
    rest = f"[^{_OPENING}]*"
    return _strip_marks(f"{rest}(?:{to_engine_syntax(pattern)}){rest}")


def full_match(pattern: str) -> Dfa:
    """Return the texts that an expression matches from end to end; errors as in `search`."""
    return _strip_marks(f"{_BEGIN}?(?:{to_engine_syntax(pattern)}){_END}?")


@lru_cache(maxsize=256)
def engine_full_match(expression: str) -> Dfa:
    """Return the texts that an expression in the engine's own syntax matches from end to end.

    Its negated classes and dots must leave plane 16 out.
    """
    return _texts(_build(expression))


def any_text() -> Dfa:
    """Return all texts in UTF-8 without characters of plane 16."""
    return engine_full_match(f"[^{_MARKS}]*")


def _build(expression: str) -> Dfa:
    """Return the automaton of an expression in the engine's syntax, over raw bytes.

    A character that no text has stands in front: without it the engine would also prepare for
    matches that begin anywhere, and counted repetitions would grow exponentially. `\\z` makes it
    take the longest alternative, not the first.
    """
    try:
        index = outlines_core.Index(rf"{_OPENING}(?:{expression})\z", _VOCABULARY)
    except Exception as error:  # the library raises its own kinds, all of them about its input
        raise SchemaError(f"cannot use the regular expression: {error}") from error
    transitions = index.get_transitions()
    start = index.get_initial_state()
    for byte in _OPENING.encode():
        start = transitions.get(start, {}).get(byte)
        if start is None:
            return nothing()
    finals = index.get_final_states()
    order = {start: 0}
    states = [start]
    table: list[list[int]] = []
    for state in states:
        row = [DEAD] * 256
        for byte, following in transitions.get(state, {}).items():
            if byte == _END_ID:
                continue
            if following not in order:
                order[following] = len(states)
                states.append(following)
            row[byte] = order[following]
        table.append(row)
    accepting = np.array([state in finals for state in states], np.bool_)
    return from_table(np.array(table, np.int32), accepting)


def _texts(dfa: Dfa) -> Dfa:
    """Keep what has no character of plane 16 and no byte that is in no UTF-8."""
    table = dfa.moves.by_byte().copy()
    table[:, _PLANE_16_LEAD:] = DEAD
    return from_table(table, dfa.accepting_S)


def _strip_marks(expression: str) -> Dfa:
    """Return the texts that an expression matches with the marks put round them."""
    dfa = _build(expression)
    start, taken = dfa.walk(_BEGIN.encode())
    if taken < len(_BEGIN.encode()):
        return nothing()
    table = dfa.moves.by_byte().copy()
    state = np.arange(dfa.num_states)
    for byte in _END.encode():
        state = np.where(state == DEAD, DEAD, table[state, byte])
    accepting = (state != DEAD) & dfa.accepting_S[state]
    table[:, _PLANE_16_LEAD:] = DEAD
    return from_table(table, accepting, start)


def to_engine_syntax(pattern: str) -> str:
    """Write an ECMA 262 expression in the engine's syntax, with marks for `^` and `$`.

    Raises:
        SchemaError: it uses what automata cannot do.
    """
    return _Translation(pattern).run()


class _Translation:
    """A pass over an expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def run(self) -> str:
        """Return the translation."""
        parts = []
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char == "\\":
                parts.append(self._escape(in_class=False))
            elif char == "[":
                parts.append(self._character_class())
            elif char == "(":
                parts.append(self._group())
            else:
                self._at += 1
                parts.append({".": _ANY, "^": _BEGIN, "$": _END}.get(char, char))
        return "".join(parts)

    def _group(self) -> str:
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            return "("
        match = _GROUP.match(self._pattern, self._at)
        if match is None:
            raise self._refuse("look-around and flags", self._pattern[self._at : self._at + 4])
        self._at = match.end()
        return match[0]

    def _character_class(self) -> str:
        """Translate `[...]`; the engine has set operations and nested classes, ECMA has none."""
        self._at += 1
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        while True:
            if self._at >= len(self._pattern):
                raise SchemaError(f"cannot use the regular expression {self._pattern!r}: [ is open")
            char = self._pattern[self._at]
            if char == "\\":
                parts.append(self._escape(in_class=True))
                continue
            self._at += 1
            if char == "]":
                break
            # A hyphen stays what it is in ECMA: a range, or itself at an end.
            literal = char in "[&~^" or (
                char == "-" and (not parts or self._pattern.startswith("]", self._at))
            )
            parts.append("\\" + char if literal else char)
        inner = "".join(parts)
        if negated:
            return f"[^{inner}{_MARKS}]"
        if not inner:
            return r"[^\x{0}-\x{10FFFF}]"
        return f"[{inner}&&[^{_MARKS}]]"

    def _escape(self, *, in_class: bool) -> str:
        rest = self._at + 1
        if rest >= len(self._pattern):
            raise SchemaError(f"cannot use the regular expression {self._pattern!r}: ends with \\")
        char = self._pattern[rest]
        pair = _HIGH_LOW.match(self._pattern, rest)
        code = _HEX_ESCAPE.match(self._pattern, rest)
        category = _PROPERTY.match(self._pattern, rest)
        self._at = rest + 1
        if pair is not None:
            self._at = pair.end()
            high, low = int(pair[1], 16), int(pair[2], 16)
            return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:X}}}"
        if code is not None:
            self._at = code.end()
            return f"\\x{{{int(next(filter(None, code.groups())), 16):X}}}"
        if category is not None:
            self._at = category.end()
            name = category[1].removeprefix("{").removesuffix("}")
            return f"[\\{char}{{{name}}}&&[^{_MARKS}]]"
        if char in _SHORTHANDS:
            return _SHORTHANDS[char] if in_class else f"[{_SHORTHANDS[char]}]"
        if char.lower() in _SHORTHANDS:
            return f"[^{_SHORTHANDS[char.lower()]}{_MARKS}]"
        if char in _LITERAL_ESCAPES and not self._pattern[rest + 1 : rest + 2].isdigit():
            return _LITERAL_ESCAPES[char]
        if char == "b" and in_class:
            return r"\x{8}"
        if char in _WORD_BOUNDARY and not in_class:
            return _WORD_BOUNDARY[char]
        if char == "c" and self._pattern[rest + 1 : rest + 2].isalpha():
            self._at += 1
            return f"\\x{{{ord(self._pattern[rest + 1]) % 32:X}}}"
        if char in _PUNCTUATION or ord(char) > 0x7F:
            return re.escape(char) if char in r"^$\.*+?()[]{}|-&~#" else char
        raise self._refuse("back-references and unknown escapes", f"\\{char}")

    def _refuse(self, what: str, found: str) -> SchemaError:
        return SchemaError(
            f"cannot use the regular expression {self._pattern!r}: {what} such as {found!r} are"
            " not supported",
            code="unsupported_schema",
        )

r"""ECMA 262's regular expressions, written in the syntax of Rust's `regex` crate.

Shorthands such as `\\d` become ASCII classes, set operations and nested classes that ECMA does not
have become literal characters. `^` and `$` become what the caller wants them to be. No class and no
dot matches the three characters in MARKS, which an expression cannot name either.
"""

import re
from typing import Final

from jaxserve.errors import SchemaError

MARKS: Final = r"\x{10FFFD}-\x{10FFFF}"
_FIRST_OF_PLANE_16 = 0x100000
_SPACES = (
    r"\t\n\x{B}\f\r \x{A0}\x{1680}\x{2000}-\x{200A}"
    r"\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
)
_SHORTHANDS = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_ANY = rf"[^\n\r\x{{2028}}\x{{2029}}{MARKS}]"
_WORD_BOUNDARY = {"b": r"(?-u:\b)", "B": r"(?-u:\B)"}
_HEX_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_HIGH_LOW = re.compile(r"u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_CONTROL = re.compile("c([A-Za-z])")
_PROPERTY = re.compile(r"[pP](\{[^{}]*\}|[A-Za-z])")
_GROUP = re.compile(r"\(\?(?::|i\)|P?<[A-Za-z_][A-Za-z0-9_]*>)")
_LETTERS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\f", "v": r"\x{B}", "0": r"\x{0}"}
_PUNCTUATION = frozenset("^$\\.*+?()[]{}|/-&~#\"'`!%,:;<=>@_ ")
_OPERATORS = frozenset("^$\\.*+?()[]{}|-&~#")


def to_rust(pattern: str, *, begin: str, end: str) -> str:
    """Return an expression with `begin` and `end` for `^` and `$`.

    Raises:
        SchemaError: it uses what automata cannot do.
    """
    return _Translation(pattern, begin, end).run()


class _Translation:
    """A pass over an expression."""

    def __init__(self, pattern: str, begin: str, end: str) -> None:
        self._pattern = pattern
        self._edges = {"^": begin, "$": end, ".": _ANY}
        self._at = 0
        self._depth = 0

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
                self._depth -= char == ")"
                if self._depth < 0:
                    break
                parts.append(self._edges.get(char) or self._checked(char))
        # It is put within parentheses: ones that do not match would mean something else there.
        if self._depth:
            raise SchemaError(f"the regular expression {self._pattern!r} has a lone parenthesis")
        return "".join(parts)

    def _group(self) -> str:
        self._depth += 1
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            return "("
        match = _GROUP.match(self._pattern, self._at)
        if match is None:
            raise self._refuse("look-around and flags", self._pattern[self._at : self._at + 4])
        self._at = match.end()
        return match[0]

    def _character_class(self) -> str:
        self._at += 1
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        while True:
            if self._at >= len(self._pattern):
                raise SchemaError(f"the regular expression {self._pattern!r} has an open [")
            char = self._pattern[self._at]
            if char == "\\":
                parts.append(self._escape(in_class=True))
                continue
            self._at += 1
            if char == "]":
                break
            # A hyphen stays what it is in ECMA: a range, or itself at an end.
            at_end = not parts or self._pattern.startswith("]", self._at)
            literal = char in "[&~^" or (char == "-" and at_end)
            parts.append("\\" + char if literal else char)
        inner = "".join(parts)
        if negated:
            return f"[^{inner}{MARKS}]"
        return f"[{inner}&&[^{MARKS}]]" if inner else r"[^\x{0}-\x{10FFFF}]"

    def _escape(self, *, in_class: bool) -> str:
        self._at += 1
        code = self._code()
        if code is not None:
            char = chr(code)
            return f"\\x{{{code:X}}}" if in_class else self._checked(char, f"\\x{{{code:X}}}")
        category = _PROPERTY.match(self._pattern, self._at)
        if category is not None:
            self._at = category.end()
            name = category[1].removeprefix("{").removesuffix("}")
            return f"[\\{category[0][0]}{{{name}}}&&[^{MARKS}]]"
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if char.lower() in _SHORTHANDS:
            inner = _SHORTHANDS[char.lower()]
            if char.isupper():
                return f"[^{inner}{MARKS}]"
            return inner if in_class else f"[{inner}]"
        if char == "b" and in_class:
            return r"\x{8}"
        if char in _WORD_BOUNDARY and not in_class:
            return _WORD_BOUNDARY[char]
        return self._letter(char)

    def _code(self) -> int | None:
        """Read a number of a character: its hexadecimal digits, or a surrogate pair's."""
        pair = _HIGH_LOW.match(self._pattern, self._at)
        if pair is not None:
            self._at = pair.end()
            return 0x10000 + ((int(pair[1], 16) - 0xD800) << 10) + int(pair[2], 16) - 0xDC00
        code = _HEX_ESCAPE.match(self._pattern, self._at)
        control = _CONTROL.match(self._pattern, self._at)
        if code is not None:
            self._at = code.end()
            number = int(next(filter(None, code.groups())), 16)
        elif control is not None:
            self._at = control.end()
            number = ord(control[1]) % 32
        else:
            return None
        if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
            raise self._refuse("lone surrogates", f"U+{number:X}")
        return number

    def _letter(self, char: str) -> str:
        if char in _LETTERS and not self._pattern[self._at : self._at + 1].isdigit():
            return _LETTERS[char]
        if char and (char in _PUNCTUATION or ord(char) > 0x7F):
            return "\\" + char if char in _OPERATORS else self._checked(char)
        raise self._refuse("back-references and unknown escapes", f"\\{char}")

    def _checked(self, char: str, spelling: str | None = None) -> str:
        if ord(char) >= _FIRST_OF_PLANE_16:
            raise self._refuse("characters of plane 16", f"U+{ord(char):X}")
        return spelling or char

    def _refuse(self, what: str, found: str) -> SchemaError:
        return SchemaError(
            f"the regular expression {self._pattern!r} cannot be used: {what} such as {found!r}"
            " are not supported",
            code="unsupported_schema",
        )

"""How values are spelled: as JSON, or as Gemma 4 writes the arguments of a call.

Both have the same lists, objects, numbers and words; they differ in strings, names and spaces.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from jaxserve.errors import SchemaError
from jaxserve.guided.automaton import Dfa, intersection
from jaxserve.guided.composing import Nfa
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.regex import engine_full_match
from jaxserve.guided.regex_syntax import MARKS
from jaxserve.guided.strings import Length, counted, quoted
from jaxserve.guided.vocabulary import FIRST_MARK

# Read back as they are: what a reader of calls would take for the end of a name, or cut off it, is
# in none of them.
_BARE_NAME = re.compile(r"""(?!["'{\s])[^:,})\]]*(?<!\s)""")
_INNER = rf"""[^\x00-\x1F\s"'`:=,(){{}}\[\]{MARKS}]"""
FREE_NAME = rf"{_INNER}(?:(?:{_INNER}| )*{_INNER})?"
"""Bare names that no schema lists, in the syntax of Rust's expressions."""


class Notation(Protocol):
    """Spells the parts of a value; equal ones are equal, and can be hashed."""

    def __hash__(self) -> int: ...

    @property
    def commas(self) -> tuple[bytes, ...]:
        """What may stand between items."""

    @property
    def colons(self) -> tuple[bytes, ...]:
        """What may stand between a name and its value."""

    @property
    def sorts_names(self) -> bool:
        """Whether properties come sorted without regard to case, and not as schemas list them."""

    def scalar(self, text: bytes) -> bytes:
        """Spell a null, boolean, number or string that is given as JSON."""

    def string(self, content: Dfa, length: Length) -> Dfa:
        """Spell the strings whose content is in a language."""

    def name(self, name: str) -> bytes:
        """Spell the name of a property."""

    def names(self, content: Dfa, length: Length) -> Dfa:
        """Spell the names that are in a language; there may be none that can be spelled."""


@dataclass(frozen=True, slots=True)
class JsonNotation:
    """JSON. One space may follow a comma and a colon, or must (`spaces` 1), or must not (0)."""

    spaces: int | None = None

    @property
    def commas(self) -> tuple[bytes, ...]:
        """What may stand between items."""
        return self._separators(b",")

    @property
    def colons(self) -> tuple[bytes, ...]:
        """What may stand between a name and its value."""
        return self._separators(b":")

    @property
    def sorts_names(self) -> bool:
        """Names come as schemas list them."""
        return False

    def scalar(self, text: bytes) -> bytes:
        """Leave it as it is."""
        return text

    def string(self, content: Dfa, length: Length) -> Dfa:
        """Put quotes round it, and escapes in it."""
        return quoted(content, length)

    def name(self, name: str) -> bytes:
        """Spell a string."""
        return scalar_text(name)

    def names(self, content: Dfa, length: Length) -> Dfa:
        """Spell strings."""
        return quoted(content, length)

    def _separators(self, mark: bytes) -> tuple[bytes, ...]:
        both = (mark, mark + b" ")
        return both if self.spaces is None else both[self.spaces : self.spaces + 1]


@dataclass(frozen=True, slots=True)
class MarkedNotation:
    """Strings stand between two marks, without escapes, names stand bare, nothing is spaced.

    `mark` is the character that stands for the control token.
    """

    mark: str

    @property
    def commas(self) -> tuple[bytes, ...]:
        """What may stand between items."""
        return (b",",)

    @property
    def colons(self) -> tuple[bytes, ...]:
        """What may stand between a name and its value."""
        return (b":",)

    @property
    def sorts_names(self) -> bool:
        """Names come as chat templates sort them."""
        return True

    def scalar(self, text: bytes) -> bytes:
        """Put marks round strings."""
        return self._marked(json.loads(text)) if text.startswith(b'"') else text

    def string(self, content: Dfa, length: Length) -> Dfa:
        """Put marks round it."""
        return _between(self.mark, counted(content, length))

    def name(self, name: str) -> bytes:
        """Leave it bare where it can be read back so."""
        return plain_bytes(name) if is_bare(name) else self._marked(name)

    def names(self, content: Dfa, length: Length) -> Dfa:
        """Take those that can be read back bare."""
        return counted(_bare(content), length)

    def _marked(self, text: str) -> bytes:
        mark = self.mark.encode()
        return mark + plain_bytes(text) + mark


def is_bare(name: str) -> bool:
    """Whether a name is read back as it is where it stands bare."""
    return _BARE_NAME.fullmatch(name) is not None


@lru_cache(maxsize=256)
def _bare(content: Dfa) -> Dfa:
    return intersection(content, engine_full_match(FREE_NAME))


@lru_cache(maxsize=256)
def _between(mark: str, content: Dfa) -> Dfa:
    nfa = Nfa()
    first, last, end = nfa.node(), nfa.node(), nfa.node()
    nfa.literal(0, mark.encode(), first)
    nfa.embed(first, content, last)
    nfa.literal(last, mark.encode(), end)
    return nfa.determinize(end)


def plain_bytes(text: str) -> bytes:
    """Return a text as it is.

    Raises:
        SchemaError: it has characters that stand for control tokens.
    """
    if any(ord(character) >= FIRST_MARK for character in text):
        raise SchemaError(
            f"{text!r} has characters of plane 16, which cannot be written",
            code="unsupported_schema",
        )
    return text.encode()

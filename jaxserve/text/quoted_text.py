"""The text between two quotes, JSON's or Python's, as it comes."""

import json
import re

_STOPS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class QuotedText:
    """One string; its opening quote has been read already.

    Attributes:
        is_closed: its closing quote has been read. One with text behind it is none: models forget
            to escape them.
        has_stray_quote: there was such a one.
    """

    def __init__(self, quote: str) -> None:
        self.is_closed = False
        self.has_stray_quote = False
        self._quote = quote
        self._stop = _STOPS[quote]
        self._held = ""  # an escape under way, or a quote and the white space behind it
        self._half = ""  # the first of a pair of surrogates
        self._out: list[str] = []

    def push(self, text: str, at: int) -> tuple[str, int]:
        """Read from `at`; returns text that is final, and where the string or `text` ends."""
        while at < len(text) and not self.is_closed:
            if not self._held:
                found = self._stop.search(text, at)
                end = len(text) if found is None else found.start()
                self._write(text[at:end])
                self._held = "" if found is None else found[0]
                at = end + len(self._held)
            elif self._held[0] == self._quote:
                at = self._read_closing(text, at)
            else:
                at = self._read_escape(text, at)
        return self._take(), at

    def finish(self) -> str:
        """Return the rest where the text ends: what is held, but for a closing quote."""
        if self._held[:1] != self._quote:
            self._write(self._held)
        self._held = ""
        self._write_half()
        return self._take()

    def _take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _write(self, text: str) -> None:
        if text:
            self._write_half()
            self._out.append(text)

    def _write_half(self) -> None:
        if self._half:
            self._out.append("\ufffd")
            self._half = ""

    def _read_closing(self, text: str, at: int) -> int:
        """Tell a closing quote from one inside of the text by what follows it."""
        character = text[at]
        if character.isspace():
            self._held += character
            return at + 1
        held, self._held = self._held, ""
        if character in ",}])":
            self._write_half()
            self.is_closed = True
        else:
            self.has_stray_quote = True
            self._write(held)
        return at

    def _read_escape(self, text: str, at: int) -> int:
        """Resolve JSON's escapes; a backslash before anything else is text."""
        self._held += text[at]
        kind = self._held[1]
        is_hex = text[at] in _HEX_DIGITS
        if kind == "u" and len(self._held) < 6 and (len(self._held) == 2 or is_hex):
            return at + 1
        escape, self._held = self._held, ""
        if kind == self._quote or kind in "\\/":
            self._write(kind)
        elif kind in _ESCAPES:
            self._write(_ESCAPES[kind])
        elif kind == "u" and is_hex:
            self._write_code(chr(int(escape[2:], 16)))
        else:
            # What comes behind the backslash may be the closing quote.
            self._write(escape[:-1])
            return at
        return at + 1

    def _write_code(self, character: str) -> None:
        if "\ud800" <= character < "\udc00":
            self._write_half()
            self._half = character
        elif "\udc00" <= character <= "\udfff":
            pair, self._half = self._half + character, ""
            whole = pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            self._out.append(whole)
        else:
            self._write(character)


def unescaped(text: str) -> str:
    """Resolve the escapes of a whole text, where it is what JSON can have between quotes."""
    try:
        value: str = json.loads(f'"{text}"')
        value.encode()
    except ValueError:
        return text
    return value

"""A call's arguments as a model writes them, turned into JSON as they come.

Read are Gemma 4's own syntax, whose strings are bounded by a control token, JSON, and what models
make of either: the states below take any input, so that every call has arguments that are JSON.
Each departure from the syntax is noted in `repairs`. Text inside of a string leaves at once; a bare
literal waits for its end, since `1` may become `10`. Linear in the length of the text.
"""

import json
import re
from collections.abc import Callable, Mapping

import orjson

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}
_KEY = re.compile(r"\s*[A-Za-z_][\w.-]*\s*")
_KEY_END = re.compile(r"[:=,}\])]")
_BARE_STOP = re.compile(r"[,{}()\[\]]")
_QUOTED_STOP = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_OPENERS = {"{": "}", "[": "]", "(": ")"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
# Closers that a string without an end may have swallowed: deeper ones stay its text.
_MAX_SWALLOWED = 8


class ArgumentsWriter:
    """Writes the object of one call; its opening brace has been read already.

    Attributes:
        is_done: the object is complete.
        rest: text behind it, to be taken by who pushed it.
        repairs: names of what was put right, in order.
    """

    def __init__(
        self, types: Mapping[str, str], *, closer: str = "}", has_json_strings: bool = False
    ) -> None:
        """`types` are the JSON Schema types of the arguments, where each has exactly one.

        `has_json_strings`: strings are JSON's, so that quotes are nothing to repair.
        """
        self.is_done = False
        self.rest = ""
        self.repairs: list[str] = []
        self._types = types
        self._has_json_strings = has_json_strings
        self._closers = [closer]
        self._is_filled = [False]
        self._state: Callable[[str, int], int] = self._in_key
        self._out: list[str] = ["{"]
        self._key = ""
        self._buffer: list[str] = []
        self._nesting: list[str] = []  # closers of brackets inside of a bare word
        self._tail: list[str] = []  # of a bare word: what may be the next key
        self._quote = ""
        self._held = ""
        self._wanted = ""  # the type that a string may have to be turned into

    def push(self, text: str) -> str:
        """Take text between two delimiters; returns the JSON that it makes final."""
        at = 0
        while at < len(text):
            if self.is_done:
                self.rest += text[at:]
                break
            at = self._state(text, at)
        return self._take()

    def delimit(self) -> str:
        """Take a string delimiter; returns the JSON that it makes final."""
        if self._state == self._in_delimited:
            self._write_string(self._held)
            self._held = ""
            self._end_string()
        elif self._state == self._in_delimited_key:
            self._end_key(self._in_after_key)
        elif self._state in (self._in_bare, self._in_next_key):
            # The delimiter that is there closes; the one that opens was left out.
            self._repair("delimiter")
            self._buffer += self._tail
            self._end_bare(as_string=True)
        elif self._state in (self._in_quoted, self._in_escape, self._in_closing_quote):
            self._settle()
        elif not self.is_done:
            self._settle()
            self._open_delimited()
        return self._take()

    def close(self) -> str:
        """Take the end of the call: close what is open; returns the last of the JSON."""
        if not self.is_done:
            if self._state == self._in_delimited:
                self._end_swallowed()
            self._settle()
            if self._state == self._in_value and self._closers[-1] != "]":
                self._write_missing_value()
            if not self.is_done:
                self._repair("closer")
                while self._closers:
                    self._pop()
        return self._take()

    def _take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _repair(self, name: str) -> None:
        self.repairs.append(name)

    # Structure

    def _in_key(self, text: str, at: int) -> int:
        """Expect a key, or the end of the object."""
        character = text[at]
        if character.isspace() or character == ",":
            return at + 1
        if character == "{":  # a doubled brace
            self._repair("brace")
            return at + 1
        if character in "}])":
            self._close(character)
            return at + 1
        self._buffer.clear()
        if character in "\"'":
            self._quote = character
            self._state = self._in_quoted_key
            return at + 1
        self._state = self._in_bare_key
        return at

    def _in_bare_key(self, text: str, at: int) -> int:
        found = _KEY_END.search(text, at)
        if found is None:
            self._buffer.append(text[at:])
            return len(text)
        self._buffer.append(text[at : found.start()])
        character = found[0]
        if character == ":" or (character == "=" and self._closers[-1] == ")"):
            self._end_key(self._in_value)
        elif character == "=" or (character == ")" and ")" not in self._closers):
            self._buffer.append(character)
        else:
            self._end_key(self._in_value)
            self._write_missing_value()
            return found.start()
        return found.end()

    def _in_quoted_key(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        if end < 0:
            self._buffer.append(text[at:])
            return len(text)
        self._buffer.append(text[at:end])
        key = "".join(self._buffer)
        if (len(key) - len(key.rstrip("\\"))) % 2:
            self._buffer.append(self._quote)
            return end + 1
        if not (self._has_json_strings and self._quote == '"'):
            self._repair("quotes")
        self._buffer = [_unescaped(key)]
        self._end_key(self._in_after_key)
        return end + 1

    def _in_delimited_key(self, text: str, at: int) -> int:
        self._buffer.append(text[at:])
        return len(text)

    def _end_key(self, state: Callable[[str, int], int]) -> None:
        key = "".join(self._buffer)
        self._key = key.strip() if self._state == self._in_bare_key else key
        self._separate()
        self._out.append(f"{_quoted(self._key)}:")
        self._state = state

    def _in_after_key(self, text: str, at: int) -> int:
        """Expect the colon behind a key that had quotes of its own."""
        if text[at].isspace():
            return at + 1
        self._state = self._in_value
        if text[at] in ":=":
            return at + 1
        self._repair("colon")
        return at

    def _in_value(self, text: str, at: int) -> int:
        character = text[at]
        if character.isspace():
            return at + 1
        if character in "{[":
            self._open(character)
        elif character in "\"'":
            if not (self._has_json_strings and character == '"'):
                self._repair("quotes")
            self._quote = character
            self._begin_string(self._in_quoted)
        elif character in ",}])":
            if self._closers[-1] != "]":
                self._write_missing_value()
                return at
            if character != ",":
                self._close(character)
        else:
            self._separate_item()
            self._buffer.clear()
            self._nesting.clear()
            self._tail.clear()
            self._state = self._in_bare
            return at
        return at + 1

    def _in_after_value(self, text: str, at: int) -> int:
        character = text[at]
        if character.isspace():
            return at + 1
        if character in "}])":
            self._close(character)
            return at + 1
        self._state = self._in_value if self._closers[-1] == "]" else self._in_key
        if character == ",":
            return at + 1
        self._repair("comma")
        # Where a key is to follow, a colon would only make an empty one.
        return at + 1 if character == ":" else at

    def _separate(self) -> None:
        if self._is_filled[-1]:
            self._out.append(",")
        self._is_filled[-1] = True

    def _separate_item(self) -> None:
        """Separate a value from the one before; in an object its key has done that."""
        if self._closers[-1] == "]":
            self._separate()

    def _open(self, character: str) -> None:
        self._separate_item()
        self._out.append(character)
        self._closers.append(_OPENERS[character])
        self._is_filled.append(False)
        self._state = self._in_key if character == "{" else self._in_value

    def _close(self, character: str) -> None:
        if character in self._closers:
            while self._closers[-1] != character:
                self._repair("closer")
                self._pop()
            self._pop()
        elif len(self._closers) == 1 and character in "})":
            self._repair("closer")
            self._pop()
        else:
            self._repair("closer")

    def _pop(self) -> None:
        self._out.append("]" if self._closers.pop() == "]" else "}")
        self._is_filled.pop()
        self.is_done = not self._closers
        self._state = self._in_after_value

    def _write_missing_value(self) -> None:
        self._repair("value")
        self._out.append("null")
        self._state = self._in_after_value

    def _settle(self) -> None:
        """End the key or value under way, which something else has cut off."""
        if self._state in (self._in_bare_key, self._in_quoted_key, self._in_delimited_key):
            self._repair("colon")
            self._end_key(self._in_value)
        elif self._state == self._in_after_key:
            self._repair("colon")
            self._state = self._in_value
        elif self._state == self._in_bare:
            self._end_bare()
        elif self._state == self._in_next_key:
            self._buffer += self._tail
            self._tail.clear()
            self._end_bare()
        elif self._state in (self._in_quoted, self._in_escape):
            if self._held:
                self._write_string(self._held)
                self._held = ""
            self._repair("quotes")
            self._end_string()
        elif self._state == self._in_closing_quote:
            self._end_string()

    # Bare words

    def _in_bare(self, text: str, at: int) -> int:
        found = _BARE_STOP.search(text, at)
        if found is None:
            self._buffer.append(text[at:])
            return len(text)
        character = found[0]
        self._buffer.append(text[at : found.start()])
        if character in _OPENERS:
            self._nesting.append(_OPENERS[character])
        elif self._nesting and character in self._nesting:
            while self._nesting.pop() != character:
                pass
        elif self._nesting and character == ",":
            pass
        elif character == ",":
            return self._end_bare_at_comma(found.end())
        elif character in self._closers or (character == "}" and len(self._closers) == 1):
            self._end_bare()
            return found.start()
        self._buffer.append(character)
        return found.end()

    def _end_bare_at_comma(self, at: int) -> int:
        if self._closers[-1] == "]" or _literal("".join(self._buffer).strip()) is not None:
            self._end_bare()
            return at - 1
        self._tail = [","]
        self._state = self._in_next_key
        return at

    def _in_next_key(self, text: str, at: int) -> int:
        """Tell the comma behind a value from one inside of a bare text: a key would follow it."""
        found = _KEY_END.search(text, at)
        if found is None:
            self._tail.append(text[at:])
            return len(text)
        self._tail.append(text[at : found.start()])
        is_separator = found[0] == ":" or (found[0] == "=" and self._closers[-1] == ")")
        key = "".join(self._tail)[1:]
        if is_separator and _KEY.fullmatch(key):
            self._tail.clear()
            self._end_bare()
            self._buffer = [key]
            self._state = self._in_bare_key
            return found.start()
        self._buffer += self._tail
        self._tail.clear()
        self._state = self._in_bare
        if found[0] not in ":=":
            return found.start()
        self._buffer.append(found[0])
        return found.end()

    def _end_bare(self, *, as_string: bool = False) -> None:
        word = "".join(self._buffer).strip()
        self._buffer.clear()
        literal = None if as_string else _literal(word)
        is_text = self._type() == "string" and literal is not None and literal != "null"
        if literal is None or is_text:
            self._repair("type" if is_text else "string")
            self._out.append(_quoted(word))
        else:
            if literal != word:
                self._repair("literal")
            self._out.append(literal)
        self._state = self._in_after_value

    def _type(self) -> str:
        """Return the type that the schema gives the value under way."""
        return self._types.get(self._key, "") if len(self._closers) == 1 else ""

    # Strings

    def _open_delimited(self) -> None:
        if self._state == self._in_after_value:
            self._repair("comma")
            self._state = self._in_value if self._closers[-1] == "]" else self._in_key
        if self._state == self._in_key:
            self._buffer.clear()
            self._state = self._in_delimited_key
        else:
            self._begin_string(self._in_delimited)

    def _begin_string(self, state: Callable[[str, int], int]) -> None:
        self._separate_item()
        self._held = ""
        self._buffer.clear()
        wanted = self._type()
        # A string that is to become a number cannot leave before its end.
        self._wanted = wanted if wanted in ("integer", "number", "boolean") else ""
        if not self._wanted:
            self._out.append('"')
        self._state = state

    def _write_string(self, text: str) -> None:
        if self._wanted:
            self._buffer.append(text)
        else:
            self._out.append(_escaped(text))

    def _end_string(self) -> None:
        if self._wanted:
            text = "".join(self._buffer)
            self._buffer.clear()
            literal = _literal(text.strip())
            if literal is not None and _is_of_type(literal, self._wanted):
                self._repair("type")
                self._out.append(literal)
            else:
                self._out.append(_quoted(text))
        else:
            self._out.append('"')
        self._state = self._in_after_value

    def _in_delimited(self, text: str, at: int) -> int:
        """Take a string's text, less closers at its end that belong to the call.

        They do where the call ends without a delimiter behind them.
        """
        text = self._held + text[at:]
        self._held = ""
        if len(self._closers) <= _MAX_SWALLOWED:
            closers = "".join(reversed(self._closers))
            for length in range(min(len(closers), len(text)), 0, -1):
                if text.endswith(closers[:length]):
                    self._held = text[-length:]
                    text = text[:-length]
                    break
        if text:
            self._write_string(text)
        # All of `text` is taken: what is held is part of it.
        return at + _FAR

    def _end_swallowed(self) -> None:
        self._repair("delimiter")
        if len(self._held) < len(self._closers):
            self._write_string(self._held)
            self._end_string()
            return
        self._held = ""
        self._end_string()
        while self._closers:
            self._pop()

    def _in_quoted(self, text: str, at: int) -> int:
        found = _QUOTED_STOP[self._quote].search(text, at)
        if found is None:
            self._write_string(text[at:])
            return len(text)
        if found.start() > at:
            self._write_string(text[at : found.start()])
        self._held = found[0]
        self._state = self._in_closing_quote if found[0] == self._quote else self._in_escape
        return found.end()

    def _in_closing_quote(self, text: str, at: int) -> int:
        """Tell a closing quote from one inside of the text: something must follow it."""
        character = text[at]
        if character.isspace():
            self._held += character
            return at + 1
        if character in ",}])":
            self._held = ""
            self._end_string()
            return at
        self._repair("quotes")
        self._write_string(self._held)
        self._held = ""
        self._state = self._in_quoted
        return at

    def _in_escape(self, text: str, at: int) -> int:
        """Resolve JSON's escapes; a backslash before anything else is text."""
        self._held += text[at]
        kind = self._held[1]
        is_open = kind == "u" and len(self._held) < 6
        if is_open and (len(self._held) == 2 or text[at] in "0123456789abcdefABCDEF"):
            return at + 1
        escape, self._held = self._held, ""
        self._state = self._in_quoted
        if kind == self._quote or kind in "\\/":
            self._write_string(kind)
        elif kind in _ESCAPES:
            self._write_string(_ESCAPES[kind])
        elif kind == "u" and _HEX.fullmatch(escape[2:]):
            self._write_unicode(escape)
        else:
            # What follows the backslash may be the closing quote.
            self._write_string(escape[:-1])
            return at
        return at + 1

    def _write_unicode(self, escape: str) -> None:
        character = chr(int(escape[2:], 16))
        if "\ud800" <= character <= "\udfff":
            # Half of a pair: as JSON it may stand as it is, with the other half behind it.
            if self._wanted:
                self._buffer.append("\ufffd")
            else:
                self._out.append(escape)
        else:
            self._write_string(character)


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
# Beyond the end of every text.
_FAR = 1 << 62


def _escaped(text: str) -> str:
    return orjson.dumps(text)[1:-1].decode()


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


def _unescaped(key: str) -> str:
    """Resolve the escapes of a key, where it is what JSON can have between quotes."""
    try:
        text: str = json.loads(f'"{key}"')
        text.encode()
    except ValueError:
        return key
    return text


def _literal(word: str) -> str | None:
    """Return a bare word as a JSON literal, if it is one in some spelling."""
    if _NUMBER.fullmatch(word):
        return word
    return _WORDS.get(word.lower())


def _is_of_type(literal: str, wanted: str) -> bool:
    if wanted == "boolean":
        return literal in ("true", "false")
    is_number = _NUMBER.fullmatch(literal) is not None
    return is_number and (wanted == "number" or not set(literal) & set(".eE"))

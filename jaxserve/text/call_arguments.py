"""A call's arguments as a model writes them, turned into JSON as they come.

Read are Gemma 4's own syntax, whose strings are bounded by a control token, JSON, and what models
make of either: the states below take any input, so that every call has arguments that are JSON.
Each departure from the syntax is noted in `repairs`. Text inside of a string leaves at once; a bare
literal waits for its end, since `1` may become `10`. Linear in the length of the text.
"""

import re
from collections.abc import Callable, Mapping

from jaxserve.text.json_output import JsonOutput, literal, quoted
from jaxserve.text.quoted_text import QuotedText, unescaped

_KEY = re.compile(r"\s*[A-Za-z_][\w.-]*\s*")
_KEY_END = re.compile(r"[:=,}\])]")
_BARE_STOP = re.compile(r"[,{}()\[\]]")
_BRACKETS = {"{": "}", "[": "]", "(": ")"}
# Deeper ones are noise, and no client's JSON reader would take them.
_MAX_DEPTH = 128
# Closers that a string without an end may have swallowed: deeper ones stay its text.
_MAX_SWALLOWED = 8


class ArgumentsWriter:
    """Writes the object of one call; its opening brace has been read already.

    Attributes:
        rest: text behind the object, to be taken by who pushed it.
        repairs: names of what was put right, in order.
    """

    def __init__(
        self, types: Mapping[str, str], *, closer: str = "}", has_json_strings: bool = False
    ) -> None:
        """`types` are the JSON Schema types of the arguments, where each has exactly one.

        `has_json_strings`: strings are JSON's, so that quotes are nothing to repair.
        """
        self.rest = ""
        self.repairs: list[str] = []
        self._types = types
        self._has_json_strings = has_json_strings
        self._json = JsonOutput(closer)
        self._state: Callable[[str, int], int] = self._in_key
        self._key = ""
        self._quote = ""
        self._string = QuotedText('"')
        self._buffer: list[str] = []  # of a key, or a bare word
        self._nesting: list[str] = []  # closers of brackets inside of a bare word
        self._tail: list[str] = []  # of a bare word: what may be the next key
        self._held = ""  # closers at the end of a delimited string

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._json.is_done

    def push(self, text: str) -> str:
        """Take text between two delimiters; returns the JSON that it makes final."""
        at = 0
        while at < len(text):
            if self.is_done:
                self.rest += text[at:]
                break
            at = self._state(text, at)
        return self._json.take()

    def delimit(self) -> str:
        """Take a string delimiter; returns the JSON that it makes final."""
        if self._state == self._in_delimited:
            self._json.write_string(self._held)
            self._end_string()
        elif self._state == self._in_delimited_key:
            self._end_key("".join(self._buffer), self._in_after_key)
        elif self._state in (self._in_bare, self._in_next_key):
            # The delimiter that is there closes; the one that opens was left out.
            self._repair("delimiter")
            self._end_bare(as_string=True)
        elif self._state == self._in_quoted:
            self._settle()
        elif not self.is_done:
            self._settle()
            self._begin_delimited()
        return self._json.take()

    def close(self) -> str:
        """Take the end of the call: close what is open; returns the last of the JSON."""
        if not self.is_done:
            self._settle()
        if not self.is_done:
            if self._state == self._in_value and not self._json.is_in_list:
                self._write_missing_value()
            self._repair("closer")
            while not self.is_done:
                self._json.close()
        return self._json.take()

    def _repair(self, name: str) -> None:
        self.repairs.append(name)

    def _settle(self) -> None:
        """End the key or value under way, which something else has cut off."""
        if self._state in (self._in_bare_key, self._in_quoted_key, self._in_delimited_key):
            self._repair("colon")
            self._end_key("".join(self._buffer).strip(), self._in_value)
        elif self._state == self._in_after_key:
            self._repair("colon")
            self._state = self._in_value
        elif self._state in (self._in_bare, self._in_next_key):
            self._end_bare()
        elif self._state == self._in_quoted:
            self._json.write_string(self._string.finish())
            self._end_string()
        elif self._state == self._in_delimited:
            self._end_swallowed()

    # Keys

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
            self._note_quote(character)
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
        if self._separates(character):
            self._end_key("".join(self._buffer).strip(), self._in_value)
        elif character == "=" or (character == ")" and ")" not in self._json.closers):
            self._buffer.append(character)
        else:
            self._end_key("".join(self._buffer).strip(), self._in_value)
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
        else:
            self._end_key(unescaped(key), self._in_after_key)
        return end + 1

    def _in_delimited_key(self, text: str, at: int) -> int:
        self._buffer.append(text[at:])
        return len(text)

    def _end_key(self, key: str, state: Callable[[str, int], int]) -> None:
        self._key = key
        self._json.key(key)
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

    def _separates(self, character: str) -> bool:
        """Tell whether a character stands between key and value; `=` does in round brackets."""
        return character == ":" or (character == "=" and self._json.closers[-1] == ")")

    # Values

    def _in_value(self, text: str, at: int) -> int:
        character = text[at]
        if character.isspace():
            return at + 1
        if character in "{[":
            self._open(character)
        elif character in "\"'":
            self._note_quote(character)
            self._string = QuotedText(character)
            self._json.begin_string(self._type())
            self._state = self._in_quoted
        elif character in ",}])":
            if not self._json.is_in_list:
                self._write_missing_value()
                return at
            if character != ",":
                self._close(character)
        else:
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
        self._expect_next()
        if character == ",":
            return at + 1
        self._repair("comma")
        # Where a key is to follow, a colon would only make an empty one.
        return at + 1 if character == ":" else at

    def _expect_next(self) -> None:
        self._state = self._in_value if self._json.is_in_list else self._in_key

    def _open(self, character: str) -> None:
        if len(self._json.closers) >= _MAX_DEPTH:
            self._repair("brace")
            return
        self._json.open(character)
        self._expect_next()

    def _close(self, character: str) -> None:
        closers = self._json.closers
        is_outermost = len(closers) == 1 and character in "})"
        if character not in closers and not is_outermost:
            self._repair("closer")
            return
        while closers[-1] != character and len(closers) > 1:
            self._repair("closer")
            self._json.close()
        if closers[-1] != character:
            self._repair("closer")
        self._json.close()
        self._state = self._in_after_value

    def _write_missing_value(self) -> None:
        self._repair("value")
        self._json.value("null")
        self._state = self._in_after_value

    def _type(self) -> str:
        """Return the type that the schema gives the value under way."""
        return self._types.get(self._key, "") if len(self._json.closers) == 1 else ""

    # Bare words

    def _in_bare(self, text: str, at: int) -> int:
        found = _BARE_STOP.search(text, at)
        if found is None:
            self._buffer.append(text[at:])
            return len(text)
        character = found[0]
        self._buffer.append(text[at : found.start()])
        if character in _BRACKETS:
            if len(self._nesting) < _MAX_DEPTH:
                self._nesting.append(_BRACKETS[character])
        elif self._nesting:
            if character in self._nesting:
                while self._nesting.pop() != character:
                    pass
        elif character == ",":
            return self._end_bare_at_comma(found.start())
        elif character in self._json.closers or (character == "}" and len(self._json.closers) == 1):
            self._end_bare()
            return found.start()
        self._buffer.append(character)
        return found.end()

    def _end_bare_at_comma(self, at: int) -> int:
        if self._json.is_in_list or literal("".join(self._buffer).strip()) is not None:
            self._end_bare()
            return at
        self._tail.append(",")
        self._state = self._in_next_key
        return at + 1

    def _in_next_key(self, text: str, at: int) -> int:
        """Tell the comma behind a value from one inside of a bare text: a key would follow it."""
        found = _KEY_END.search(text, at)
        if found is None:
            self._tail.append(text[at:])
            return len(text)
        self._tail.append(text[at : found.start()])
        key = "".join(self._tail)[1:]
        if self._separates(found[0]) and _KEY.fullmatch(key):
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
        word = "".join([*self._buffer, *self._tail]).strip()
        self._buffer.clear()
        self._tail.clear()
        value = None if as_string else literal(word)
        if value not in (None, "null") and self._type() == "string":
            self._repair("type")
            value = quoted(word)
        elif value is None:
            self._repair("string")
            value = quoted(word)
        elif value != word:
            self._repair("literal")
        self._json.value(value or quoted(word))
        self._state = self._in_after_value

    # Strings

    def _note_quote(self, quote: str) -> None:
        self._quote = quote
        if not (self._has_json_strings and quote == '"'):
            self._repair("quotes")

    def _in_quoted(self, text: str, at: int) -> int:
        piece, at = self._string.push(text, at)
        self._json.write_string(piece)
        if self._string.is_closed:
            self._end_string()
        return at

    def _end_string(self) -> None:
        if self._state == self._in_quoted and self._string.has_stray_quote:
            self._repair("quotes")
        if self._json.end_string():
            self._repair("type")
        self._held = ""
        self._state = self._in_after_value

    def _begin_delimited(self) -> None:
        if self._state == self._in_after_value:
            self._repair("comma")
            self._expect_next()
        if self._state == self._in_key:
            self._buffer.clear()
            self._state = self._in_delimited_key
        else:
            self._json.begin_string(self._type())
            self._state = self._in_delimited

    def _in_delimited(self, text: str, at: int) -> int:
        """Take a string's text, less closers at its end that belong to the call.

        They do where the call ends without a delimiter behind them.
        """
        piece = self._held + text[at:]
        self._held = ""
        if len(self._json.closers) <= _MAX_SWALLOWED:
            closers = "".join(reversed(self._json.closers))
            for length in range(min(len(closers), len(piece)), 0, -1):
                if piece.endswith(closers[:length]):
                    self._held = piece[-length:]
                    piece = piece[:-length]
                    break
        self._json.write_string(piece)
        return len(text)

    def _end_swallowed(self) -> None:
        self._repair("delimiter")
        if len(self._held) < len(self._json.closers):
            self._json.write_string(self._held)
            self._end_string()
            return
        self._end_string()
        while not self.is_done:
            self._json.close()

"""A JSON object, written piece by piece."""

import re

import orjson

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class JsonOutput:
    """An object under way, whose opening brace is the first that it gives.

    Attributes:
        closers: what closes each container that is open, the innermost last, as the source has it;
            a round bracket may close the outermost.
    """

    def __init__(self, closer: str) -> None:
        self.closers = [closer]
        self._is_filled = [False]
        self._out = ["{"]
        self._wanted = ""  # the type that a string is to be turned into, if it can be
        self._string: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return not self.closers

    @property
    def is_in_list(self) -> bool:
        """Whether the innermost container is a list."""
        return self.closers[-1] == "]"

    def take(self) -> str:
        """Return what was written since the last time."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def key(self, key: str) -> None:
        """Write a key; its value follows."""
        self._separate()
        self._out.append(f"{quoted(key)}:")

    def value(self, text: str) -> None:
        """Write a value that is JSON."""
        self._separate_item()
        self._out.append(text)

    def open(self, character: str) -> None:
        """Open a container."""
        self.value(character)
        self.closers.append(_CLOSERS[character])
        self._is_filled.append(False)

    def close(self) -> None:
        """Close the innermost container."""
        self._out.append("]" if self.closers.pop() == "]" else "}")
        self._is_filled.pop()

    def begin_string(self, wanted: str) -> None:
        """Begin a string, of which nothing leaves before its end where it may become a `wanted`."""
        self._separate_item()
        self._wanted = wanted if wanted in ("integer", "number", "boolean") else ""
        if not self._wanted:
            self._out.append('"')

    def write_string(self, text: str) -> None:
        """Continue a string."""
        if self._wanted:
            self._string.append(text)
        elif text:
            self._out.append(quoted(text)[1:-1])

    def end_string(self) -> bool:
        """End a string; returns whether it became what was wanted."""
        if not self._wanted:
            self._out.append('"')
            return False
        text = "".join(self._string)
        self._string.clear()
        value = literal(text.strip())
        has_become = value is not None and _is_of_type(value, self._wanted)
        self._out.append(value if value is not None and has_become else quoted(text))
        return has_become

    def _separate(self) -> None:
        if self._is_filled[-1]:
            self._out.append(",")
        self._is_filled[-1] = True

    def _separate_item(self) -> None:
        """Separate a value from the one before; in an object its key has done that."""
        if self.is_in_list:
            self._separate()


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return orjson.dumps(text).decode()


def literal(word: str) -> str | None:
    """Return a bare word as a JSON literal, if it is one in some spelling."""
    if _NUMBER.fullmatch(word):
        return word
    return _WORDS.get(word.lower())


def _is_of_type(value: str, wanted: str) -> bool:
    if wanted == "boolean":
        return value in ("true", "false")
    is_number = _NUMBER.fullmatch(value) is not None
    return is_number and (wanted == "number" or not set(value) & set(".eE"))

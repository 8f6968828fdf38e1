r"""How values are spelled in the grammars of the host: what `notation` is to automata.

Strings, names and separators as JSON has them, or as Gemma 4 writes the arguments of a call.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.guided.conditions import HasFormat, Matches, refusal
from jaxserve.guided.formats import expression_of
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.notation import FREE_NAME, is_bare, plain_bytes
from jaxserve.guided.regex import plain_syntax
from jaxserve.guided.shapes import Entry, Texts
from jaxserve.guided.strings import ANY_LENGTH, Length

WHERE = "cannot be enforced in a schema that contains itself, or whose tables would be too large"

_HEX = "[0-9a-fA-F]"
_UNICODE = (
    rf"u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
_PLAIN = r'[^"\\\x00-\x1F\u{100000}-\u{10FFFF}]'
_CHARACTER = rf'(?:{_PLAIN}|\\(?:["\\\/bfnrt]|{_UNICODE}))'
# In one way only, so that names can be told apart by their texts.
_CANONICAL_CHARACTER = rf'(?:{_PLAIN}|\\["\\bfnrt])'
_ANY_CHARACTER = r"[^\u{100000}-\u{10FFFF}]"


class Terminals:
    """Named terminals, each once."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.upper()
        self._names: dict[str, str] = {}

    @property
    def lines(self) -> list[str]:
        """What says which terminal is which."""
        return [f"{name}: {text}" for text, name in self._names.items()]

    def name(self, kind: str, text: str) -> str:
        """Return a terminal's name."""
        return self._names.setdefault(text, f"{self._prefix}{kind}{len(self._names)}")


class Spelling(Protocol):
    """Spells the parts of a value as parts of rules."""

    @property
    def separators(self) -> list[str]:
        """The terminals SEP and COLON."""

    def ordered(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Put properties into their order."""

    def scalar(self, text: bytes) -> str:
        """Spell a value that is given as JSON."""

    def name(self, name: str) -> str:
        """Spell the name of a property."""

    def string(self, texts: Texts, terminals: Terminals) -> str:
        """Spell some strings."""

    def names(self, texts: Texts, terminals: Terminals) -> str:
        """Spell some names."""

    def any_string(self, terminals: Terminals) -> str:
        """Spell all strings."""

    def any_name(self, terminals: Terminals) -> str:
        """Spell all names."""


@dataclass(frozen=True, slots=True)
class JsonSpelling:
    """JSON; `spaces` as in JsonNotation."""

    spaces: int | None = None

    @property
    def separators(self) -> list[str]:
        """The terminals SEP and COLON."""
        space = {None: " ?", 0: "", 1: " "}[self.spaces]
        return [f"SEP: /,{space}/", f"COLON: /:{space}/"]

    def ordered(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Leave them as schemas list them."""
        return entries

    def scalar(self, text: bytes) -> str:
        """Leave it as it is."""
        return quoted(text)

    def name(self, name: str) -> str:
        """Spell a string."""
        return quoted(scalar_text(name))

    def string(self, texts: Texts, terminals: Terminals) -> str:
        """Put quotes round them; the host knows of expressions in JSON."""
        if texts.only is not None:
            return "(" + " | ".join(map(self.name, sorted(texts.only))) + ")"
        if not texts.asked:
            return self._string(terminals, texts.length, texts.without)
        _check_without(texts)
        if len(texts.asked) > 1:
            raise refusal(texts.asked[1].pointer, "pattern", WHERE)
        whole: dict[str, object] = {"type": "string", "minLength": texts.length.least}
        if texts.length.most is not None:
            whole["maxLength"] = texts.length.most
        return f"%json {json.dumps(whole | _schema_of(texts.asked[0]))}"

    def names(self, texts: Texts, terminals: Terminals) -> str:
        """Spell strings."""
        return self.string(texts, terminals)

    def any_string(self, terminals: Terminals) -> str:
        """Spell all strings."""
        return self._string(terminals, ANY_LENGTH)

    def any_name(self, terminals: Terminals) -> str:
        """Spell all strings."""
        return self.any_string(terminals)

    def _string(self, terminals: Terminals, length: Length, without: Iterable[str] = ()) -> str:
        character = _CANONICAL_CHARACTER if without else _CHARACTER
        text = f'/"{character}{_repeat(length)}"/'
        if without:
            spelled = "|".join(_escaped(scalar_text(name).decode()) for name in sorted(without))
            text += f" & ~/(?:{spelled})/"
        return terminals.name("STRING", text)


@dataclass(frozen=True, slots=True)
class MarkedSpelling:
    """Strings between two control tokens, names bare; `mark_id` is the token's id."""

    mark_id: int

    @property
    def separators(self) -> list[str]:
        """The terminals SEP and COLON."""
        return ['SEP: ","', 'COLON: ":"']

    def ordered(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Sort them as chat templates do."""
        return sorted(entries, key=lambda entry: entry.name.lower())

    def scalar(self, text: bytes) -> str:
        """Put marks round strings."""
        if text[:1] != b'"':
            return quoted(text)
        return self._marked(quoted(plain_bytes(json.loads(text))))

    def name(self, name: str) -> str:
        """Leave it bare where it can be read back so."""
        spelled = quoted(plain_bytes(name))
        return spelled if is_bare(name) else self._marked(spelled)

    def string(self, texts: Texts, terminals: Terminals) -> str:
        """Put marks round them."""
        if texts.length.most == 0:
            return self._marked("")
        content = self._content(texts, terminals, f"(?s:{_ANY_CHARACTER})", "")
        return self._marked(f"{content}?" if "" in texts else content)

    def names(self, texts: Texts, terminals: Terminals) -> str:
        """Take those that can be read back bare."""
        if texts.only is not None:
            return "(" + " | ".join(map(self.name, sorted(texts.only))) + ")"
        return self._content(texts, terminals, f"(?s:{_ANY_CHARACTER})", f"/{FREE_NAME}/")

    def any_string(self, terminals: Terminals) -> str:
        """Spell all strings."""
        return self._marked(terminals.name("STRING", f"/{_ANY_CHARACTER}+/") + "?")

    def any_name(self, terminals: Terminals) -> str:
        """Take those that can be read back bare."""
        return terminals.name("NAME", f"/{FREE_NAME}/")

    def _content(self, texts: Texts, terminals: Terminals, character: str, also: str) -> str:
        """Return a terminal for all but the empty text."""
        length = Length(max(texts.length.least, 1), texts.length.most)
        parts = [f"/{character}{_repeat(length)}/", *([also] if also else [])]
        for asked in texts.asked:
            if isinstance(asked, HasFormat):
                parts.append(f"/{slashes(expression_of(asked.name))}/")
            else:
                parts.append(_search(asked))
        if texts.without:
            parts.append(f"~/(?:{'|'.join(map(_escaped, sorted(texts.without)))})/")
        return terminals.name("STRING", " & ".join(parts))

    def _marked(self, content: str) -> str:
        return f"<[{self.mark_id}]> {content} <[{self.mark_id}]>".replace("  ", " ")


def quoted(text: bytes) -> str:
    """Return a text as a literal of a rule; none for the empty text."""
    return json.dumps(text.decode()) if text else ""


def slashes(expression: str) -> str:
    """Escape what would end an expression between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression)


def _search(asked: Matches) -> str:
    """Return an expression that a whole text matches where a pattern matches somewhere in it."""
    expression = plain_syntax(asked.pattern)
    inner = expression.removeprefix("^").removesuffix("$")
    # The host knows no anchors: they say nothing at the ends of a whole, and are told nowhere else.
    if re.search(r"(?<!\[)\^|\$|\|", inner) or inner.endswith("\\"):
        raise refusal(asked.pointer, "pattern", WHERE)
    before = "" if expression.startswith("^") else r"(?s:.*)"
    after = "" if expression.endswith("$") else r"(?s:.*)"
    text = f"/{before}(?:{slashes(inner)}){after}/"
    return text if asked.positive else f"~{text}"


def _check_without(texts: Texts) -> None:
    if any(texts.content.accepts(name.encode()) for name in texts.without):
        raise refusal(texts.asked[0].pointer, "pattern", WHERE)


def _schema_of(asked: Matches | HasFormat) -> dict[str, object]:
    if isinstance(asked, HasFormat):
        return {"pattern": f"^(?:{expression_of(asked.name)})$"}
    if not asked.positive:
        raise refusal(asked.pointer, "pattern", WHERE)
    return {"pattern": plain_syntax(asked.pattern)}


def _repeat(length: Length) -> str:
    if length == ANY_LENGTH:
        return "*"
    return f"{{{length.least},{'' if length.most is None else length.most}}}"


def _escaped(text: str) -> str:
    return slashes(re.sub(r"([.*+?()\[\]{}|^$&~#\-\\])", r"\\\1", text))

r"""From shapes to a grammar for the matcher on the host, in llguidance's kind of Lark.

For schemas within themselves, and for those whose tables would be too large. The texts are those of
`json_automaton`, but free values nest without bound. What a rule cannot say is refused.
"""

import json
import re
from collections.abc import Iterable

from jaxserve.guided.cases import Cases
from jaxserve.guided.conditions import HasFormat, Matches, refusal
from jaxserve.guided.endings import Endings, nothing_fits
from jaxserve.guided.formats import expression_of
from jaxserve.guided.json_lists import unique_values
from jaxserve.guided.json_text import scalar_text
from jaxserve.guided.number_ranges import ANY_NUMBER, NumberRange
from jaxserve.guided.numbers import numbers
from jaxserve.guided.regex import plain_syntax
from jaxserve.guided.shapes import ANY, Array, Fixed, Key, Number, Object, Shape, Text, Texts
from jaxserve.guided.strings import ANY_LENGTH, Length
from jaxserve.guided.to_regex import to_regex

_HEX = "[0-9a-fA-F]"
_UNICODE = (
    rf"u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
_PLAIN = r'[^"\\\x00-\x1F\u{100000}-\u{10FFFF}]'
_CHARACTER = rf'(?:{_PLAIN}|\\(?:["\\\/bfnrt]|{_UNICODE}))'
# In one way only, so that names can be told apart by their texts.
_CANONICAL_CHARACTER = rf'(?:{_PLAIN}|\\["\\bfnrt])'


class LarkWriter:
    """Writes the rules of a document's schemas, each once."""

    def __init__(self, cases: Cases, *, compact: bool) -> None:
        self._cases = cases
        self._endings = Endings(cases)
        space = "" if compact else " ?"
        self._lines = [f"SEP: /,{space}/", f"COLON: /:{space}/"]
        self._names: dict[Key, str] = {}
        self._terminals: dict[str, str] = {}
        self._queue: list[Key] = []

    def grammar(self, key: Key) -> str:
        """Return the grammar of the JSON texts that fit schemas.

        Raises:
            SchemaError: a keyword cannot be enforced by such a grammar, or no text fits.
        """
        if not self._endings.shapes(key) and key != ANY:
            raise nothing_fits()
        self._lines.append(f"start: {self._rule(key)}")
        for asked in self._queue:
            self._write(asked)
        self._lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(self._lines) + "\n"

    def _rule(self, key: Key) -> str:
        if key not in self._names:
            self._names[key] = f"v{len(self._names)}"
            self._queue.append(key)
        return self._names[key]

    def _write(self, key: Key) -> None:
        name = self._names[key]
        if key == ANY:
            string, number = self._string(ANY_LENGTH), self._number(ANY_NUMBER)
            self._lines += [
                f'{name}: "null" | "true" | "false" | {number} | {string} | "[" "]" | "{{" "}}"'
                f' | "[" {name} (SEP {name})* "]" | "{{" {name}p (SEP {name}p)* "}}"',
                f"{name}p: {string} COLON {name}",
            ]
            return
        shapes = [self._shape(name, n, x) for n, x in enumerate(self._endings.shapes(key))]
        self._lines.append(f"{name}: {' | '.join(shapes)}")

    def _shape(self, name: str, number: int, shape: Shape) -> str:
        if isinstance(shape, Fixed):
            return " | ".join(_quoted(text) for text in sorted(shape.texts))
        if isinstance(shape, Number):
            return self._number(shape.wanted)
        if isinstance(shape, Text):
            return self._texts(shape.texts)
        if isinstance(shape, Array):
            return self._array(f"{name}a{number}", shape)
        return self._object(f"{name}o{number}", shape)

    def _array(self, name: str, shape: Array) -> str:
        if shape.counted:
            raise refusal(shape.counted[0].schema.pointer, "contains", _WHERE)
        if shape.unique is not None:
            return self._unique(name, shape)
        least, most = shape.length.least, shape.length.most
        parts = []
        for index, key in enumerate(shape.prefix):
            item = self._rule(key)
            parts.append(f"SEP {item}" if index else item)
        if most is None or most > len(shape.prefix):
            rest = self._rule(shape.rest)
            low = max(least - len(shape.prefix), 0)
            high = "" if most is None else str(most - len(shape.prefix))
            if not shape.prefix:
                return self._list(rest, least, most)
            parts.append(f"(SEP {rest}){{{low},{high}}}")
        text = ""
        # Items from the last to the first: each is there only if the one before it is.
        for index in range(len(parts) - 1, -1, -1):
            inner = f"{parts[index]} {text}".rstrip()
            text = inner if index < least else f"({inner})?"
        return f'"[" {text} "]"'.replace("  ", " ")

    def _list(self, item: str, least: int, most: int | None) -> str:
        more = f" (SEP {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        inner = item if most == 1 else item + more
        return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'

    def _unique(self, name: str, shape: Array) -> str:
        """Write a rule for each set of values that were used."""
        least, most = shape.length.least, shape.length.most
        queue: list[tuple[str, ...]] = [()]
        rules: dict[frozenset[str], str] = {}
        for used in queue:
            known = frozenset(used)
            if known in rules:
                continue
            index = len(used)
            rules[known] = f"{name}u{len(rules)}"
            if most is None or index < most:
                key = shape.prefix[index] if index < len(shape.prefix) else shape.rest
                queue += [
                    (*used, identity)
                    for identity, _ in unique_values(self._cases, shape, key)
                    if identity not in known
                ]
        for known, rule in rules.items():
            index = len(known)
            options = ['"]"'] if index >= least else []
            if most is None or index < most:
                key = shape.prefix[index] if index < len(shape.prefix) else shape.rest
                for identity, texts in unique_values(self._cases, shape, key):
                    following = rules.get(known | {identity})
                    if identity not in known and following is not None:
                        value = " | ".join(map(_quoted, texts))
                        options.append(f"{'SEP ' if index else ''}({value}) {following}")
            self._lines.append(f"{rule}: {' | '.join(options) or _NEVER}")
        return f'"[" {rules[frozenset()]}'

    def _object(self, name: str, shape: Object) -> str:
        """Write a rule for each entry, saying what may come from there on."""
        if shape.length != ANY_LENGTH:
            raise refusal("", "minProperties or maxProperties", _WHERE)
        pairs = [
            f"{self._texts(extra.names)} COLON {self._rule(extra.value)}" for extra in shape.extras
        ]
        extra = ""
        if pairs:
            extra = f"{name}x"
            self._lines.append(f"{extra}: {' | '.join(pairs)}")
        # Rule `…f`: nothing was written yet; `…s`: a comma comes before the next property.
        count = len(shape.entries)
        self._lines.append(f"{name}f{count}: " + (f"({extra} (SEP {extra})*)?" if extra else '""'))
        self._lines.append(f"{name}s{count}: " + (f"(SEP {extra})*" if extra else '""'))
        for index, entry in enumerate(shape.entries):
            pair = f"{_quoted(scalar_text(entry.name))} COLON {self._rule(entry.value)}"
            following = f"{name}s{index + 1}"
            for kind, lead in (("f", ""), ("s", "SEP ")):
                options = [f"{lead}{pair} {following}"]
                if not entry.required:
                    options.append(f"{name}{kind}{index + 1}")
                self._lines.append(f"{name}{kind}{index}: {' | '.join(options)}")
        return f'"{{" {name}f0 "}}"'

    def _texts(self, texts: Texts) -> str:
        """Return what stands for a string."""
        if texts.only is not None:
            return "(" + " | ".join(_quoted(scalar_text(x)) for x in sorted(texts.only)) + ")"
        if not texts.asked:
            return self._string(texts.length, texts.without)
        if any(texts.content.accepts(name.encode()) for name in texts.without):
            raise refusal(texts.asked[0].pointer, "pattern", _WHERE)
        schemas = [_schema_of(asked) for asked in texts.asked]
        whole: dict[str, object] = {"type": "string", "minLength": texts.length.least}
        if texts.length.most is not None:
            whole["maxLength"] = texts.length.most
        if len(schemas) > 1:
            raise refusal(texts.asked[1].pointer, "pattern", _WHERE)
        return f"%json {json.dumps(whole | schemas[0])}"

    def _string(self, length: Length, without: Iterable[str] = ()) -> str:
        character = _CANONICAL_CHARACTER if without else _CHARACTER
        counted = "*" if length == ANY_LENGTH else _repeat(length)
        text = f'/"{character}{counted}"/'
        if without:
            names = "|".join(_escaped(scalar_text(name).decode()) for name in sorted(without))
            text += f" & ~/(?:{names})/"
        return self._terminal("STRING", text)

    def _number(self, wanted: NumberRange) -> str:
        return self._terminal("NUMBER", f"/{_slashes(to_regex(numbers(wanted)))}/")

    def _terminal(self, kind: str, text: str) -> str:
        return self._terminals.setdefault(text, f"{kind}{len(self._terminals)}")


_NEVER = r"/[^\x00-\u{10FFFF}]/"
_WHERE = "cannot be enforced in a schema that contains itself, or whose tables would be too large"


def lark_of_expression(expression: str) -> str:
    """Return the grammar of a regular expression that matches the whole text."""
    # The matcher knows no anchors; where the whole text is matched these two say nothing.
    expression = expression.removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$$", expression):
        expression = expression[:-1]
    return f"start: /(?:{_slashes(plain_syntax(expression))})/\n"


def lark_of_choices(choices: Iterable[str]) -> str:
    """Return the grammar of a list of texts."""
    return f"start: {' | '.join(_quoted(choice.encode()) for choice in choices)}\n"


def _schema_of(asked: Matches | HasFormat) -> dict[str, object]:
    if isinstance(asked, HasFormat):
        return {"pattern": f"^(?:{expression_of(asked.name)})$"}
    if not asked.positive:
        raise refusal(asked.pointer, "pattern", _WHERE)
    return {"pattern": plain_syntax(asked.pattern)}


def _repeat(length: Length) -> str:
    return f"{{{length.least},{'' if length.most is None else length.most}}}"


def _quoted(text: bytes) -> str:
    return json.dumps(text.decode())


def _escaped(text: str) -> str:
    return _slashes(re.sub(r"([.*+?()\[\]{}|^$&~#\-\\])", r"\\\1", text))


def _slashes(expression: str) -> str:
    """Escape what would end an expression between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression)

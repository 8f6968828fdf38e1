"""From shapes to a grammar for the matcher on the host, in llguidance's kind of Lark.

For schemas within themselves, and for those whose tables would be too large. The texts are those of
`json_automaton`, but free values nest without bound. What a rule cannot say is refused.
"""

import re
from collections.abc import Iterable

from jaxserve.guided.cases import Cases
from jaxserve.guided.conditions import refusal
from jaxserve.guided.endings import Endings, nothing_fits
from jaxserve.guided.json_lists import unique_values
from jaxserve.guided.lark_spelling import WHERE, Spelling, Terminals, quoted, slashes
from jaxserve.guided.number_ranges import ANY_NUMBER, NumberRange
from jaxserve.guided.numbers import numbers
from jaxserve.guided.regex import plain_syntax
from jaxserve.guided.shapes import ANY, Array, Fixed, Key, Number, Object, Shape, Text
from jaxserve.guided.strings import ANY_LENGTH
from jaxserve.guided.to_regex import to_regex


class LarkWriter:
    """Writes the rules of a document's schemas, each once."""

    def __init__(self, cases: Cases, spelling: Spelling, *, prefix: str = "") -> None:
        """Write rules whose names begin with `prefix`, so that several writers' go together."""
        self._cases = cases
        self._endings = Endings(cases)
        self._spelling = spelling
        self._prefix = prefix
        self._lines: list[str] = []
        self._names: dict[Key, str] = {}
        self._terminals = Terminals(prefix)
        self._queue: list[Key] = []

    def grammar(self, key: Key) -> str:
        """Return the grammar of the texts that fit schemas.

        Raises:
            SchemaError: a keyword cannot be enforced by such a grammar, or no text fits.
        """
        if not self._endings.shapes(key) and key != ANY:
            raise nothing_fits()
        lines = [*self._spelling.separators, f"start: {self._rule(key)}", *self._rules()]
        return "\n".join(lines) + "\n"

    def objects(self, key: Key) -> tuple[str, list[str]]:
        """Return the name of a rule of the objects that fit schemas, and all rules of it.

        Raises:
            SchemaError: as `grammar` does.
        """
        name = f"{self._prefix}object"
        shapes = [shape for shape in self._endings.shapes(key) if isinstance(shape, Object)]
        if not shapes:
            raise nothing_fits()
        written = [self._shape(name, n, shape) for n, shape in enumerate(shapes)]
        return name, [f"{name}: {' | '.join(written)}", *self._rules()]

    def _rules(self) -> list[str]:
        for asked in self._queue:
            self._write(asked)
        return [*self._lines, *self._terminals.lines]

    def _rule(self, key: Key) -> str:
        if key not in self._names:
            self._names[key] = f"{self._prefix}v{len(self._names)}"
            self._queue.append(key)
        return self._names[key]

    def _write(self, key: Key) -> None:
        name = self._names[key]
        if key == ANY:
            spelling, number = self._spelling, self._number(ANY_NUMBER)
            string = spelling.any_string(self._terminals)
            self._lines += [
                f'{name}: "null" | "true" | "false" | {number} | {string} | "[" "]" | "{{" "}}"'
                f' | "[" {name} (SEP {name})* "]" | "{{" {name}p (SEP {name}p)* "}}"',
                f"{name}p: {spelling.any_name(self._terminals)} COLON {name}",
            ]
            return
        shapes = [self._shape(name, n, x) for n, x in enumerate(self._endings.shapes(key))]
        self._lines.append(f"{name}: {' | '.join(shapes)}")

    def _shape(self, name: str, number: int, shape: Shape) -> str:
        if isinstance(shape, Fixed):
            return " | ".join(map(self._spelling.scalar, sorted(shape.texts)))
        if isinstance(shape, Number):
            return self._number(shape.wanted)
        if isinstance(shape, Text):
            return self._spelling.string(shape.texts, self._terminals)
        if isinstance(shape, Array):
            return self._array(f"{name}a{number}", shape)
        return self._object(f"{name}o{number}", shape)

    def _array(self, name: str, shape: Array) -> str:
        if shape.counted:
            raise refusal(shape.counted[0].schema.pointer, "contains", WHERE)
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
                        value = " | ".join(map(self._spelling.scalar, texts))
                        options.append(f"{'SEP ' if index else ''}({value}) {following}")
            self._lines.append(f"{rule}: {' | '.join(options) or _NEVER}")
        return f'"[" {rules[frozenset()]}'

    def _object(self, name: str, shape: Object) -> str:
        """Write a rule for each entry, saying what may come from there on."""
        if shape.length != ANY_LENGTH:
            raise refusal("", "minProperties or maxProperties", WHERE)
        pairs = [
            f"{self._spelling.names(extra.names, self._terminals)} COLON {self._rule(extra.value)}"
            for extra in shape.extras
        ]
        extra = ""
        if pairs:
            extra = f"{name}x"
            self._lines.append(f"{extra}: {' | '.join(pairs)}")
        # Rule `…f`: nothing was written yet; `…s`: a comma comes before the next property.
        entries = self._spelling.ordered(shape.entries)
        count = len(entries)
        self._lines.append(f"{name}f{count}: " + (f"({extra} (SEP {extra})*)?" if extra else '""'))
        self._lines.append(f"{name}s{count}: " + (f"(SEP {extra})*" if extra else '""'))
        for index, entry in enumerate(entries):
            pair = f"{self._spelling.name(entry.name)} COLON {self._rule(entry.value)}"
            following = f"{name}s{index + 1}"
            for kind, lead in (("f", ""), ("s", "SEP ")):
                options = [f"{lead}{pair} {following}"]
                if not entry.required:
                    options.append(f"{name}{kind}{index + 1}")
                self._lines.append(f"{name}{kind}{index}: {' | '.join(options)}")
        return f'"{{" {name}f0 "}}"'

    def _number(self, wanted: NumberRange) -> str:
        return self._terminals.name("NUMBER", f"/{slashes(to_regex(numbers(wanted)))}/")


_NEVER = r"/[^\x00-\u{10FFFF}]/"


def lark_of_expression(expression: str) -> str:
    """Return the grammar of a regular expression that matches the whole text."""
    # The matcher knows no anchors; where the whole text is matched these two say nothing.
    expression = expression.removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$$", expression):
        expression = expression[:-1]
    return f"start: /(?:{slashes(plain_syntax(expression))})/\n"


def lark_of_choices(choices: Iterable[str]) -> str:
    """Return the grammar of a list of texts."""
    return f"start: {' | '.join(quoted(choice.encode()) for choice in choices)}\n"

"""What an answer has to be, as requests say it: OpenAI's `response_format`, vLLM's other ways.

A request names one grammar at most. Whether a schema can be enforced is the compiler's to say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from jaxserve.errors import InvalidRequestError
from jaxserve.guided.document import MAX_ENUM_VALUES, MAX_SCHEMA_BYTES
from jaxserve.guided.specs import as_source
from jaxserve.guided.tables import GrammarKind, GrammarSpec
from jaxserve.openai.fields import Field, Object, Values, table
from jaxserve.openai.readers import Boolean, Inert, ListOf, Mapped, Neutral, OneOf, Schema, Text

MAX_CHOICE_CHARS = 4096

_LARGEST_EXACT = float(1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRequest:
    """A grammar, and the field that asks for it."""

    spec: GrammarSpec
    param: str


class _JsonSchema:
    """A JSON Schema: an object, true, false, or the text of one of them; gives its text."""

    def __call__(self, value: object, path: str) -> str:
        if isinstance(value, str):
            text = Text(1, MAX_SCHEMA_BYTES)(value, path)
            try:
                value = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise InvalidRequestError(
                    f"{path} is a text, but not the JSON of a schema: {error.msg}.",
                    param=path,
                    code="invalid_schema",
                ) from error
        if not isinstance(value, bool):
            refuse_inexact(Mapped()(value, path), path)
        return as_source(value)

    def schema(self) -> Schema:
        return {"anyOf": [{"type": kind} for kind in ("object", "boolean", "string")]}


def refuse_inexact(value: object, path: str, *, is_literal: bool = False) -> None:
    """Refuse values to be written as they are that reading has rounded: integers over 64 bits."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            is_inside = is_literal or key in ("const", "enum")
            refuse_inexact(entry, f"{path}.{key}", is_literal=is_inside)
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            refuse_inexact(entry, f"{path}[{i}]", is_literal=is_literal)
    elif is_literal and isinstance(value, float) and abs(value) >= _LARGEST_EXACT:
        raise InvalidRequestError(
            f"{path} is {value:g}; integers of more than 64 bits are not read exactly.",
            param=path,
            code="unsupported_schema",
        )


class _ResponseFormat:
    """OpenAI's response_format; text asks for nothing."""

    _json_schema = table(
        (
            Field("name", Text(1, 64), "", "of the schema; changes no answer", required=True),
            Field("schema", _JsonSchema(), None, "default: any object"),
            Field("description", Inert(Text()), None),
            Field("strict", Inert(Boolean()), None),
        )
    )
    _fields = table(
        (
            Field("type", OneOf(("text", "json_object", "json_schema")), "", required=True),
            Field("json_schema", Object(_json_schema), None, "for the type json_schema"),
        )
    )

    def __call__(self, value: object, path: str) -> GrammarRequest | None:
        values = Object(self._fields)(value, path)
        kind, wrapped = values[self._fields["type"]], values[self._fields["json_schema"]]
        where = f"{path}.json_schema"
        if kind == "json_schema" and wrapped is None:
            raise InvalidRequestError(
                f"{where} is required with the type json_schema.",
                param=where,
                code="missing_required_parameter",
            )
        if kind != "json_schema" and wrapped is not None:
            raise InvalidRequestError(
                f"{where} belongs to the type json_schema, and only to that.", param=where
            )
        if kind == "text":
            return None
        source = None if wrapped is None else wrapped[self._json_schema["schema"]]
        if source is None:
            return _request_of(path, "json_object", "")
        return _request_of(f"{path}.json_schema.schema", "json_schema", source)

    def schema(self) -> Schema:
        return Object(self._fields).schema()


_CHOICES = ListOf(Text(1, MAX_CHOICE_CHARS), min_items=1, max_items=MAX_ENUM_VALUES)
_SOURCE = Text(1, MAX_SCHEMA_BYTES)


class _StructuredOutputs:
    """vLLM's structured_outputs: one of its kinds."""

    _json: Field[str | None] = Field("json", _JsonSchema(), None, "a JSON Schema")
    _regex: Field[str | None] = Field("regex", _SOURCE, None, "matches the whole answer")
    _choice: Field[tuple[str, ...] | None] = Field("choice", _CHOICES, None, "one of these texts")
    _grammar: Field[str | None] = Field("grammar", _SOURCE, None, "a grammar in Lark's form")
    _json_object = Field("json_object", Boolean(), False, "any JSON object")
    _compact = Field("disable_any_whitespace", Boolean(), False, "JSON without a space")
    _fields = table(
        (
            _json,
            _regex,
            _choice,
            _grammar,
            _json_object,
            _compact,
            Field("disable_fallback", Inert(Boolean()), None),
            Field("disable_additional_properties", Neutral((False,)), None),
            Field("whitespace_pattern", Neutral(), None),
            Field("structural_tag", Neutral(), None),
        )
    )

    def __call__(self, value: object, path: str) -> GrammarRequest:
        values = Object(self._fields)(value, path)
        compact = values[self._compact]
        found = [
            _request_of(f"{path}.json", "json_schema", values[self._json], compact=compact),
            _request_of(f"{path}.regex", "regex", values[self._regex]),
            _request_of(f"{path}.choice", "choice", values[self._choice]),
            _request_of(f"{path}.grammar", "lark", values[self._grammar]),
        ]
        if values[self._json_object]:
            found.append(_request_of(f"{path}.json_object", "json_object", "", compact=compact))
        only = _only(found)
        if only is None:
            raise InvalidRequestError(
                f"{path} must hold one of json, regex, choice, grammar, json_object.", param=path
            )
        return only

    def schema(self) -> Schema:
        return Object(self._fields).schema()


def _request_of(
    param: str, kind: GrammarKind, value: str | tuple[str, ...] | None, *, compact: bool = False
) -> GrammarRequest | None:
    """Return what a field of a grammar asks for, if it is there."""
    if value is None:
        return None
    source = value if isinstance(value, str) else as_source(value)
    return GrammarRequest(spec=GrammarSpec(kind=kind, source=source, compact=compact), param=param)


def _only(found: Iterable[GrammarRequest | None]) -> GrammarRequest | None:
    """Return the one grammar that a request names; None: it names none."""
    asked = [request for request in found if request is not None]
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{asked[0].param} and {asked[1].param} ask for two grammars; an answer has one.",
            param=asked[1].param,
        )
    return asked[0] if asked else None


_RESPONSE_FORMAT: Field[GrammarRequest | None] = Field(
    "response_format",
    _ResponseFormat(),
    None,
    "what an answer has to be; a schema is enforced whether strict or not",
)
_STRUCTURED: Field[GrammarRequest | None] = Field(
    "structured_outputs", _StructuredOutputs(), None, "what an answer has to be, in vLLM's form"
)
_GUIDED_JSON: Field[str | None] = Field(
    "guided_json", _JsonSchema(), None, "a JSON Schema that the answer has to follow"
)
_GUIDED_REGEX: Field[str | None] = Field(
    "guided_regex", _SOURCE, None, "a regular expression that the whole answer has to match"
)
_GUIDED_CHOICE: Field[tuple[str, ...] | None] = Field(
    "guided_choice", _CHOICES, None, "texts, one of which is the answer"
)
_GUIDED_GRAMMAR: Field[str | None] = Field(
    "guided_grammar", _SOURCE, None, "a grammar of the answer in Lark's form"
)
GRAMMAR_FIELDS = (
    _RESPONSE_FORMAT,
    _STRUCTURED,
    _GUIDED_JSON,
    _GUIDED_REGEX,
    _GUIDED_CHOICE,
    _GUIDED_GRAMMAR,
)
ENSURE_COMPLETE = Field(
    "ensure_complete",
    Boolean(),
    False,
    "let what an answer has to be end within max_tokens: its last tokens lead there",
)


def read_grammar(values: Values) -> GrammarRequest | None:
    """Take the grammar out of what a table with GRAMMAR_FIELDS read."""
    found = [
        values[_RESPONSE_FORMAT],
        values[_STRUCTURED],
        _request_of("guided_json", "json_schema", values[_GUIDED_JSON]),
        _request_of("guided_regex", "regex", values[_GUIDED_REGEX]),
        _request_of("guided_choice", "choice", values[_GUIDED_CHOICE]),
        _request_of("guided_grammar", "lark", values[_GUIDED_GRAMMAR]),
    ]
    return _only(found)

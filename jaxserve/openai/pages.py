"""The API's pages, made from the field tables: /openapi.json, and docs/api.md for readers."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast

import orjson

from jaxserve.openai.fields import Field, FieldTable, object_schema
from jaxserve.openai.options import MAX_PROMPT_SCORES, MAX_TEXT_CHARS
from jaxserve.openai.readers import NAME_PATTERN, Inert, Neutral, Schema
from jaxserve.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    FLUSH_FIELDS,
    GRAMMAR_CHECK_FIELDS,
    RELEASE_FIELDS,
    TOKENIZE_CHAT_FIELDS,
    TOKENIZE_FIELDS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """A path with what it takes: one of several tables; none: it takes no body, and is a GET."""

    path: str
    about: str
    tables: tuple[FieldTable, ...] = ()
    is_like: tuple[str, ...] = ()  # whose fields these are
    streams: bool = False

    @property
    def method(self) -> str:
        return "post" if self.tables else "get"


_ENDPOINTS = (
    _Endpoint(
        path="/v1/chat/completions",
        about="Continue a conversation.",
        tables=(CHAT_FIELDS,),
        streams=True,
    ),
    _Endpoint(
        path="/v1/completions",
        about="Continue each of some prompts.",
        tables=(COMPLETION_FIELDS,),
        streams=True,
    ),
    _Endpoint(
        path="/v1/chat/completions/render",
        about="Tell the prompt that a chat completion request would become: `prompt`, `token_ids`.",
        tables=(CHAT_FIELDS,),
        is_like=("/v1/chat/completions",),
    ),
    _Endpoint(
        path="/tokenize",
        about="Tell the ids of a text, or of a conversation: `count`, `max_model_len`, `tokens`,"
        " `token_strs`.",
        tables=(TOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS),
    ),
    _Endpoint(
        path="/detokenize",
        about="Tell the text of some ids, control tokens included: `prompt`.",
        tables=(DETOKENIZE_FIELDS,),
    ),
    _Endpoint(
        path="/v1/cache/explain",
        about="Tell, without running it, what is cached of a generation request's prompt:"
        " `prompt_tokens`, `matched_tokens` and, unless all of it is, `first_difference`:"
        " `position`, `token_id`, `text`, `context_before`, `cached_alternatives`.",
        tables=(CHAT_FIELDS, COMPLETION_FIELDS),
        is_like=("/v1/chat/completions", "/v1/completions"),
    ),
    _Endpoint(
        path="/v1/cache/release",
        about="Drop what only one session has in the cache: `pages` is how many became free.",
        tables=(RELEASE_FIELDS,),
    ),
    _Endpoint(
        path="/v1/cache/flush",
        about="Drop every cached prefix that no request uses: `pages` is how many became free."
        " The body may be empty.",
        tables=(FLUSH_FIELDS,),
    ),
    _Endpoint(
        path="/v1/grammar/check",
        about="Tell what a chat's answers would be held to by the same fields, and which texts that"
        " accepts: `path` (`device`, `host` with its `reason`, or null: to nothing), `compile_s`"
        " (until it is laid out for the device, the wait for others' included), `num_states`,"
        " `num_classes`, `num_masks`, `num_bytes` (of the grammar's own tables, if it has some,"
        " without what goes before it), `min_tokens`, `loosened` (tools whose schemas are not"
        " enforced); of each text `accepted`, the `offset` of the first byte that may not stand"
        " there, and what was `allowed` instead.",
        tables=(GRAMMAR_CHECK_FIELDS,),
    ),
    _Endpoint(path="/v1/models", about="List the one model."),
    _Endpoint(path="/v1/models/{id}", about="Describe the one model."),
    _Endpoint(path="/health", about="200 only when requests are served; else 503 with the phase."),
    _Endpoint(path="/live", about="200 while the process lives."),
    _Endpoint(path="/metrics", about="Prometheus' text format."),
    _Endpoint(path="/version", about="The server's version."),
    _Endpoint(path="/openapi.json", about="This API in OpenAPI's form."),
)

_ERROR_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def openapi_document(version: str, *, open_paths: Collection[str] | None = None) -> Schema:
    """Return the API as an OpenAPI 3.1 document.

    Where keys are in use, `open_paths` are those that need none.
    """
    paths = {end.path: {end.method: _operation(end)} for end in _ENDPOINTS}
    components: Schema = {"schemas": {"Error": _ERROR_SCHEMA}}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": components,
    }
    if open_paths is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for end in _ENDPOINTS:
            if end.path in open_paths:
                paths[end.path][end.method]["security"] = []
    return document


def api_page() -> str:
    """Return docs/api.md."""
    return "\n".join(_page_lines()) + "\n"


def _operation(end: _Endpoint) -> Schema:
    answer: Schema = {"application/json": {"schema": {"type": "object"}}}
    if end.streams:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    if end.path == "/metrics":
        answer = {"text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: Schema = {
        "summary": end.about,
        "responses": {
            "200": {"description": "the answer", "content": answer},
            "default": {"description": "an error", "content": error},
        },
    }
    if "{id}" in end.path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if end.tables:
        schemas = [object_schema(fields) for fields in end.tables]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        body = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": end.tables != (FLUSH_FIELDS,), "content": body}
    return operation


def _page_lines() -> Iterator[str]:
    yield "# API"
    yield ""
    yield "Made by `scripts/api_page.py` from the tables of fields that read the requests."
    yield "`null` is as good as absent. An unknown field is refused with 400, and so is every value"
    yield "outside of what is given here, in the form of [errors.md](errors.md). The endpoints are"
    yield "OpenAI's and vLLM's."
    yield ""
    yield "A text's limits are in characters. A name is a text without U+FFFD, which stands for a"
    yield "half of a surrogate pair."
    yield ""
    yield "A text that cannot fit the context, however it is tokenized, is refused before it is."
    yield "Where more than the context is read (`/tokenize`, render, `truncate_prompt_tokens`),"
    yield f"{MAX_TEXT_CHARS:,} characters are, or as many as the context may hold."
    yield ""
    yield f"An answer tells at most {MAX_PROMPT_SCORES:,} log-probabilities of prompts' tokens"
    yield "(`prompt_logprobs`, or a completion's `echo` with `logprobs`): tokens times (likeliest +"
    yield "1), in a completion times `n`."
    yield ""
    yield "Both completions' answers have `timings` beside `usage`: [caching.md](caching.md). Its"
    yield '`grammar_path` is what kept the answers to their grammar, `"device"` or `"host"`; null:'
    yield "they had none."
    for end in _ENDPOINTS:
        yield ""
        yield f"## `{end.method.upper()} {end.path}`"
        yield ""
        yield end.about
        if end.is_like:
            yield ""
            yield (
                "The fields are those of " + " or ".join(f"`{path}`" for path in end.is_like) + "."
            )
            continue
        for fields in filter(None, end.tables):
            yield from _table_lines(fields)


def _table_lines(fields: FieldTable) -> Iterator[str]:
    yield ""
    yield "| field | takes | what |"
    yield "|---|---|---|"
    for field in fields.values():
        if not isinstance(field.read, Inert | Neutral):
            about = f"**required**: {field.about}" if field.required else field.about
            yield f"| `{field.name}` | {_takes(field.read.schema())} | {about} |"
    inert = [field for field in fields.values() if isinstance(field.read, Inert)]
    if inert:
        yield ""
        yield f"Accepted, and changes no answer: {', '.join(f'`{field.name}`' for field in inert)}."
    refused = [field for field in fields.values() if isinstance(field.read, Neutral)]
    if refused:
        yield ""
        yield "Refused unless it asks for nothing: " + ", ".join(map(_refused, refused)) + "."


def _refused(field: Field[object]) -> str:
    values = [orjson.dumps(value).decode() for value in cast(Neutral, field.read).values]
    return f"`{field.name}`" + (
        f" ({', '.join(f'`{value}`' for value in values)})" if values else ""
    )


def _takes(schema: Schema) -> str:
    """Say in words what a schema takes."""
    if "anyOf" in schema:
        kinds = dict.fromkeys(_takes(each) for each in cast(list[Schema], schema["anyOf"]))
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in cast(list[object], schema["enum"]))
    kind = cast(str, schema["type"])
    if kind == "array":
        least = f"{schema['minItems']} to" if "minItems" in schema else "at most"
        count = f" of {least} {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{count} ({_takes(cast(Schema, schema['items']))})"
    if kind == "string":
        return _takes_text(schema)
    if kind in ("integer", "number"):
        least = f"> {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else ""
        return f"{kind}, {least or schema.get('minimum')} to {schema['maximum']}"
    if kind == "object" and "properties" in schema:
        properties = cast(dict[str, Schema], schema["properties"])
        return "object: " + ", ".join(_property(*each) for each in properties.items())
    if "maxProperties" in schema:
        values = _takes(cast(Schema, schema["additionalProperties"]))
        return f"object of at most {schema['maxProperties']} (token id: {values})"
    return kind


def _property(name: str, schema: Schema) -> str:
    """Name a property, and its values where they are a few words."""
    values = cast(list[object], schema.get("enum", ()))
    are_words = bool(values) and all(isinstance(value, str) for value in values)
    return f"`{name}` ({_takes(schema)})" if are_words else f"`{name}`"


def _takes_text(schema: Schema) -> str:
    pattern, longest = schema.get("pattern"), schema.get("maxLength")
    kinds = {None: "text", NAME_PATTERN: "name"}
    kind = kinds.get(cast(str | None, pattern), "visible ASCII characters")
    if longest is None:
        return kind if "minLength" not in schema else f"{kind}, not empty"
    is_empty_fine = pattern is None and "minLength" not in schema
    return f"{kind}, at most {longest}" if is_empty_fine else f"{kind}, 1 to {longest}"

"""Specs from files of grammars to be warmed."""

from typing import Any

import orjson

from jaxserve.errors import ConfigError
from jaxserve.guided.tables import GrammarSpec


def as_source(value: object) -> str:
    """Write a schema or a list of choices: equal ones alike, for they are kept by their text."""
    return orjson.dumps(value).decode()


def read_warm_specs(text: str) -> list[GrammarSpec]:
    """Read a file of grammars: a JSON list of {"json": schema}, {"regex": …} or {"choice": […]}.

    Raises:
        ConfigError: it is something else.
    """
    try:
        entries = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"the file of schemas to warm is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError("the file of schemas to warm must hold a JSON list")
    return [_spec(index, entry) for index, entry in enumerate(entries)]


def _spec(index: int, entry: Any) -> GrammarSpec:
    match entry:
        case {"json": schema}:
            return GrammarSpec(kind="json_schema", source=as_source(schema))
        case {"regex": str(pattern)}:
            return GrammarSpec(kind="regex", source=pattern)
        case {"choice": [*choices]}:
            return GrammarSpec(kind="choice", source=as_source(choices))
        case _:
            raise ConfigError(
                f"entry {index} of the schemas to warm must be an object with json, regex or choice"
            )

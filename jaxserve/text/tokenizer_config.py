"""What tokenizer_config.json says: how special tokens are spelled, and perhaps a chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError

_FILE_NAME = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The parts of the file that are read here.

    Attributes:
        special_tokens: spelling by role ("bos_token" → "<bos>"), as templates name them; bos_token
            is always there.
        chat_templates: sources by name; a template that has no name of its own is "default".
    """

    special_tokens: dict[str, str]
    chat_templates: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> "TokenizerConfig":
        """Read a folder's file; a folder without one gets Gemma's BOS and no template."""
        path = folder / _FILE_NAME
        try:
            fields = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        if not isinstance(fields, dict):
            raise ModelLoadError(f"{path} must hold a JSON object")
        try:
            chat_templates = _chat_templates(fields.get("chat_template"))
        except (TypeError, KeyError) as error:
            raise ModelLoadError(
                f"{path}: chat_template is not a list of named templates"
            ) from error
        return cls(
            special_tokens={"bos_token": "<bos>"} | _special_tokens(fields),
            chat_templates=chat_templates,
        )


def _special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    """Return every `*_token` field: a string, or an object with the string as its content."""
    contents = {
        role: value.get("content") if isinstance(value, dict) else value
        for role, value in fields.items()
        if role.endswith("_token")
    }
    return {role: content for role, content in contents.items() if isinstance(content, str)}


def _chat_templates(value: Any) -> dict[str, str]:
    """Return the field's templates: it holds one source, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    return {}

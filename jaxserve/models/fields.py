"""Typed access to the fields of a checkpoint's JSON files.

Whatever is missing, of a wrong type or not served raises ModelLoadError naming the field and its
value; nothing that shapes the model has a default. It knows no family of models.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import AttentionKind, RopeConfig

_KINDS: dict[str, AttentionKind] = {"sliding_attention": "sliding", "full_attention": "full"}


class Fields:
    """One JSON object; `where` is its path, for messages."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Read a JSON file that must hold an object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path} does not hold a JSON object")
        return cls(values, path.name)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, key: str) -> object:
        """Return the raw value; None where it is null or absent."""
        return self._values.get(key)

    def refusal(self, key: str, reason: str) -> ModelLoadError:
        """Make the error that refuses a field."""
        shown = json.dumps(self._values[key]) if key in self._values else "absent"
        return ModelLoadError(f"{self._where}: {key} is {shown}: {reason}")

    def integer(self, key: str, *, minimum: int = 1) -> int:
        """Return an integer field that must be present."""
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refusal(key, f"an integer of at least {minimum} is needed")
        return value

    def number(self, key: str) -> float:
        """Return a positive number that must be present."""
        value = self._values.get(key)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise self.refusal(key, "a positive number is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean field that must be present."""
        value = self._values.get(key)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false is needed")
        return value

    def text(self, key: str) -> str:
        """Return a string field that must be present."""
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self.refusal(key, "a string is needed")
        return value

    def child(self, key: str) -> "Fields":
        """Return an object field that must be present."""
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "an object is needed")
        return Fields(value, f"{self._where}: {key}")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an integer or a list of them; empty where the field is null or absent."""
        value = self._values.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.refusal(key, "an integer or a list of integers is needed")
        return tuple(values)

    def only(self, key: str, *served: object) -> None:
        """Refuse any value but these; null and absence always pass."""
        value = self._values.get(key)
        if value is not None and not any(value == s and type(value) is type(s) for s in served):
            names = ", ".join(json.dumps(s) for s in (*served, None))
            raise self.refusal(key, f"served are {names}")


def read_kinds(text: Fields, num_layers: int) -> tuple[AttentionKind, ...]:
    """Read layer_types, or the older sliding_window_pattern: every n-th layer is full."""
    pattern = text.get("sliding_window_pattern")
    if text.get("layer_types") is None and pattern is not None:
        n = text.integer("sliding_window_pattern")
        return tuple("sliding" if (i + 1) % n else "full" for i in range(num_layers))
    kinds = text.get("layer_types")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(k in (*_KINDS,) for k in kinds)
    ):
        raise text.refusal("layer_types", f"{num_layers} of {' or '.join(_KINDS)} are needed")
    return tuple(_KINDS[kind] for kind in kinds)


def read_rope(rope: Fields, head_dim: int) -> RopeConfig:
    """Read one entry of rope_parameters."""
    kind, theta = rope.text("rope_type"), rope.number("rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta, num_pairs=head_dim // 2)
    if kind == "linear":
        return RopeConfig(theta=theta, num_pairs=head_dim // 2, factor=rope.number("factor"))
    if kind != "proportional":
        raise rope.refusal("rope_type", "served are default, linear and proportional")
    factor = 1.0 if rope.get("factor") is None else rope.number("factor")
    num_pairs = int(rope.number("partial_rotary_factor") * head_dim // 2)
    return RopeConfig(theta=theta, num_pairs=num_pairs, factor=factor)

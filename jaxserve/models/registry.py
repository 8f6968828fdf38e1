"""Which models are served: from a folder's JSON files to a ModelConfig and the end ids."""

from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.models import gemma3, gemma4
from jaxserve.models.config import ModelConfig
from jaxserve.models.fields import Fields
from jaxserve.types import SamplingDefaults

_READERS: dict[str, Callable[[Fields], ModelConfig]] = {
    **dict.fromkeys(gemma3.MODEL_TYPES, gemma3.read_config),
    **dict.fromkeys(gemma4.MODEL_TYPES, gemma4.read_config),
}


def load_config(folder: Path) -> ModelConfig:
    """Read the folder's config.json; a model that is not served raises ModelLoadError."""
    fields = Fields.read(folder / "config.json")
    model_type = fields.text("model_type")
    if model_type not in _READERS:
        raise fields.refusal("model_type", f"served are {', '.join(sorted(_READERS))}")
    config = _READERS[model_type](fields)
    _check_fit(config)
    return config


def _check_fit(config: ModelConfig) -> None:
    """Refuse sizes that are each possible, but not together."""
    rope_of = {layer.kind: (layer.head_dim, layer.rope) for layer in config.layers}
    for i, layer in enumerate(config.layers):
        half, odd = divmod(layer.head_dim, 2)
        if layer.num_heads % layer.num_kv_heads or odd or layer.rope.num_pairs > half:
            raise ModelLoadError(
                f"config.json: {layer.num_heads} query heads, {layer.num_kv_heads} key heads, "
                f"{layer.head_dim} channels and {layer.rope.num_pairs} rotating pairs do not fit "
                f"together (layer {i})"
            )
        if (layer.head_dim, layer.rope) != rope_of[layer.kind]:
            raise ModelLoadError(f"config.json: {layer.kind} layers differ in their head_dim")
        if layer.num_kv_heads != config.layers[layer.kv_source].num_kv_heads:
            raise ModelLoadError(
                f"config.json: layer {i} has another number of key heads than layer "
                f"{layer.kv_source}, whose cache it reads"
            )


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return how generation_config.json wants to be sampled; what it leaves out is neutral."""
    path = folder / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    fields = Fields.read(path)

    def number(name: str, neutral: float, low: float, high: float) -> float:
        value = fields.get(name)
        if value is None:
            return neutral
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise fields.refusal(name, f"a number between {low:g} and {high:g} is needed")
        return value

    return SamplingDefaults(
        temperature=number("temperature", 1.0, 0, 2),
        top_k=max(0, int(number("top_k", 0, -1, 1 << 30))),
        top_p=number("top_p", 1.0, 1e-6, 1),
        min_p=number("min_p", 0.0, 0, 1),
        repetition_penalty=number("repetition_penalty", 1.0, 1e-6, 10),
    )


def end_token_ids(folder: Path) -> frozenset[int]:
    """Return every id that ends a sequence, in config.json or in generation_config.json."""
    config = Fields.read(folder / "config.json")
    sources = [config]
    if "text_config" in config:
        sources.append(config.child("text_config"))
    vocab_size = sources[-1].integer("vocab_size")
    if (folder / "generation_config.json").exists():
        sources.append(Fields.read(folder / "generation_config.json"))
    for fields in sources:
        if any(not 0 <= i < vocab_size for i in fields.integers("eos_token_id")):
            raise fields.refusal("eos_token_id", f"ids lie in [0, {vocab_size})")
    ids = frozenset(i for fields in sources for i in fields.integers("eos_token_id"))
    if not ids:
        raise config.refusal("eos_token_id", "at least one id must end a sequence")
    return ids

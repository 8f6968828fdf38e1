"""Which models are served: from a folder's JSON files to a ModelConfig and the end ids."""

from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.models import gemma3, gemma4
from jaxserve.models.config import ModelConfig
from jaxserve.models.fields import Fields

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

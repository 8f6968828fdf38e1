"""Gemma 4 text decoders: what their config.json says.

The dense sizes, with per-layer inputs (PLE) and shared KV or without; the mixture-of-experts sizes
are refused. It takes both spellings of the geometry: flat `global_head_dim`, and the newer
`per_layer_config`.
"""

from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig
from jaxserve.models.fields import Fields, read_kinds, read_rope

TEXT_MODEL_TYPES = ("gemma4_text", "gemma4_unified_text")
MODEL_TYPES = ("gemma4", "gemma4_unified", *TEXT_MODEL_TYPES)

_PLACEHOLDERS = ("image_token_id", "audio_token_id", "video_token_id")


def read_config(config: Fields) -> ModelConfig:
    """Read a whole config.json, multimodal wrapper or text model alone."""
    text = config.child("text_config") if "text_config" in config else config
    text.only("model_type", *TEXT_MODEL_TYPES)
    _refuse_unserved(config, text)
    num_layers = text.integer("num_hidden_layers")
    kinds = read_kinds(text, num_layers)
    ple_dim, ple_vocab_size = _read_ple(text)
    return ModelConfig(
        model_type=text.text("model_type"),
        vocab_size=text.integer("vocab_size"),
        model_dim=text.integer("hidden_size"),
        layers=tuple(_read_layer(text, i, kinds) for i in range(num_layers)),
        window=text.integer("sliding_window", minimum=2),
        norm_eps=text.number("rms_norm_eps"),
        attention_scale=1.0,  # queries and keys are normed
        has_v_norm=True,
        has_layer_scalar=True,
        logit_softcap=_read_softcap(text),
        ple_dim=ple_dim,
        ple_vocab_size=ple_vocab_size,
        max_position=text.integer("max_position_embeddings"),
        placeholder_token_ids=frozenset(i for key in _PLACEHOLDERS for i in config.integers(key)),
    )


def _refuse_unserved(config: Fields, text: Fields) -> None:
    for fields in (config, text):
        fields.only("tie_word_embeddings", True)
    text.only("enable_moe_block", False)
    text.only("num_experts", 0)
    text.only("attention_bias", False)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("use_bidirectional_attention", False, "vision")  # "vision" touches image tokens alone


def _read_softcap(text: Fields) -> float | None:
    if "final_logit_softcapping" not in text:
        raise text.refusal("final_logit_softcapping", "a number or null is needed")
    if text.get("final_logit_softcapping") is None:
        return None
    return text.number("final_logit_softcapping")


def _read_ple(text: Fields) -> tuple[int, int]:
    """Sizes without per-layer inputs leave both keys out, or set a width of 0."""
    if "hidden_size_per_layer_input" not in text and "vocab_size_per_layer_input" not in text:
        return 0, 0
    ple_dim = text.integer("hidden_size_per_layer_input", minimum=0)
    return ple_dim, text.integer("vocab_size_per_layer_input") if ple_dim else 0


def _read_layer(text: Fields, index: int, kinds: tuple[AttentionKind, ...]) -> LayerConfig:
    kind = kinds[index]
    num_shared = text.integer("num_kv_shared_layers", minimum=0)
    first_shared = len(kinds) - num_shared
    is_shared = index >= first_shared
    is_wide = num_shared > 0 and text.flag("use_double_wide_mlp") and is_shared
    num_kv_heads, head_dim = _read_geometry(text, index, kind)
    rope = text.child("rope_parameters").child(f"{kind}_attention")
    return LayerConfig(
        kind=kind,
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=text.integer("intermediate_size") * (2 if is_wide else 1),
        kv_source=_find_source(text, kinds, index) if is_shared else index,
        has_v_proj=not (kind == "full" and text.flag("attention_k_eq_v")),
        rope=read_rope(rope, head_dim),
    )


def _find_source(text: Fields, kinds: tuple[AttentionKind, ...], index: int) -> int:
    """Find the last layer of the same kind that owns a cache."""
    first_shared = len(kinds) - text.integer("num_kv_shared_layers", minimum=0)
    owners = [i for i in range(max(first_shared, 0)) if kinds[i] == kinds[index]]
    if not owners:
        raise text.refusal("num_kv_shared_layers", f"no {kinds[index]} layer would own a cache")
    return owners[-1]


def _read_geometry(text: Fields, index: int, kind: AttentionKind) -> tuple[int, int]:
    """Return the K/V heads and the head dim of one layer."""
    num_kv_heads, head_dim = text.integer("num_key_value_heads"), text.integer("head_dim")
    if "per_layer_config" in text:
        return _read_override(text.child("per_layer_config"), index, num_kv_heads, head_dim)
    if kind == "sliding":
        return num_kv_heads, head_dim
    # The number of global K/V heads counts only where keys serve as values.
    if text.flag("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
        num_kv_heads = text.integer("num_global_key_value_heads")
    return num_kv_heads, text.integer("global_head_dim")


def _read_override(
    per_layer: Fields, index: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Apply per_layer_config, whose keys are layer indices, padded with zeros or not."""
    for key in per_layer:
        if not key.isdecimal():
            raise per_layer.refusal(key, "a layer index is needed")
        if int(key) != index:
            continue
        layer = per_layer.child(key)
        for name in layer:
            if name == "head_dim":
                head_dim = layer.integer(name)
            elif name == "num_key_value_heads":
                num_kv_heads = layer.integer(name)
            else:
                raise layer.refusal(name, "served are head_dim and num_key_value_heads")
    return num_kv_heads, head_dim

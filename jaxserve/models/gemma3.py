"""Gemma 3 text decoders: what their config.json says.

It takes both spellings of the rotary bases: flat `rope_theta`, `rope_local_base_freq` and
`rope_scaling`, and the newer `rope_parameters`. The wrapper of a multimodal checkpoint is read for
its text model alone.
"""

from jaxserve.models.config import AttentionKind, LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.fields import Fields, read_kinds, read_rope

TEXT_MODEL_TYPES = ("gemma3_text",)
MODEL_TYPES = ("gemma3", *TEXT_MODEL_TYPES)

# A checkpoint's norm weights are w where the model multiplies by 1 + w.
NORM_OFFSET = 1.0

_PLACEHOLDERS = ("image_token_id", "image_token_index")


def read_config(config: Fields) -> ModelConfig:
    """Read a whole config.json, multimodal wrapper or text model alone."""
    text = config.child("text_config") if "text_config" in config else config
    text.only("model_type", *TEXT_MODEL_TYPES)
    _refuse_unserved(config, text)
    kinds = read_kinds(text, text.integer("num_hidden_layers"))
    softcap = text.get("final_logit_softcapping")
    return ModelConfig(
        model_type=text.text("model_type"),
        norm_offset=NORM_OFFSET,
        vocab_size=text.integer("vocab_size"),
        model_dim=text.integer("hidden_size"),
        layers=tuple(_read_layer(text, i, kind) for i, kind in enumerate(kinds)),
        window=text.integer("sliding_window", minimum=2),
        norm_eps=text.number("rms_norm_eps"),
        attention_scale=text.number("query_pre_attn_scalar") ** -0.5,
        has_v_norm=False,
        has_layer_scalar=False,
        logit_softcap=None if softcap is None else text.number("final_logit_softcapping"),
        ple_dim=0,
        ple_vocab_size=0,
        max_position=text.integer("max_position_embeddings"),
        placeholder_token_ids=frozenset(i for key in _PLACEHOLDERS for i in config.integers(key)),
    )


def _refuse_unserved(config: Fields, text: Fields) -> None:
    for fields in (config, text):
        fields.only("tie_word_embeddings", True)
    text.only("attn_logit_softcapping")
    text.only("attention_bias", False)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("use_bidirectional_attention", False)


def _read_layer(text: Fields, index: int, kind: AttentionKind) -> LayerConfig:
    head_dim = text.integer("head_dim")
    return LayerConfig(
        kind=kind,
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=text.integer("intermediate_size"),
        kv_source=index,
        has_v_proj=True,
        rope=_read_rope(text, kind, head_dim),
    )


def _read_rope(text: Fields, kind: AttentionKind, head_dim: int) -> RopeConfig:
    if "rope_parameters" in text:
        return read_rope(text.child("rope_parameters").child(f"{kind}_attention"), head_dim)
    if kind == "sliding":
        return RopeConfig(theta=text.number("rope_local_base_freq"), num_pairs=head_dim // 2)
    theta = text.number("rope_theta")
    if text.get("rope_scaling") is None:
        return RopeConfig(theta=theta, num_pairs=head_dim // 2)
    scaling = text.child("rope_scaling")  # scales the full layers alone
    if scaling.text("rope_type") != "linear":
        raise scaling.refusal("rope_type", "served is linear")
    return RopeConfig(theta=theta, num_pairs=head_dim // 2, factor=scaling.number("factor"))

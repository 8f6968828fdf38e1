"""The slow oracle: a whole forward pass in plain numpy float32, one sequence, no cache, no batch.

All that it shares with the server is the model's description.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from jaxserve.models.config import LayerConfig, ModelConfig

Array = npt.NDArray[np.float32]
Tensors = Mapping[str, Array]


def greedy(tensors: Tensors, config: ModelConfig, ids: list[int], n: int) -> list[int]:
    """Generate n tokens, each by a whole pass."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(logits(tensors, config, ids)[-1].argmax()))
    return ids[-n:]


def logits(w: Tensors, config: ModelConfig, ids: list[int], *, int8_kv: bool = False) -> Array:
    """Return float32 [T, V]; `w` holds the text model's tensors by name without prefix."""
    one_plus = np.float32(1 if config.model_type.startswith("gemma3") else 0)

    def norm(x: Array, name: str) -> Array:
        y: Array = _rms(x, config) * (one_plus + w[name + ".weight"])
        return y

    def linear(x: Array, name: str) -> Array:
        y: Array = x @ w[name + ".weight"].T
        return y

    shape = (len(ids), config.num_layers, config.ple_dim)
    x = w["embed_tokens.weight"][ids] * np.float32(config.model_dim**0.5)
    if config.ple_dim:
        rows = [i if i < config.ple_vocab_size else 0 for i in ids]
        table = w["embed_tokens_per_layer.weight"][rows] * np.float32(config.ple_dim**0.5)
        context = linear(x, "per_layer_model_projection") * np.float32(config.model_dim**-0.5)
        ple = norm(context.reshape(shape), "per_layer_projection_norm") + table.reshape(shape)
        ple *= np.float32(0.5**0.5)
    caches: dict[int, tuple[Array, Array]] = {}
    for i, layer in enumerate(config.layers):
        path, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        heads, kv_heads = (len(ids), -1, layer.head_dim), (len(ids), layer.num_kv_heads, -1)
        a = norm(x, path + "input_layernorm")
        q = _rope(norm(linear(a, attn + "q_proj").reshape(heads), attn + "q_norm"), layer)
        if layer.kv_source == i:
            k = linear(a, attn + "k_proj").reshape(kv_heads)
            v = linear(a, attn + "v_proj").reshape(kv_heads) if layer.has_v_proj else k
            k = _rope(norm(k, attn + "k_norm"), layer)
            v = _rms(v, config) if config.has_v_norm else v
            caches[i] = (_round(k), _round(v)) if int8_kv else (k, v)
        o = _attend(q, *caches[layer.kv_source], layer, config)
        x = x + norm(linear(o, attn + "o_proj"), path + "post_attention_layernorm")
        m = norm(x, path + "pre_feedforward_layernorm")
        f = _gelu(linear(m, path + "mlp.gate_proj")) * linear(m, path + "mlp.up_proj")
        x = x + norm(linear(f, path + "mlp.down_proj"), path + "post_feedforward_layernorm")
        if config.ple_dim:
            g = _gelu(linear(x, path + "per_layer_input_gate")) * ple[:, i]
            g = linear(g, path + "per_layer_projection")
            x = x + norm(g, path + "post_per_layer_input_norm")
        if config.has_layer_scalar:
            x = x * w[path + "layer_scalar"]
    z = linear(norm(x, "norm"), "embed_tokens")
    cap = config.logit_softcap
    return z if cap is None else np.float32(cap) * np.tanh(z / np.float32(cap))


def _rms(x: Array, config: ModelConfig) -> Array:
    y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(config.norm_eps))
    return y


def _round(x: Array) -> Array:
    """Round each head's largest value to 127 levels, and all others with it."""
    step = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    y: Array = np.round(x / step) * step
    return y


def _attend(q: Array, k: Array, v: Array, layer: LayerConfig, config: ModelConfig) -> Array:
    k, v = (np.repeat(a, layer.num_heads // layer.num_kv_heads, axis=1) for a in (k, v))
    s = np.einsum("the,she->hts", q, k, optimize=True) * np.float32(config.attention_scale)
    t = np.arange(len(q))
    age = t[:, None] - t[None, :]
    seen = (age >= 0) & ((age < config.window) | (layer.kind == "full"))
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    o: Array = np.einsum("hts,she->the", p / p.sum(-1, keepdims=True), v, optimize=True)
    return o.reshape(len(q), -1)


def _rope(x: Array, layer: LayerConfig) -> Array:
    half, rope = layer.head_dim // 2, layer.rope
    frequency = rope.theta ** (-np.arange(half) / half) / rope.factor
    frequency[rope.num_pairs :] = 0
    angle = (np.arange(len(x))[:, None] * frequency)[:, None, :]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _gelu(z: Array) -> Array:
    y: Array = np.tanh(np.float32((2 / np.pi) ** 0.5) * (z + np.float32(0.044715) * z**3))
    return np.float32(0.5) * z * (1 + y)

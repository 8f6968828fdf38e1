"""What a decoder is, as static values: hashable, so that a step program is traced against it.

One description serves every family; a family's own file reads config.json into it. It knows
nothing of arrays.
"""

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["sliding", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding with half-split pairs: channel c turns with c + E/2.

    Attributes:
        theta: base; pair c turns by position * theta^(-2c/E) / factor.
        num_pairs: how many of the E/2 pairs turn; the rest have frequency 0. The exponent is
            over the full E.
        factor: divides every frequency.
    """

    theta: float
    num_pairs: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer.

    Attributes:
        kv_source: the layer whose cache this one reads; its own index where it owns one.
        has_v_proj: False: V is the raw key projection (before key norm and rope), then v-normed.
    """

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    kv_source: int
    has_v_proj: bool
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Gemma decoder.

    Attributes:
        model_type: the config.json value of the text model, for messages and metrics.
        window: keys a sliding layer sees, the token itself included.
        attention_scale: multiplies q·k.
        norm_offset: what a checkpoint's norm weights lack to the factors that they stand for.
        has_v_norm: values are RMS-normed without a weight before they are stored.
        has_layer_scalar: each layer ends by multiplying the whole stream by a learned scalar.
        logit_softcap: cap·tanh(z/cap) on the logits; None: none.
        ple_dim: width of the per-layer inputs; 0: the model has none.
        ple_vocab_size: rows of the per-layer embedding table; an id beyond reads row 0.
        max_position: longest context the checkpoint was made for.
        placeholder_token_ids: media placeholders that a text-only server must refuse in prompts.
    """

    model_type: str
    vocab_size: int
    model_dim: int
    layers: tuple[LayerConfig, ...]
    window: int
    norm_eps: float
    attention_scale: float
    has_v_norm: bool
    has_layer_scalar: bool
    logit_softcap: float | None
    ple_dim: int
    ple_vocab_size: int
    max_position: int
    placeholder_token_ids: frozenset[int] = frozenset()
    norm_offset: float = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """Indices of the layers that own a cache, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kv_source == i)

    @property
    def num_writing_layers(self) -> int:
        """Layers [0, n) may write a cache; every layer from n on only reads one."""
        return self.kv_owners[-1] + 1

    @property
    def max_head_dim(self) -> int:
        return max(layer.head_dim for layer in self.layers)

    def kv_values_per_token(self, kind: AttentionKind) -> int:
        """Return how many numbers one token stores, K and V of all owners of a kind."""
        return sum(
            2 * layer.num_kv_heads * layer.head_dim
            for layer in (self.layers[i] for i in self.kv_owners)
            if layer.kind == kind
        )

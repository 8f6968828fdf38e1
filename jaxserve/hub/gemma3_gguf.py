"""Read a Gemma 3 GGUF file as what a Hugging Face folder holds: configuration, tokenizer, tensors.

It knows both formats' names and conventions and nothing of folders or of fetching. Tensors come in
blocks of rows, so that none is ever whole in memory. It needs `gguf`, so it is imported only where
the extra `demo` is installed. Any thread.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve.errors import ModelLoadError
from jaxserve.hub.gguf_file import read_gguf

# What the architecture fixes and the file does not say.
_FULL_ATTENTION_EVERY = 6
_LOCAL_ROPE_THETA = 10_000.0
_END_OF_TURN = "<end_of_turn>"
_SPECIAL_NAMES = frozenset(
    (
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<start_of_turn>",
        _END_OF_TURN,
        "<start_of_image>",
        "<end_of_image>",
    )
)

_MODEL_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCK_ROWS = 8192
_SPACE = "\u2581"  # how the vocabulary spells a space


class Gemma3Gguf:
    """One GGUF file of architecture `gemma3`."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        architecture = self._field("general.architecture")
        if architecture != "gemma3":
            raise ModelLoadError(f"{path}: architecture {architecture!r}, expected 'gemma3'")
        self._tensors = {
            _checkpoint_name(name): tensor for name, tensor in self._file.tensors.items()
        }

    def _field(self, name: str) -> Any:
        if name not in self._file.fields:
            raise ModelLoadError(f"{self._file.path} lacks the field {name!r}")
        return self._file.fields[name]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its checkpoint name, in the file's order."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def blocks(self, name: str) -> Iterator[npt.NDArray[ml_dtypes.bfloat16]]:
        """Yield the tensor's values, block by block, dequantized, then rounded once to bfloat16."""
        tensor = self._tensors[name]
        encoding = gguf.GGMLQuantizationType(tensor.quantization)
        # As rows of bytes; a vector is one row.
        byte_shape = gguf.quant_shape_to_byte_shape(tensor.shape, encoding)
        rows = np.memmap(
            self._file.path,
            mode="r",
            offset=tensor.offset,
            shape=(math.prod(byte_shape[:-1]), byte_shape[-1]),
        )
        # GGUF stores a norm's factor 1 + w, a checkpoint stores w.
        offset = np.float32(1.0 if name.endswith("norm.weight") else 0.0)
        for start in range(0, len(rows), _BLOCK_ROWS):
            values = gguf.dequantize(np.asarray(rows[start : start + _BLOCK_ROWS]), encoding)
            yield (values - offset).astype(ml_dtypes.bfloat16)

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        num_layers = self._field("gemma3.block_count")
        head_dim = self._field("gemma3.attention.key_length")
        vocab_size, hidden_size = self.shapes["model.embed_tokens.weight"]
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": self._field("gemma3.feed_forward_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": self._field("gemma3.attention.head_count"),
            "num_key_value_heads": self._field("gemma3.attention.head_count_kv"),
            "head_dim": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": self._field("gemma3.context_length"),
            # Stored in float32: printing the shortest equal decimal gives back 1e-06.
            "rms_norm_eps": float(
                str(np.float32(self._field("gemma3.attention.layer_norm_rms_epsilon")))
            ),
            "query_pre_attn_scalar": head_dim,
            "rope_theta": self._field("gemma3.rope.freq_base"),
            "rope_local_base_freq": _LOCAL_ROPE_THETA,
            "rope_scaling": None,
            "sliding_window": self._field("gemma3.attention.sliding_window"),
            "layer_types": [_layer_type(layer) for layer in range(num_layers)],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            **self._token_ids(),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
        }

    def generation_config(self) -> dict[str, Any]:
        """Return the contents of generation_config.json: a chat turn's end ends generation too."""
        end_ids = [self._field("tokenizer.ggml.eos_token_id"), self._pieces.index(_END_OF_TURN)]
        return {**self._token_ids(), "eos_token_id": end_ids}

    def _token_ids(self) -> dict[str, int]:
        return {
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the contents of tokenizer_config.json."""
        return {
            "tokenizer_class": "GemmaTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._field("gemma3.context_length"),
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        }

    def tokenizer(self) -> dict[str, Any]:
        """Return the contents of tokenizer.json: a BPE rebuilt from pieces and their scores."""
        pieces = self._pieces
        bos_id = self._field("tokenizer.ggml.bos_token_id")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(pieces),
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "post_processor": _prepend_token(pieces[bos_id], bos_id),
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": {piece: token_id for token_id, piece in enumerate(pieces)},
                "merges": self._merges(pieces),
            },
        }

    @cached_property
    def _pieces(self) -> list[str]:
        """The vocabulary in id order; GGUF spells the pieces of spaces only with plain spaces."""
        return [piece.replace(" ", _SPACE) for piece in self._field("tokenizer.ggml.tokens")]

    def _added_tokens(self, pieces: list[str]) -> list[dict[str, Any]]:
        """Return what is matched in the text before BPE: control and user-defined pieces."""
        added_types = {gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED}
        return [
            {
                "id": token_id,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": piece in _SPECIAL_NAMES,
            }
            for token_id, (piece, kind) in enumerate(
                zip(pieces, self._field("tokenizer.ggml.token_type"), strict=True)
            )
            if kind in added_types
        ]

    def _merges(self, pieces: list[str]) -> list[tuple[str, str]]:
        """Return every way to build a piece from two, best score first, then longest left part."""
        known = frozenset(pieces)
        scored: list[tuple[float, int, tuple[str, str]]] = []
        scores = self._field("tokenizer.ggml.scores")
        kinds = self._field("tokenizer.ggml.token_type")
        for piece, score, kind in zip(pieces, scores, kinds, strict=True):
            if kind == gguf.TokenType.NORMAL:
                piece_score = score
            elif kind == gguf.TokenType.USER_DEFINED:
                piece_score = 0.0  # the file says -1000, which would rank these last
            else:
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in known and right in known:
                    scored.append((piece_score, cut, (left, right)))
        scored.sort(key=lambda item: item[:2], reverse=True)
        return [pair for _, _, pair in scored]


def _checkpoint_name(gguf_name: str) -> str:
    """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    parts = gguf_name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in _MODEL_TENSORS:
        return f"model.{_MODEL_TENSORS[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.weight"
    raise ModelLoadError(
        f"the GGUF file holds a tensor that a Gemma 3 text model does not have: {gguf_name}"
    )


def _layer_type(layer: int) -> str:
    return "full_attention" if (layer + 1) % _FULL_ATTENTION_EVERY == 0 else "sliding_attention"


def _prepend_token(token: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor that puts one token in front of each sequence."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }

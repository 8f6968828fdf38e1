"""Tiny random checkpoints in Hugging Face's layout, for tests that need a model that runs.

A vocabulary of 1,024, a window of 16, contexts of up to 4,096 tokens. The text is noise.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from jaxserve.models.config import ModelConfig
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.specs import param_specs, random_params

Kind = Literal["gemma3", "e2b", "e4b", "dense"]
Array = npt.NDArray[Any]
Tensors = dict[str, Array]

DATA = Path(__file__).parent / "data"
TOKENIZER = DATA / "tiny_tokenizer"
END_TOKEN_IDS = (1, 106)

_KINDS = {"s": "sliding_attention", "f": "full_attention"}
_COMMON = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}
_GEMMA4 = {
    **_COMMON,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 32,
    "model_type": "gemma4_text",
    "num_global_key_value_heads": None,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 1024,
}
_GEOMETRY: dict[Kind, dict[str, Any]] = {
    "gemma3": {
        **_COMMON,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "layers": "ssfs",
    },
    "e2b": {
        **_GEMMA4,
        "layers": "ssfssf",
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    # The last layer that owns a cache is a sliding one, and the last full owner lies before it.
    "e4b": {
        **_GEMMA4,
        "layers": "ssfsssf",
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 3,
    },
    "dense": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layers": "ssf",
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
    },
}


def config_json(kind: Kind) -> dict[str, Any]:
    """Return a fresh config.json of this kind; Gemma 4's is a multimodal wrapper's, as released."""
    text = json.loads(json.dumps(_GEOMETRY[kind]))
    layers = text.pop("layers")
    text["layer_types"] = [_KINDS[letter] for letter in layers]
    text["num_hidden_layers"] = len(layers)
    if kind == "gemma3":
        return {**text, "architectures": ["Gemma3ForCausalLM"], "eos_token_id": [*END_TOKEN_IDS]}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_token_id": 1020,
        "eos_token_id": [*END_TOKEN_IDS],
        "image_token_id": 1019,
        "model_type": "gemma4",
        "text_config": {**text, "eos_token_id": 1},
        "tie_word_embeddings": True,
        "video_token_id": 1023,
    }


def make_checkpoint(folder: Path, kind: Kind, *, seed: int = 0, shards: int = 1) -> Path:
    """Write a random bf16 checkpoint with tokenizer and chat template, and return its folder."""
    write_json_files(folder, config_json(kind))
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    config = load_config(folder)
    prefix = "model." if kind == "gemma3" else "model.language_model."
    tensors = named_tensors(random_params(config, np.float32, seed), config)
    save_tensors(
        folder,
        {prefix + name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()},
        shards=shards,
    )
    return folder


def write_json_files(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": [*END_TOKEN_IDS], "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


def named_tensors(params: Params, config: ModelConfig) -> Tensors:
    """Take weights apart into the float32 tensors of a checkpoint, named without the prefix."""
    tensors = {}
    for spec in param_specs(config):
        leaf: Any = params
        for step in spec.path.split("."):
            leaf = leaf[int(step)] if step.isdecimal() else getattr(leaf, step)
        for source in spec.sources:
            values = np.asarray(leaf, np.float32)[source.at] - np.float32(spec.offset)
            tensors[source.name] = values.reshape(source.shape)
    return tensors


def save_tensors(folder: Path, tensors: Mapping[str, Array], *, shards: int = 1) -> None:
    """Write one file, or shards with an index; neighbours in name lie in different shards."""
    names = sorted(tensors)
    if shards == 1:
        _save(folder / "model.safetensors", tensors, names)
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        _save(folder / file, tensors, names[i::shards])
        weight_map |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_tensors(folder: Path) -> Tensors:
    """Read the text model's tensors as float32, by name without prefix, int4 ones unpacked."""
    raw: dict[str, Array] = {}
    for file in folder.glob("*.safetensors"):
        raw |= load_file(file)
    anchor = min((name for name in raw if name.endswith("embed_tokens.weight")), key=len)
    prefix = anchor.removesuffix("embed_tokens.weight")
    tensors = {}
    for name, tensor in raw.items():
        short = name.removeprefix(prefix)
        if name.endswith(".weight_packed"):
            module = name.removesuffix("_packed")
            tensors[short.removesuffix("_packed")] = _unpack(tensor, raw[module + "_scale"])
        elif name.startswith(prefix) and not name.endswith(("_scale", "_shape")):
            tensors[short] = tensor.astype(np.float32)
    return tensors


def _unpack(words: Array, steps: Array) -> Array:
    # Apart from the server's own way of doing it, which this is to check.
    nibbles = [(words.view(np.uint32) >> np.uint32(4 * j)) & np.uint32(15) for j in range(8)]
    levels = np.stack(nibbles, axis=-1).reshape(words.shape[0], -1).astype(np.float32) - 8
    values = levels * np.repeat(steps.astype(np.float32), 32, axis=1)
    return values.astype(steps.dtype).astype(np.float32)


def _save(file: Path, tensors: Mapping[str, Array], names: list[str]) -> None:
    save_file({name: np.ascontiguousarray(tensors[name]) for name in names}, file)

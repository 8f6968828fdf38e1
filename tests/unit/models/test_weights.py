"""Loading of checkpoint folders."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.errors import ModelLoadError
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.weights import LoadedParams, load_params
from tests.checkpoints import (
    DATA,
    Array,
    Kind,
    Tensors,
    make_checkpoint,
    named_tensors,
    save_tensors,
)

BF16 = ml_dtypes.bfloat16
PREFIX = "model.language_model."
Q_PROJ = PREFIX + "layers.0.self_attn.q_proj"


def load(folder: Path, dtype: Any = jnp.float32) -> LoadedParams:
    return load_params(folder, load_config(folder), dtype, progress=lambda done, total: None)


def rewrite(
    folder: Path, *, remove: Iterable[str] = (), add: Mapping[str, Array] = MappingProxyType({})
) -> Path:
    """Change the tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for name in remove:
        del tensors[name]
    save_tensors(folder, {**tensors, **add})
    return folder


def assert_equal(one: Params, other: Params) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("shards", [1, 3])
def test_what_was_saved_is_loaded(kind: Kind, shards: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, kind, shards=shards)
    stored: Tensors = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    loaded = load(folder)
    tensors = named_tensors(loaded.params, load_config(folder))
    assert len(tensors) == len(stored)
    for name, tensor in tensors.items():
        (full,) = (key for key in stored if key.endswith("." + name))
        # Gemma 3's norms go through 1 + w and back.
        np.testing.assert_allclose(tensor, stored[full].astype(np.float32), atol=1e-6, rtol=0)


def test_matrices_are_cast_and_small_vectors_stay_float32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    wide, narrow = load(folder, jnp.float32).params, load(folder, jnp.bfloat16).params
    assert wide.embed_VD.dtype == jnp.float32
    assert narrow.embed_VD.dtype == jnp.asarray(narrow.layers[0].qkv_OD).dtype == jnp.bfloat16
    assert narrow.norms_LND.dtype == narrow.layer_scalar_L.dtype == jnp.float32
    np.testing.assert_array_equal(
        jnp.asarray(wide.embed_VD), jnp.asarray(narrow.embed_VD, jnp.float32)
    )


def test_gemma3_norms_are_stored_less_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3")
    stored = load_file(folder / "model.safetensors")["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(load(folder).params.final_norm_D, 1 + stored)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "language_model.", ""])
def test_the_text_prefix_is_found(prefix: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    expected = load(folder).params
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder, {prefix + k.removeprefix(PREFIX): v for k, v in tensors.items()})
    assert_equal(load(folder).params, expected)


def test_no_text_model_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    rewrite(folder, remove=[PREFIX + "embed_tokens.weight"])
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight"):
        load(folder)


def test_towers_and_the_tied_head_are_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    expected = load(folder).params
    names = (
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "model.audio_tower.layers.0.norm.weight",
        "model.embed_vision.embedding_projection.weight",
        "lm_head.weight",
    )
    loaded = load(rewrite(folder, add=dict.fromkeys(names, np.zeros((2, 2), BF16))))
    assert loaded.unused == ()
    assert_equal(loaded.params, expected)


@pytest.mark.parametrize("weight", ["weight", "weight_packed"])
def test_the_dead_side_of_shared_layers_changes_nothing(weight: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    expected = load(folder).params
    names = [
        f"{PREFIX}layers.{i}.self_attn.{part}.{weight}"
        for i in (3, 4, 5)
        for part in ("k_proj", "v_proj", "k_norm")
    ]
    loaded = load(rewrite(folder, add=dict.fromkeys(names, np.ones((3, 3), BF16))))
    assert loaded.unused == ()
    assert_equal(loaded.params, expected)


def test_unused_tensors_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    names = (PREFIX + "layers.0.mlp.bias", PREFIX + "layers.9.self_attn.k_proj.weight")
    rewrite(folder, add=dict.fromkeys(names, np.zeros(1, BF16)))
    with caplog.at_level(logging.WARNING):
        assert load(folder).unused == names
    assert [names[0] in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "name", ["self_attn.k_norm.weight", "self_attn.k_proj.weight", "layer_scalar"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    rewrite(folder, remove=[f"{PREFIX}layers.2.{name}"])
    with pytest.raises(ModelLoadError, match=rf"tensor {PREFIX}layers\.2\.{name} .*missing"):
        load(folder)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    name = Q_PROJ + ".weight"
    rewrite(folder, add={name: np.zeros((64, 63), BF16)})
    with pytest.raises(ModelLoadError, match=rf"{name} .*\[64, 63\].*\[64, 64\]"):
        load(folder)


def test_a_wrong_type_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    name = Q_PROJ + ".weight"
    rewrite(folder, add={name: np.zeros((64, 64), np.int8)})
    with pytest.raises(ModelLoadError, match=rf"{name} is of type I8"):
        load(folder)


def test_an_unknown_quantization_is_shown(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    words = {Q_PROJ + ".qweight": np.zeros((8, 64), np.int32)}
    rewrite(folder, remove=[Q_PROJ + ".weight"], add=words)
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight .*missing.*q_proj\.qweight"):
        load(folder)


def pack_q_proj(folder: Path, changes: Mapping[str, Array]) -> Path:
    """Make a [64, 64] weight int4, and then change tensors by their suffix."""
    packed = {
        "_packed": np.zeros((64, 8), np.int32),
        "_scale": np.ones((64, 2), BF16),
        "_shape": np.array([64, 64], np.int64),
        **changes,
    }
    name = Q_PROJ + ".weight"
    add = {name + suffix: tensor for suffix, tensor in packed.items()}
    return rewrite(folder, remove=[name], add=add)


def test_packed_weights_load(tmp_path: Path) -> None:
    folder = pack_q_proj(make_checkpoint(tmp_path, "e2b"), {})
    q_rows = jnp.asarray(load(folder).params.layers[0].qkv_OD)[:64]
    np.testing.assert_array_equal(q_rows, np.full((64, 64), -8.0))


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        ("_packed", np.zeros((64, 16), np.int32)),  # eight bits
        ("_packed", np.zeros((64, 8), np.int64)),
        ("_scale", np.zeros((64, 1), BF16)),  # a group of 64
        ("_scale", np.zeros((64, 2), np.int8)),
        ("_shape", np.array([64, 63], np.int64)),
        ("_zero_point", np.zeros((64, 2), np.int32)),
        ("_g_idx", np.zeros(64, np.int32)),
    ],
)
def test_other_packed_forms_are_refused(suffix: str, tensor: Array, tmp_path: Path) -> None:
    folder = pack_q_proj(make_checkpoint(tmp_path, "e2b"), {suffix: tensor})
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("size", [0, 4, 1000, -100])
def test_a_truncated_file_is_named(size: int, tmp_path: Path) -> None:
    file = make_checkpoint(tmp_path, "gemma3") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path, "gemma3") / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00002-of-00003"):
        load(folder)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(index: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3", shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(folder)


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "e2b")
    calls: list[tuple[int, ...]] = []
    loaded = load_params(
        folder, load_config(folder), jnp.float32, progress=lambda *call: calls.append(call)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (loaded.num_bytes, loaded.num_bytes)
    assert loaded.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))


def test_exports_of_one_model_have_one_structure() -> None:
    folders = [DATA / "checkpoints" / f"gemma4-e2b{form}" for form in ("", "-q4_0", "-w4a16")]
    structures = {jax.tree.structure(load(folder).params) for folder in folders}
    assert len(structures) == 1


PEAK = """
import resource, sys
from pathlib import Path
import jax
from jaxserve.models.registry import load_config
from jaxserve.models.weights import load_params
folder = Path(sys.argv[1])
jax.block_until_ready(jax.numpy.zeros(1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded = load_params(folder, load_config(folder), "float32", progress=lambda done, total: None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
largest = max(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
print(loaded.num_bytes, largest, 1024 * (peak - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_peak_memory_is_the_weights_and_the_largest_leaf(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    D, F, V = 1024, 4096, 8192
    shapes = {
        "embed_tokens": (V, D),
        "gate_proj": (F, D),
        "up_proj": (F, D),
        "down_proj": (D, F),
        "q_proj": (64, D),
        "k_proj": (16, D),
        "v_proj": (16, D),
        "o_proj": (D, 64),
    }
    tensors: dict[str, Array] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        shape: tuple[int, ...] = shapes.get(name.split(".")[-2], tensor.shape)
        tensors[name] = np.zeros((D,) if shape == (64,) else shape, BF16)
    save_tensors(folder, tensors)
    command = [sys.executable, "-c", PEAK, str(folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    num_bytes, largest, peak = map(int, output.split())
    assert num_bytes > 200e6
    # A set of weights held twice would reach twice num_bytes.
    assert peak < num_bytes + largest + 40e6

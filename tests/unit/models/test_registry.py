"""What config.json must say to be served, and what it is read as."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import end_token_ids, load_config
from tests.checkpoints import Kind, config_json, write_json_files


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    write_json_files(folder, config)
    return load_config(folder)


def edited(kind: Kind, **changes: Any) -> dict[str, Any]:
    """Change fields of the text model; a value of ... removes the field."""
    config = config_json(kind)
    text = config.get("text_config", config)
    for key, value in changes.items():
        if value is ...:
            del text[key]
        else:
            text[key] = value
    return config


def test_gemma4_geometry(tmp_path: Path) -> None:
    config = load(tmp_path, config_json("e2b"))
    assert [layer.head_dim for layer in config.layers] == [16, 16, 32, 16, 16, 32]
    assert [layer.mlp_dim for layer in config.layers] == [96, 96, 96, 192, 192, 192]
    assert [layer.kv_source for layer in config.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.rope.num_pairs for layer in config.layers[:3]] == [8, 8, 4]
    assert config.attention_scale == 1.0
    assert config.ple_dim == 32
    assert config.logit_softcap == 30.0
    assert config.placeholder_token_ids == {1019, 1020, 1023}


def test_shared_layers_read_the_last_owner_of_their_kind(tmp_path: Path) -> None:
    config = load(tmp_path, config_json("e4b"))
    assert [layer.kv_source for layer in config.layers] == [0, 1, 2, 3, 3, 3, 2]
    assert config.kv_owners == (0, 1, 2, 3)


def test_dense_full_layers_have_no_values_of_their_own(tmp_path: Path) -> None:
    config = load(tmp_path, config_json("dense"))
    assert [layer.has_v_proj for layer in config.layers] == [True, True, False]
    assert [layer.num_kv_heads for layer in config.layers] == [2, 2, 1]
    assert config.ple_dim == 0


def test_per_layer_config_means_the_same_as_flat_fields(tmp_path: Path) -> None:
    for kind, override in (
        ("e2b", {"head_dim": 32}),
        ("dense", {"head_dim": 32, "num_key_value_heads": 1}),
    ):
        flat = load(tmp_path, config_json(kind))  # type: ignore[arg-type]
        config = config_json(kind)  # type: ignore[arg-type]
        text = config["text_config"]
        del text["global_head_dim"], text["num_global_key_value_heads"]
        full = [i for i, layer in enumerate(flat.layers) if layer.kind == "full"]
        text["per_layer_config"] = {f"{i:02}": override for i in full}
        assert load(tmp_path, config) == flat


def test_absent_ple_keys_mean_none(tmp_path: Path) -> None:
    absent = edited("dense", hidden_size_per_layer_input=..., vocab_size_per_layer_input=...)
    assert load(tmp_path, absent) == load(tmp_path / "zero", config_json("dense"))


def test_global_kv_heads_count_only_where_keys_serve_as_values(tmp_path: Path) -> None:
    config = load(tmp_path, edited("e2b", num_global_key_value_heads=4))
    assert {layer.num_kv_heads for layer in config.layers} == {1}


def test_a_text_model_alone_is_read_too(tmp_path: Path) -> None:
    config = load(tmp_path, config_json("e2b")["text_config"])
    assert config.placeholder_token_ids == frozenset()
    assert config.num_layers == 6


def test_unified_wrapper(tmp_path: Path) -> None:
    config = edited("dense", model_type="gemma4_unified_text")
    config["model_type"] = "gemma4_unified"
    assert load(tmp_path, config).model_type == "gemma4_unified_text"


def test_gemma3_geometry(tmp_path: Path) -> None:
    config = load(tmp_path, config_json("gemma3"))
    assert [layer.kind for layer in config.layers] == ["sliding", "sliding", "full", "sliding"]
    assert [layer.rope.theta for layer in config.layers] == [1e4, 1e4, 1e6, 1e4]
    assert config.attention_scale == 0.25
    assert not config.has_v_norm
    assert config.logit_softcap is None


def test_gemma3_newer_spelling_means_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = load(tmp_path, edited("gemma3", rope_scaling=scaling))
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = edited("gemma3", rope_theta=..., rope_local_base_freq=..., rope_parameters=rope)
    assert load(tmp_path, new) == old
    assert [layer.rope.factor for layer in old.layers] == [1, 1, 8, 1]


def test_gemma3_older_pattern_of_layers(tmp_path: Path) -> None:
    config = load(tmp_path, edited("gemma3", layer_types=..., sliding_window_pattern=2))
    assert [layer.kind for layer in config.layers] == ["sliding", "full", "sliding", "full"]


SHAPE_FIELDS: list[tuple[Kind, str]] = [
    *(
        (kind, key)
        for kind in ("gemma3", "e2b")
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "layer_types",
            "sliding_window",
            "rms_norm_eps",
            "max_position_embeddings",
        )
    ),
    *(("gemma3", key) for key in ("query_pre_attn_scalar", "rope_theta", "rope_local_base_freq")),
    *(
        ("e2b", key)
        for key in (
            "global_head_dim",
            "num_kv_shared_layers",
            "use_double_wide_mlp",
            "attention_k_eq_v",
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
            "final_logit_softcapping",
            "rope_parameters",
        )
    ),
]


@pytest.mark.parametrize(("kind", "key"), SHAPE_FIELDS)
def test_a_missing_field_is_named_and_never_defaulted(kind: Kind, key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"\b{key} is absent"):
        load(tmp_path, edited(kind, **{key: ...}))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("e2b", "enable_moe_block", True),
        ("e2b", "num_experts", 128),
        ("e2b", "attention_bias", True),
        ("e2b", "hidden_activation", "silu"),
        ("e2b", "use_bidirectional_attention", "all"),
        ("e2b", "use_bidirectional_attention", True),
        ("e2b", "tie_word_embeddings", False),
        ("e2b", "num_kv_shared_layers", 4),
        ("e2b", "num_kv_shared_layers", 7),
        ("e2b", "head_dim", "16"),
        ("e2b", "vocab_size", True),
        ("e2b", "layer_types", ["full_attention"]),
        ("e2b", "rms_norm_eps", 0),
        ("e2b", "per_layer_config", {"2": {"intermediate_size": 4}}),
        ("e2b", "per_layer_config", {"two": {}}),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    kind: Kind, key: str, value: object, tmp_path: Path
) -> None:
    inner = next(iter(value), key) if isinstance(value, dict) else key
    with pytest.raises(ModelLoadError, match=rf"\b({key}|{inner})\b"):
        load(tmp_path, edited(kind, **{key: value}))


def test_an_unknown_rope_type_is_refused(tmp_path: Path) -> None:
    config = config_json("e2b")
    config["text_config"]["rope_parameters"]["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(ModelLoadError, match='full_attention: rope_type is "yarn"'):
        load(tmp_path, config)


def test_the_wrapper_must_tie_its_embeddings_too(tmp_path: Path) -> None:
    config = {**config_json("e2b"), "tie_word_embeddings": False}
    with pytest.raises(ModelLoadError, match="tie_word_embeddings is false"):
        load(tmp_path, config)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="4 query heads, 3 key heads"):
        load(tmp_path, edited("e2b", num_key_value_heads=3))


@pytest.mark.parametrize(
    ("override", "message"),
    [({"head_dim": 64}, "full layers differ"), ({"num_key_value_heads": 2}, "layer 2, whose")],
)
def test_layers_of_a_kind_must_be_alike(
    override: dict[str, int], message: str, tmp_path: Path
) -> None:
    per_layer = {"2": {"head_dim": 32}, "5": {"head_dim": 32, **override}}
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, edited("e2b", per_layer_config=per_layer))


def test_an_unknown_model_is_refused_with_what_is_served(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r'model_type is "llama".*gemma3_text.*gemma4'):
        load(tmp_path, {**config_json("gemma3"), "model_type": "llama"})


def test_a_text_model_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="model_type"):
        load(tmp_path, edited("e2b", model_type="gemma3_text"))


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_an_unreadable_config_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)


def write_end_ids(folder: Path, edit: Callable[[dict[str, Any]], None], generation: object) -> None:
    config = config_json("e2b")
    edit(config)
    write_json_files(folder, config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))


def test_end_ids_are_those_of_every_file(tmp_path: Path) -> None:
    write_end_ids(tmp_path, lambda config: config.update(eos_token_id=106), [1, 50])
    assert end_token_ids(tmp_path) == {1, 50, 106}


def test_end_ids_without_generation_config(tmp_path: Path) -> None:
    write_json_files(tmp_path, config_json("gemma3"))
    (tmp_path / "generation_config.json").unlink()
    assert end_token_ids(tmp_path) == {1, 106}


@pytest.mark.parametrize("bad", [1024, -1, "1", [1, None], 1.0, True])
def test_an_end_id_outside_the_vocabulary_is_refused(bad: object, tmp_path: Path) -> None:
    write_end_ids(tmp_path, lambda config: None, bad)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        end_token_ids(tmp_path)


def test_a_model_without_end_ids_is_refused(tmp_path: Path) -> None:
    def remove(config: dict[str, Any]) -> None:
        del config["eos_token_id"], config["text_config"]["eos_token_id"]

    write_end_ids(tmp_path, remove, None)
    with pytest.raises(ModelLoadError, match="eos_token_id is absent"):
        end_token_ids(tmp_path)

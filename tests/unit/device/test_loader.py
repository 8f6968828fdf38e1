"""What is refused before any weight is read: the folders here have none."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve.device.choices import LoadOptions
from jaxserve.device.loader import load_model
from jaxserve.errors import ConfigError
from tests.checkpoints import config_json, write_json_files


def options_of(**changed: Any) -> LoadOptions:
    options: dict[str, Any] = {
        "dtype": "float32",
        "weights": "auto",
        "ple_dtype": "auto",
        "kv_dtype": "auto",
        "max_model_len": None,
        "max_batch": 2,
        "kv_cache_bytes": None,
        "tokens_per_resume_point": 64,
    }
    return LoadOptions(**(options | changed))


@pytest.mark.parametrize(
    ("max_model_len", "kv_cache_bytes", "kv_dtype", "message"),
    [
        (4097, None, "auto", "--max-model-len 4097 exceeds the model's 4096 positions"),
        # 4 layers, 32 tokens, 16 channels of keys and 16 of values, 4 bytes each.
        (
            None,
            32767,
            "auto",
            "--kv-cache-bytes 32767 holds no page.* of both kinds is 16384 bytes, and two",
        ),
        (None, 16383, "bf16", "both kinds is 8192 bytes"),
        # A word for a key's and a value's channel, and 128 scales of 4 bytes a layer.
        (None, 12287, "int8", "both kinds is 6144 bytes"),
    ],
)
def test_what_no_weights_could_make_fit(
    tmp_path: Path,
    max_model_len: int | None,
    kv_cache_bytes: int | None,
    kv_dtype: str,
    message: str,
) -> None:
    write_json_files(tmp_path, config_json("gemma3"))
    options = options_of(
        max_model_len=max_model_len, kv_cache_bytes=kv_cache_bytes, kv_dtype=kv_dtype
    )
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, options, lambda phase, done, total: None)


def test_attention_kernels_need_a_tpu(tmp_path: Path) -> None:
    write_json_files(tmp_path, config_json("gemma3"))
    with pytest.raises(ConfigError, match="--attention pallas needs a TPU; here is a cpu"):
        load_model(tmp_path, options_of(attention="pallas"), lambda phase, done, total: None)

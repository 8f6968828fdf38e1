"""Reading the head of a GGUF file."""

import struct
from pathlib import Path

import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.hub.gguf_file import read_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def gguf_bytes(fields: list[bytes], tensors: list[bytes] | None = None, version: int = 3) -> bytes:
    tensors = tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    return head + b"".join(fields) + b"".join(tensors)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(data)
    return path


def test_fields_of_every_shape(tmp_path: Path) -> None:
    fields = [
        field("count", 4, struct.pack("<I", 7)),
        field("offset", 5, struct.pack("<i", -7)),
        field("big", 10, struct.pack("<Q", 1 << 40)),
        field("scale", 6, struct.pack("<f", 0.5)),
        field("flag", 7, b"\x01"),
        field("name", 8, string("gemma ▁")),
        field("scores", 9, struct.pack("<IQff", 6, 2, 1.0, -2.0)),
        field("tokens", 9, struct.pack("<IQ", 8, 2) + string("a") + string("")),
    ]
    assert read_gguf(write(tmp_path, gguf_bytes(fields))).fields == {
        "count": 7,
        "offset": -7,
        "big": 1 << 40,
        "scale": 0.5,
        "flag": True,
        "name": "gemma ▁",
        "scores": [1.0, -2.0],
        "tokens": ["a", ""],
    }


@pytest.mark.parametrize("alignment", [32, 64])
def test_tensors_lie_behind_the_head_aligned(tmp_path: Path, alignment: int) -> None:
    fields = [field("general.alignment", 4, struct.pack("<I", alignment))]
    tensors = [
        string("first") + struct.pack("<IQQIQ", 2, 640, 3, 8, 0),
        string("second") + struct.pack("<IQIQ", 1, 5, 0, 4096),
    ]
    data = gguf_bytes(fields, tensors)
    start = -(-len(data) // alignment) * alignment
    read = read_gguf(write(tmp_path, data)).tensors
    assert list(read) == ["first", "second"]
    assert (read["first"].shape, read["first"].quantization) == ((3, 640), 8)
    assert (read["second"].shape, read["second"].quantization) == ((5,), 0)
    assert [read["first"].offset, read["second"].offset] == [start, start + 4096]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(20), "not a GGUF file"),
        (gguf_bytes([], version=1), "not a GGUF file"),
        (gguf_bytes([field("name", 8, string("gemma"))])[:-1], "ends before"),
        (gguf_bytes([field("name", 99, b"")]), "unknown type 99"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_gguf(write(tmp_path, data))

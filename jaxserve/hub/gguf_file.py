"""Read a GGUF file's fields and where its tensors lie, without touching the tensors.

The format only: what the fields mean is the caller's. (The `gguf` package's own reader makes array
views of every vocabulary entry, which takes half a minute and a GB of memory.) Any thread.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Value types by the format's numbers; 8 is a string, 9 an array.
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: slowest axis first (the file lists the fastest first).
        quantization: the format's number of the tensor's encoding.
        offset: bytes from the start of the file.
    """

    shape: tuple[int, ...]
    quantization: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A file's fields by name, and its tensors by name in the file's order."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a GGUF file.

    Raises:
        ModelLoadError: it is not a little-endian GGUF file of a known version.
    """
    with path.open("rb") as file:
        # A memory map: only the pages of the head are read.
        cursor = _Cursor(np.memmap(file, mode="r").data, path)
        if cursor.take(4) != _MAGIC or cursor.scalar(4) not in _VERSIONS:
            raise ModelLoadError(
                f"{path} is not a GGUF file of a version that is known here ({_VERSIONS})"
            )
        num_tensors, num_fields = cursor.scalar(10), cursor.scalar(10)
        fields = {cursor.string(): cursor.value(cursor.scalar(4)) for _ in range(num_fields)}
        heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: GgufTensor(shape=shape, quantization=quantization, offset=start + offset)
        for name, shape, quantization, offset in heads
    }
    return GgufFile(path=path, fields=fields, tensors=tensors)


def _tensor_head(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name, num_axes = cursor.string(), cursor.scalar(4)
    axes = [cursor.scalar(10) for _ in range(num_axes)]
    return name, tuple(reversed(axes)), cursor.scalar(4), cursor.scalar(10)


class _Cursor:
    """A position in the file's bytes, advanced by each read."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0

    def take(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self._data):
            raise ModelLoadError(f"{self._path} ends before its head does")
        taken = bytes(self._data[self.offset : end])
        self.offset = end
        return taken

    def scalar(self, kind: int) -> Any:
        return self._scalars(kind, 1)[0]

    def string(self) -> str:
        (size,) = struct.unpack("<Q", self.take(8))
        return self.take(size).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(kind)
        item_kind, length = self.scalar(4), self.scalar(10)
        if item_kind in _SCALARS:
            return self._scalars(item_kind, length)
        return [self.value(item_kind) for _ in range(length)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self._path} holds a value of the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values

"""The tensors of a checkpoint folder: where they lie, which are packed, and reading them.

It decides by the tensors that exist: under which prefix the text model lies, and which weights are
packed to int4. Towers, the tied head and the K/V side of layers that only read a cache are left on
disk. It knows sources, not the leaves that they make up.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from jaxserve.errors import ModelLoadError
from jaxserve.models import quantization
from jaxserve.models.config import ModelConfig
from jaxserve.models.fields import Fields
from jaxserve.models.specs import ParamSpec, Source

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_ANCHOR = "embed_tokens.weight"
_TOWERS = {"vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector"}
_KV_SIDE = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.\w+")
_BLOCK_BYTES = 16 << 20
_FLOATS = ("BF16", "F16", "F32")
_PACKED_DTYPES = (("I32",), _FLOATS, ("I64",))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """Where a tensor lies, and what its header says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class OpenSources:
    """Sources of a leaf whose files are open."""

    def __init__(self, slices: dict[str, list[Any]]) -> None:
        self._slices = slices

    def copy(self, source: Source, part: npt.NDArray[Any]) -> None:
        """Write a source's values into an array of its shape; packed ones are unpacked."""
        if len(self._slices[source.name]) > 1:
            words, steps = self.packed(source)
            part[...] = quantization.unpack_int4(words, steps)
            return
        # By blocks of rows: a whole tensor would lie in memory twice meanwhile.
        step = max(1, _BLOCK_BYTES * len(part) // part.nbytes)
        for start in range(0, len(part), step):
            stop = min(start + step, len(part))
            part[start:stop] = self.rows(source, start, stop)

    def rows(self, source: Source, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows [start, stop) of a source that is not packed, as stored."""
        rows: npt.NDArray[Any] = self._slices[source.name][0][start:stop]
        return rows

    def packed(self, source: Source) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        """Read a packed source's words and steps."""
        words, steps, shape = (values[:] for values in self._slices[source.name])
        if tuple(shape.tolist()) != source.shape:
            raise ModelLoadError(
                f"the packed {source.name} says {shape.tolist()}, but {list(source.shape)} is"
                " needed"
            )
        return words, steps


class Checkpoint:
    """The tensors of a folder. Files are open for one leaf only: a mapping counts as memory."""

    def __init__(self, folder: Path) -> None:
        self._tensors = dict(entry for file in _find_files(folder) for entry in _scan(file))
        prefixes = [prefix for prefix in _PREFIXES if prefix + _ANCHOR in self._tensors]
        if len(prefixes) != 1:
            raise ModelLoadError(
                f"{folder}: {_ANCHOR} must lie under one of the prefixes "
                f"{', '.join(map(repr, _PREFIXES))}, but lies under {len(prefixes)} of them"
            )
        self._prefix = prefixes[0]

    def check(self, specs: Iterable[ParamSpec]) -> None:
        """Refuse an absent tensor, or one of the wrong shape or type, before anything is read."""
        for source in (source for spec in specs for source in spec.sources):
            stored = self._stored(source)
            if len(stored) == 1:
                self._expect(stored[0], source.shape, _FLOATS)
                continue
            module = stored[0].removesuffix("_packed")
            for extra in ("_zero_point", "_g_idx"):
                if module + extra in self._tensors:
                    raise ModelLoadError(f"tensor {module}{extra}: int4 with it is not served")
            shapes = quantization.stored_shapes(*source.shape)
            for name, shape, dtypes in zip(stored, shapes, _PACKED_DTYPES, strict=True):
                self._expect(name, shape, dtypes)

    def is_packed(self, source: Source) -> bool:
        """Say whether a source is stored as int4 words."""
        return len(self._stored(source)) > 1

    @contextlib.contextmanager
    def open(self, sources: Iterable[Source]) -> Iterator[OpenSources]:
        """Open the files of some sources."""
        stored = {source.name: self._stored(source) for source in sources}
        with contextlib.ExitStack() as stack:
            paths = {self._tensors[name].file for names in stored.values() for name in names}
            files = {path: stack.enter_context(_open(path)) for path in paths}
            yield OpenSources(
                {
                    source: [files[self._tensors[name].file].get_slice(name) for name in names]
                    for source, names in stored.items()
                }
            )

    def unused(self, specs: Iterable[ParamSpec], config: ModelConfig) -> tuple[str, ...]:
        """List what nothing reads, apart from what is left out on purpose."""
        used = {name for spec in specs for source in spec.sources for name in self._stored(source)}
        rest = sorted(self._tensors.keys() - used)
        return tuple(name for name in rest if not self._is_left_out(name, config))

    def _is_left_out(self, name: str, config: ModelConfig) -> bool:
        """Towers, the tied head, and the K/V side of a layer that reads another one's cache."""
        if dead := _KV_SIDE.fullmatch(name.removeprefix(self._prefix)):
            i = int(dead[1])
            return i < config.num_layers and config.layers[i].kv_source != i
        return not (_TOWERS | {"lm_head"}).isdisjoint(name.split("."))

    def _stored(self, source: Source) -> tuple[str, ...]:
        """Name the tensors that make up a weight: itself, or its packed words, steps and shape."""
        name = self._prefix + source.name
        module = name.removesuffix(".weight")
        packed = tuple(module + suffix for suffix in quantization.SUFFIXES)
        if len(source.shape) == 2 and name not in self._tensors and packed[0] in self._tensors:
            return packed
        return (name,)

    def _expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            module = name.removesuffix("weight")
            near = sorted(other for other in self._tensors if other.startswith(module))
            hint = f"; the checkpoint has {', '.join(near)}" if near else ""
            raise ModelLoadError(f"tensor {name} of shape {list(shape)} is missing{hint}")
        if tensor.shape != shape:
            raise ModelLoadError(
                f"tensor {name} has the shape {list(tensor.shape)}, but {list(shape)} is needed"
            )
        if tensor.dtype not in dtypes:
            raise ModelLoadError(
                f"tensor {name} is of type {tensor.dtype}; served are {', '.join(dtypes)}"
            )


def _find_files(folder: Path) -> list[Path]:
    """Find the shards that the index names, or the single file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    weight_map = Fields.read(index).child("weight_map")
    return [folder / name for name in sorted({weight_map.text(key) for key in weight_map})]


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        # Of a file that it may not open, safetensors says that it is not there.
        is_closed = file.exists() and not os.access(file, os.R_OK)
        reason = f"user {os.getuid()} may not" if is_closed else error
        raise ModelLoadError(f"cannot read {file}: {reason}") from error


def _scan(file: Path) -> Iterator[tuple[str, _Tensor]]:
    with _open(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            header = opened.get_slice(name)
            shape = tuple(header.get_shape())
            yield name, _Tensor(file=file, dtype=header.get_dtype(), shape=shape)

"""Checkpoint folders: from safetensors to Params.

One leaf at a time, the largest first, so that the host holds the weights and little more than the
largest tensor. It chooses which leaves are packed. Runs before the engine starts.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxserve.errors import ModelLoadError
from jaxserve.kernels.int4_matrix import GROUP, Int4Matrix, pack
from jaxserve.models.checkpoint import Checkpoint, OpenSources
from jaxserve.models.config import ModelConfig
from jaxserve.models.int4_table import Int4Table, pack_rows
from jaxserve.models.int8_table import Int8Table, round_rows
from jaxserve.models.params import Params
from jaxserve.models.quantization import fit_grid, stored_levels
from jaxserve.models.specs import (
    PACKED_FORMS,
    PackedForm,
    ParamSpec,
    Source,
    Use,
    build_params,
    param_specs,
    place,
)

logger = logging.getLogger(__name__)

Int4 = Literal["never", "if_stored", "always"]
"""Which leaves stay int4: those that the checkpoint holds so, packed or as values on a grid, or
all. Linears that are not so stored cannot be; a table is rounded."""

_BLOCK_VALUES = 1 << 25
"""Values that are packed at a time: 128 MiB in float32."""

_PROBE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParams:
    """A checkpoint's weights, in memory or as shapes.

    Attributes:
        packed_uses: what is packed, as PACKED_FORMS has it.
        unused: names of text tensors that nothing reads, sorted.
        num_bytes: size of all weights in these forms.
        packed_bytes: of them those of packed leaves, by their form.
    """

    params: Params
    packed_uses: frozenset[Use]
    unused: tuple[str, ...]
    num_bytes: int
    packed_bytes: Mapping[PackedForm, int]

    @property
    def packed(self) -> tuple[str, ...]:
        """Each packed use and its form, such as "linear int4", sorted."""
        return tuple(f"{use} {PACKED_FORMS[use]}" for use in sorted(self.packed_uses))


class CheckpointParams:
    """The weights of a folder in the forms that were chosen for them: to be loaded, or as shapes.

    Opening it reads headers, and of checkpoints whose int4 is not packed some rows; what does not
    fit the config raises ModelLoadError. Matrices are of `dtype`, unless they are packed.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: DTypeLike,
        *,
        linears: Int4 = "never",
        ple_table: Int4 = "never",
        int8_embedding: bool = False,
    ) -> None:
        self._checkpoint, self._config, self._dtype = Checkpoint(folder), config, dtype
        self._specs = param_specs(config)
        self._checkpoint.check(self._specs)
        self._uses = _choose_int4(self._checkpoint, self._specs, linears, ple_table)
        if int8_embedding:
            self._uses |= {"embedding"}
        self._is_packed = {
            spec.path: _is_packed(self._checkpoint, spec, self._uses) for spec in self._specs
        }
        self._size = {
            spec.path: spec.num_bytes(dtype, is_packed=self._is_packed[spec.path])
            for spec in self._specs
        }

    def load(self, progress: Callable[[int, int], None]) -> LoadedParams:
        """Load them; `progress` is called after each leaf with the bytes done and the total."""
        total, done = sum(self._size.values()), 0

        def make(spec: ParamSpec) -> Any:
            nonlocal done
            leaf = self._leaf(spec)
            done += self._size[spec.path]
            progress(done, total)
            return leaf

        return self._params(make)

    def describe(self) -> LoadedParams:
        """Return them with jax.ShapeDtypeStruct for arrays."""
        return self._params(
            lambda spec: spec.abstract(self._dtype, is_packed=self._is_packed[spec.path])
        )

    def _leaf(self, spec: ParamSpec) -> Any:
        with self._checkpoint.open(spec.sources) as stored:
            if not self._is_packed[spec.path]:
                return _dense(spec, self._dtype, stored)
            if spec.use == "embedding":
                return _int8_table(spec, self._dtype, stored)
            if spec.use == "linear":
                return _int4_matrix(self._checkpoint, spec, stored)
            return _int4_table(spec, stored)

    def _params(self, make: Callable[[ParamSpec], Any]) -> LoadedParams:
        size = self._size
        params = build_params(sorted(self._specs, key=lambda spec: -size[spec.path]), make)
        unused = self._checkpoint.unused(self._specs, self._config)
        if unused:
            logger.warning(
                "%d unused tensors in the checkpoint, such as %s", len(unused), unused[0]
            )
        packed_bytes: dict[PackedForm, int] = dict.fromkeys(PACKED_FORMS.values(), 0)
        for spec in self._specs:
            if self._is_packed[spec.path]:
                packed_bytes[PACKED_FORMS[spec.use]] += size[spec.path]
        return LoadedParams(
            params=params,
            packed_uses=self._uses,
            unused=unused,
            num_bytes=sum(size.values()),
            packed_bytes=packed_bytes,
        )


def load_params(
    folder: Path,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    progress: Callable[[int, int], None],
    linears: Int4 = "never",
    ple_table: Int4 = "never",
    int8_embedding: bool = False,
) -> LoadedParams:
    """Load the folder's weights, as CheckpointParams does."""
    source = CheckpointParams(
        folder,
        config,
        dtype,
        linears=linears,
        ple_table=ple_table,
        int8_embedding=int8_embedding,
    )
    return source.load(progress)


def _choose_int4(
    checkpoint: Checkpoint, specs: tuple[ParamSpec, ...], linears: Int4, ple_table: Int4
) -> frozenset[Use]:
    """Choose the uses whose leaves are int4, by the first weight of each that is not packed."""
    uses: set[Use] = set()
    sources = [source for spec in specs if spec.use == "linear" for source in spec.sources]
    if linears == "always" or (linears == "if_stored" and _is_stored_int4(checkpoint, sources)):
        uses.add("linear")
    tables = [spec.sources[0] for spec in specs if spec.use == "ple_table"]
    if ple_table == "always" and not tables:
        raise ModelLoadError("--ple-dtype int4: this model has no per-layer embeddings")
    if ple_table == "always" or (
        ple_table == "if_stored" and tables and _is_stored_int4(checkpoint, tables)
    ):
        uses.add("ple_table")
    return frozenset(uses)


def _is_stored_int4(checkpoint: Checkpoint, sources: list[Source]) -> bool:
    """Say whether some are packed, or else whether the first one's first rows lie on a grid."""
    if any(checkpoint.is_packed(source) for source in sources):
        return True
    with checkpoint.open(sources[:1]) as stored:
        rows = stored.rows(sources[0], 0, _PROBE_ROWS)
    return bool(fit_grid(jnp.asarray(rows)).fits_RG.all())


def _is_packed(checkpoint: Checkpoint, spec: ParamSpec, uses: frozenset[Use]) -> bool:
    """Say whether a leaf is; a linear of which a packed checkpoint leaves a part dense is not."""
    if spec.use not in uses:
        return False
    num_packed = sum(checkpoint.is_packed(source) for source in spec.sources)
    return spec.use != "linear" or num_packed in (0, len(spec.sources))


def _dense(spec: ParamSpec, dtype: DTypeLike, stored: OpenSources) -> jax.Array:
    def fill(source: Source, part: npt.NDArray[Any]) -> None:
        stored.copy(source, part)
        if spec.offset:
            part += np.float32(spec.offset)

    return place(spec.shape, spec.dtype(dtype), spec, fill)


def _int4_matrix(checkpoint: Checkpoint, spec: ParamSpec, stored: OpenSources) -> Int4Matrix:
    """Pack a leaf's sources, one below another; the device has it on return."""
    levels, steps = [], []
    for source in spec.sources:
        if checkpoint.is_packed(source):
            words, step = stored.packed(source)
            levels.append(jnp.asarray(stored_levels(words)))
            steps.append(jnp.asarray(step).astype(jnp.bfloat16))
            continue
        num_misfits = 0
        for _, fitted in _fitted(source, stored):
            levels.append(fitted.levels_RI)
            steps.append(fitted.steps_RG)
            num_misfits += int((~fitted.fits_RG).sum())
        if num_misfits:
            raise ModelLoadError(
                f"tensor {source.name} is not int4: {_misfits(source, num_misfits)}; --weights bf16"
                " serves it as it is"
            )
    packed: Int4Matrix = jax.block_until_ready(_pack(levels, steps))
    return packed


@jax.jit
def _pack(levels: list[jax.Array], steps: list[jax.Array]) -> Int4Matrix:
    return pack(jnp.concatenate(levels), jnp.concatenate(steps))


def _misfits(source: Source, count: int) -> str:
    num_groups = source.shape[0] * source.shape[1] // GROUP
    return f"{count} of its {num_groups} groups of {GROUP} lie on no grid of 16 levels"


def _int4_table(spec: ParamSpec, stored: OpenSources) -> Int4Table:
    """Pack a table; groups on no grid are rounded to one, and counted in the log."""
    (source,) = spec.sources
    num_misfits = 0
    leaf = spec.abstract(np.float32, is_packed=True)

    def fill(source: Source, part: npt.NDArray[Any]) -> None:
        nonlocal num_misfits
        for start, fitted in _fitted(source, stored):
            rows = np.asarray(pack_rows(fitted.levels_RI, fitted.steps_RG))
            part[start : start + len(rows)] = rows
            num_misfits += int((~fitted.fits_RG).sum())

    table = place(leaf.rows_VW.shape, leaf.rows_VW.dtype, spec, fill)
    if num_misfits:
        logger.warning("%s was rounded to int4: %s", source.name, _misfits(source, num_misfits))
    return Int4Table(rows_VW=table, num_columns=leaf.num_columns)


def _int8_table(spec: ParamSpec, dtype: DTypeLike, stored: OpenSources) -> Int8Table:
    """Round a table to int8, row by row."""
    leaf = spec.abstract(dtype, is_packed=True)
    scale_V = np.empty(leaf.scale_V.shape, leaf.scale_V.dtype)

    def fill(source: Source, part: npt.NDArray[Any]) -> None:
        for start, rows in _blocks(source, stored):
            stop = start + len(rows)
            part[start:stop], scale_V[start:stop] = round_rows(rows)

    levels_VD = place(leaf.levels_VD.shape, leaf.levels_VD.dtype, spec, fill)
    return Int8Table(levels_VD=levels_VD, scale_V=jax.device_put(scale_V), dtype=leaf.dtype)


def _fitted(source: Source, stored: OpenSources) -> Iterator[tuple[int, Any]]:
    """Fit a source to its grid, by blocks of rows; yields their first row as well."""
    for start, rows in _blocks(source, stored):
        yield start, fit_grid(jnp.asarray(rows))


def _blocks(source: Source, stored: OpenSources) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Read a source by blocks of rows of few shapes; yields their first row as well."""
    num_rows, num_columns = source.shape
    step = max(1, _BLOCK_VALUES // num_columns)
    for start in range(0, num_rows, step):
        yield start, stored.rows(source, start, min(start + step, num_rows))

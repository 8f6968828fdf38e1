"""Checkpoint folders: from safetensors to Params.

One leaf at a time, the largest first, so that the host holds the weights and little more than the
largest tensor. It chooses which leaves stay int4. Runs before the engine starts.
"""

import logging
from collections.abc import Callable, Iterator
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
from jaxserve.models.params import Params
from jaxserve.models.quantization import fit_grid, stored_levels
from jaxserve.models.specs import ParamSpec, Source, Use, build_params, param_specs, place

logger = logging.getLogger(__name__)

Int4 = Literal["never", "if_stored", "always"]
"""Which leaves stay int4: those that the checkpoint holds so, packed or as values on a grid, or
all. Linears that are not so stored cannot be; a table is rounded."""

_FIT_VALUES = 1 << 25
"""Values that are fitted to their grid at a time: 128 MiB in float32."""

_PROBE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParams:
    """A checkpoint in memory.

    Attributes:
        int4_uses: what is int4.
        unused: names of text tensors that nothing reads, sorted.
        num_bytes: size of the weights as loaded.
        int4_bytes: of them those of int4 leaves.
    """

    params: Params
    int4_uses: frozenset[Use]
    unused: tuple[str, ...]
    num_bytes: int
    int4_bytes: int


def load_params(
    folder: Path,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    progress: Callable[[int, int], None],
    linears: Int4 = "never",
    ple_table: Int4 = "never",
) -> LoadedParams:
    """Load the folder's weights, matrices in `dtype` or int4; what does not fit: ModelLoadError.

    `progress` is called after each leaf with the bytes done and the total.
    """
    checkpoint = Checkpoint(folder)
    specs = param_specs(config)
    checkpoint.check(specs)
    uses = _choose_int4(checkpoint, specs, linears, ple_table)
    is_int4 = {spec.path: _stays_int4(checkpoint, spec, uses) for spec in specs}
    size = {spec.path: spec.num_bytes(dtype, is_int4=is_int4[spec.path]) for spec in specs}
    total, done = sum(size.values()), 0

    def make(spec: ParamSpec) -> Any:
        nonlocal done
        with checkpoint.open(spec.sources) as stored:
            if not is_int4[spec.path]:
                leaf: Any = _dense(spec, dtype, stored)
            elif spec.use == "linear":
                leaf = _int4_matrix(checkpoint, spec, stored)
            else:
                leaf = _int4_table(spec, stored)
        done += size[spec.path]
        progress(done, total)
        return leaf

    params = build_params(sorted(specs, key=lambda spec: -size[spec.path]), make)
    unused = checkpoint.unused(specs, config)
    if unused:
        logger.warning("%d unused tensors in the checkpoint, such as %s", len(unused), unused[0])
    return LoadedParams(
        params=params,
        int4_uses=uses,
        unused=unused,
        num_bytes=total,
        int4_bytes=sum(size[path] for path, is_packed in is_int4.items() if is_packed),
    )


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


def _stays_int4(checkpoint: Checkpoint, spec: ParamSpec, uses: frozenset[Use]) -> bool:
    """Say whether a leaf is int4; one of which a packed checkpoint leaves a part dense is not."""
    if spec.use not in uses:
        return False
    num_packed = sum(checkpoint.is_packed(source) for source in spec.sources)
    return spec.use == "ple_table" or num_packed in (0, len(spec.sources))


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
    leaf = spec.abstract(np.float32, is_int4=True)

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


def _fitted(source: Source, stored: OpenSources) -> Iterator[tuple[int, Any]]:
    """Fit a source to its grid, by blocks of rows of few shapes; yields their first row as well."""
    num_rows, num_columns = source.shape
    step = max(1, _FIT_VALUES // num_columns)
    for start in range(0, num_rows, step):
        rows = stored.rows(source, start, min(start + step, num_rows))
        yield start, fit_grid(jnp.asarray(rows))

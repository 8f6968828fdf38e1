"""One description of every weight: loading, random weights and abstract shapes follow from it.

A leaf of Params is an array into which source tensors are placed: whole, one below another, or as
rows of a stack. Both families name their tensors alike, so the names live here; the prefix of the
text model is checkpoint.py's concern. Axis letters as in params.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxserve.kernels.int4_matrix import Int4Matrix, packed_shapes
from jaxserve.models.config import ModelConfig
from jaxserve.models.int4_table import Int4Table, row_size
from jaxserve.models.int8_table import Int8Table
from jaxserve.models.params import LayerParams, Params

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_per_layer_input_norm",
)

Use = Literal["embedding", "linear", "ple_table", "vector"]
"""What a leaf is: token embeddings and head, a layer's or the per-layer inputs' product, the table
of per-layer embeddings, small vectors."""

PackedForm = Literal["int4", "int8"]
PACKED_FORMS: dict[Use, PackedForm] = {"linear": "int4", "ple_table": "int4", "embedding": "int8"}
"""What leaves of a use are where they are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Random values around zero."""

    std: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return a new array of such values."""
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= self.std
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Random values of [low, high), of either sign where `signed`."""

    low: float
    high: float
    signed: bool = False

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return a new array of such values."""
        values = rng.uniform(self.low, self.high, shape).astype(np.float32)
        return values * rng.choice(np.array([-1, 1], np.float32), shape) if self.signed else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of the checkpoint: `at` indexes the part of the leaf that it fills."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int | slice, ...]
    init: Normal | Uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One leaf of Params.

    Attributes:
        path: its attribute path in Params, such as "layers.3.o_DQ".
        fill: what stands where no source lies.
        offset: added to every source in float32; a checkpoint holds the leaf's value less this.
    """

    path: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    use: Use
    fill: float = 0.0
    offset: float = 0.0

    def dtype(self, compute_dtype: DTypeLike) -> np.dtype[Any]:
        """Return the dtype of the leaf, if not packed, in a model that computes in this one."""
        return np.dtype(np.float32 if self.use == "vector" else compute_dtype)

    def abstract(self, compute_dtype: DTypeLike, *, is_packed: bool) -> Any:
        """Return the leaf with jax.ShapeDtypeStruct for arrays."""
        if not is_packed:
            return _abstract(self.shape, self.dtype(compute_dtype))
        if self.use == "linear":
            words, steps = packed_shapes((self.shape[0], self.shape[1]))
            return Int4Matrix(
                words_WO=_abstract(words, np.int32),
                steps_GO=_abstract(steps, jnp.bfloat16),
                shape=(self.shape[0], self.shape[1]),
            )
        if self.use == "embedding":
            return Int8Table(
                levels_VD=_abstract(self.shape, np.int8),
                scale_V=_abstract(self.shape[:1], np.float32),
                dtype=self.dtype(compute_dtype),
            )
        size = row_size(self.shape[1])
        rows = _abstract((self.shape[0], size), np.int32)
        return Int4Table(rows_VW=rows, num_columns=self.shape[1])

    def num_bytes(self, compute_dtype: DTypeLike, *, is_packed: bool) -> int:
        """Return the size of the leaf in a model that computes in `compute_dtype`."""
        leaves = jax.tree.leaves(self.abstract(compute_dtype, is_packed=is_packed))
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Describe every leaf that a model of this config has."""
    return (*_embedding_specs(config), *_vector_specs(config), *_layer_specs(config))


def build_params(specs: Iterable[ParamSpec], make: Callable[[ParamSpec], Any]) -> Params:
    """Make each leaf, in the order of `specs`; what has no spec is None."""
    leaves = {spec.path: make(spec) for spec in specs}
    num_layers = sum(path.endswith(".o_DQ") for path in leaves)
    layers = tuple(
        LayerParams(**_pick(leaves, LayerParams, f"layers.{i}.")) for i in range(num_layers)
    )
    return Params(**{**_pick(leaves, Params, ""), "layers": layers})


def abstract_params(
    config: ModelConfig, dtype: DTypeLike, packed_uses: Collection[Use] = ()
) -> Params:
    """Return the weights as jax.ShapeDtypeStruct leaves, those of some uses packed."""

    def make(spec: ParamSpec) -> Any:
        return spec.abstract(dtype, is_packed=spec.use in packed_uses)

    return build_params(param_specs(config), make)


def random_params(config: ModelConfig, dtype: DTypeLike, seed: int) -> Params:
    """Return random weights whose scales keep every sublayer audible in the logits."""
    rng = np.random.default_rng(seed)

    def make(spec: ParamSpec) -> jax.Array:
        def fill(source: Source, part: npt.NDArray[Any]) -> None:
            part[...] = source.init.draw(rng, source.shape)

        return place(spec.shape, spec.dtype(dtype), spec, fill)

    return build_params(param_specs(config), make)


def place(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    spec: ParamSpec,
    fill: Callable[[Source, npt.NDArray[Any]], None],
) -> jax.Array:
    """Assemble one array in host memory and hand it to the device, which has it on return.

    `fill` writes a source's values into the part of the array that is the source's.
    """
    leaf = _aligned_zeros(shape, dtype)
    if spec.fill:
        leaf[...] = spec.fill
    for source in spec.sources:
        fill(source, leaf[source.at])
    array: jax.Array = jax.device_put(leaf)
    return array.block_until_ready()


def _abstract(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    # jax leaves this constructor without annotations, and its leaves stand for arrays.
    return jax.ShapeDtypeStruct(shape, dtype)


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate on a 64-byte boundary, where JAX's CPU backend takes an array over uncopied."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _pick(leaves: Mapping[str, Any], cls: type, prefix: str) -> dict[str, Any]:
    return {field.name: leaves.get(prefix + field.name) for field in fields(cls)}


def _embedding_specs(config: ModelConfig) -> Iterator[ParamSpec]:
    V, D, L, P = config.vocab_size, config.model_dim, config.num_layers, config.ple_dim
    yield _matrix("embed_VD", ("embed_tokens", V, D), use="embedding", std=0.4 * D**-0.5)
    if P:
        table = ("embed_tokens_per_layer", config.ple_vocab_size, L * P)
        yield _matrix("ple_embed", table, use="ple_table", std=P**-0.5)
        yield _matrix("ple_model_proj", ("per_layer_model_projection", L * P, D))


def _layer_specs(config: ModelConfig) -> Iterator[ParamSpec]:
    D, P = config.model_dim, config.ple_dim
    for i, layer in enumerate(config.layers):
        path = f"layers.{i}."
        HE, KE, F = (
            layer.num_heads * layer.head_dim,
            layer.num_kv_heads * layer.head_dim,
            layer.mlp_dim,
        )
        attn, mlp = path + "self_attn.", path + "mlp."
        qkv = [(attn + "q_proj", HE, D)]
        if layer.kv_source == i:
            qkv.append((attn + "k_proj", KE, D))
            if layer.has_v_proj:
                qkv.append((attn + "v_proj", KE, D))
        yield _matrix(path + "qkv_OD", *qkv)
        yield _matrix(path + "o_DQ", (attn + "o_proj", D, HE))
        yield _matrix(path + "gate_up_OD", (mlp + "gate_proj", F, D), (mlp + "up_proj", F, D))
        yield _matrix(path + "down_DF", (mlp + "down_proj", D, F))
        if P:
            yield _matrix(path + "ple_gate_PD", (path + "per_layer_input_gate", P, D))
            yield _matrix(path + "ple_proj_DP", (path + "per_layer_projection", D, P))


def _matrix(
    path: str, *parts: tuple[str, int, int], use: Use = "linear", std: float | None = None
) -> ParamSpec:
    """Matrices of the same number of columns, one below another."""
    sources, row = [], 0
    for module, rows, cols in parts:
        init = Normal(std=cols**-0.5 if std is None else std)
        at = (slice(row, row + rows),)
        sources.append(Source(name=module + ".weight", shape=(rows, cols), at=at, init=init))
        row += rows
    return ParamSpec(path=path, shape=(row, parts[0][2]), sources=tuple(sources), use=use)


def _vector_specs(config: ModelConfig) -> Iterator[ParamSpec]:
    L, D, E, P = config.num_layers, config.model_dim, config.max_head_dim, config.ple_dim
    yield _vectors(config, "norms_LND", (L, len(NORMS), D), _norm_sources(config), fill=1.0)
    yield _vectors(config, "head_norms_L2E", (L, 2, E), _head_norm_sources(config))
    yield _vectors(config, "layer_scalar_L", (L,), _layer_scalar_sources(config), fill=1.0)
    # Of either sign, or the tied head would make random models repeat their input.
    final = Source(
        name="norm.weight", shape=(D,), at=(), init=Uniform(low=7.0, high=20.0, signed=True)
    )
    yield _vectors(config, "final_norm_D", (D,), (final,))
    if P:
        init = Uniform(low=0.5, high=1.5)
        ple_norm = Source(name="per_layer_projection_norm.weight", shape=(P,), at=(), init=init)
        yield _vectors(config, "ple_norm_P", (P,), (ple_norm,))


def _vectors(
    config: ModelConfig,
    path: str,
    shape: tuple[int, ...],
    sources: Iterable[Source],
    fill: float = 0.0,
) -> ParamSpec:
    """Small vectors of all layers, stacked in float32."""
    return ParamSpec(
        path=path,
        shape=shape,
        sources=tuple(sources),
        use="vector",
        fill=fill,
        offset=config.norm_offset,
    )


def _norm_sources(config: ModelConfig) -> Iterator[Source]:
    names = NORMS if config.ple_dim else NORMS[:-1]
    for i in range(config.num_layers):
        for j, name in enumerate(names):
            # What a sublayer adds to the stream is kept below the stream's own size.
            init = (
                Uniform(low=0.1, high=0.4)
                if name.startswith("post")
                else Uniform(low=0.5, high=1.25)
            )
            yield Source(
                name=f"layers.{i}.{name}.weight", shape=(config.model_dim,), at=(i, j), init=init
            )


def _head_norm_sources(config: ModelConfig) -> Iterator[Source]:
    for i, layer in enumerate(config.layers):
        path, E = f"layers.{i}.self_attn.", layer.head_dim
        query = Uniform(low=0.7, high=1.3)
        yield Source(name=path + "q_norm.weight", shape=(E,), at=(i, 0, slice(0, E)), init=query)
        if layer.kv_source == i:
            # Scores then have a standard deviation near 1.3: attention neither flat nor one-hot.
            size = 1.3 * E**-0.5 / config.attention_scale
            key = Uniform(low=0.7 * size, high=1.3 * size)
            yield Source(name=path + "k_norm.weight", shape=(E,), at=(i, 1, slice(0, E)), init=key)


def _layer_scalar_sources(config: ModelConfig) -> Iterator[Source]:
    if config.has_layer_scalar:
        for i in range(config.num_layers):
            init = Uniform(low=0.45, high=1.1)
            yield Source(
                name=f"layers.{i}.layer_scalar", shape=(1,), at=(slice(i, i + 1),), init=init
            )

"""What must be the same where a bundle of programs is compiled and where it is loaded."""

import hashlib
import os
import platform
import sysconfig
from dataclasses import fields
from importlib import metadata, resources
from itertools import zip_longest
from typing import TYPE_CHECKING

import jax

from jaxserve import __version__
from jaxserve.device.targets import Target, processor_features
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import LoadedParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = "1"

_SOURCES = ("device", "kernels", "models")
"""The packages whose code programs are made of."""

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_JAX_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)
"""Those of JAX's that change what a program computes."""

_FEATURES = "the processor's features"

_SHOWN = 60


def identity(
    target: Target, config: ModelConfig, options: "DataclassInstance", loaded: LoadedParams
) -> dict[str, str]:
    """Name what must be the same for a program to be the one that would be compiled.

    `options` are LoadOptions, each called by its flag.
    """
    leaves = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(loaded.params)]
    form = f"{jax.tree.structure(loaded.params)} {leaves}"
    return {
        "the bundle's format": FORMAT,
        "jaxserve": __version__,
        "jaxserve's code": code_digest(),
        **_compilers(target),
        **compiler_flags(),
        **{f"--{name.replace('_', '-')}": value for name, value in _fields(options)},
        **{f"the model's {name}": value for name, value in _fields(config)},
        "what is packed": ", ".join(loaded.packed) or "nothing",
        "the weights' form": hashlib.sha256(form.encode()).hexdigest()[:16],
    }


def code_digest() -> str:
    """Return what changes with the source that programs are made of."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        folder = resources.files("jaxserve") / package
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                digest.update(f"{package}/{file.name}".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compiler_flags() -> dict[str, str]:
    """Return what the environment tells the compilers, and JAX of how to compute."""
    options = {name: str(getattr(jax.config, name, "")) for name in _JAX_OPTIONS}
    return {name: os.environ.get(name, "") for name in _FLAGS} | options


def difference(name: str, here: str | None, theirs: str | None) -> str:
    """Say how two values differ; long ones from a little before where they do."""
    if name == _FEATURES and here is not None and theirs is not None:
        ours, others = set(here.split()), set(theirs.split())
        theirs_alone, ours_alone = (
            " ".join(sorted(some)) or "nothing" for some in (others - ours, ours - others)
        )
        return f"{name}: the bundle's alone have {theirs_alone}, those here alone {ours_alone}"
    pairs = enumerate(zip_longest(here or "", theirs or ""))
    start = max(0, next(i for i, (a, b) in pairs if a != b) - _SHOWN // 2)

    def shown(value: str | None) -> str:
        if value is None:
            return "absent"
        if len(value) <= _SHOWN:
            return repr(value)
        return repr("…" * (start > 0) + value[start : start + _SHOWN] + "…")

    return f"{name} is {shown(here)}, the bundle's is {shown(theirs)}"


def _compilers(target: Target) -> dict[str, str]:
    """Name the device and the versions of what compiles for it."""
    packages = ["jax", "jaxlib"]
    kind = {"the device": f"{target.device.platform}, {target.device.device_kind}"}
    if target.device.platform == "tpu":
        packages.append("libtpu")
    if not target.is_accelerator:
        # Machine code: instructions that a processor lacks would end the process. Where they are
        # not known, the machine itself stands for them.
        kind["the system"] = sysconfig.get_platform()
        kind[_FEATURES] = processor_features() or platform.node()
    return kind | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # TPU_LIBRARY_PATH can name a libtpu that is none
        return "not installed"


def _fields(values: "DataclassInstance") -> list[tuple[str, str]]:
    """Return a dataclass's fields as text; of sets in one order."""
    texts = []
    for field in fields(values):
        value = getattr(values, field.name)
        texts.append((field.name, str(sorted(value) if isinstance(value, frozenset) else value)))
    return texts

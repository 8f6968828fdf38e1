"""Compiled programs in a folder: written on any machine, loaded where they run.

A bundle is code, and reading one runs it: whoever can write the folder can do all that the server
can. Its digests find damage, not malice. Why this form: docs/decisions/0020.
"""

import hashlib
import json
import logging
import os
import pickle
import platform
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from importlib import metadata, resources
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled

from jaxserve import __version__
from jaxserve.device.memory import PoolSizes
from jaxserve.device.runner import Program, name_of
from jaxserve.device.targets import Target, processor_features
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import LoadedParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle that fits; `digests` are its programs' by name."""

    folder: Path
    sizes: PoolSizes
    digests: dict[str, str]

    def load(self, programs: Iterable[Program], device: jax.Device) -> dict[Program, Compiled]:
        """Return those that are there and whole; the log names the others."""
        wanted = list(programs)
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="load") as pool:
            loaded = pool.map(lambda program: self._load(name_of(program), device), wanted)
            return {p: done for p, done in zip(wanted, loaded, strict=True) if done is not None}

    def warn_unused(self, reason: str) -> None:
        """Log that the bundle is not used."""
        _warn_unused(self.folder, reason)

    def _load(self, name: str, device: jax.Device) -> Compiled | None:
        try:
            return self._load_whole(name, device)
        except _BundleError as error:
            logger.warning("%s: %s; it is compiled anew", self.folder, error)
            return None

    def _load_whole(self, name: str, device: jax.Device) -> Compiled:
        try:
            content = _file(self.folder, name).read_bytes()
        except OSError as error:
            raise _BundleError(f"{name} cannot be read: {error}") from error
        if _digest(content) != self.digests.get(name):
            raise _BundleError(f"{name} is damaged")
        serialized, in_tree, out_tree = pickle.loads(content)
        try:
            program: Compiled = deserialize_and_load(
                serialized, in_tree, out_tree, execution_devices=[device]
            )
        except jax.errors.JaxRuntimeError as error:
            raise _BundleError(f"{name} is refused by the device's runtime: {error}") from error
        return program


class _BundleError(Exception):
    """Something of a bundle cannot be used."""


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
        "the weights' form": _digest(form.encode())[:16],
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


def write_bundle(
    folder: Path,
    same: Mapping[str, str],
    sizes: PoolSizes,
    programs: Mapping[Program, Compiled],
) -> int:
    """Write programs into a folder, in place of those it has; returns the bytes written.

    `same` is their identity.

    Raises:
        ConfigError: they cannot be written there.
    """
    digests, num_bytes = {}, 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First, so that what an end halfway leaves is no bundle.
        (folder / MANIFEST).unlink(missing_ok=True)
        for old in folder.glob("*.program"):
            old.unlink()
        for program, compiled in programs.items():
            content = pickle.dumps(serialize(compiled))
            _file(folder, name_of(program)).write_bytes(content)
            digests[name_of(program)] = _digest(content)
            num_bytes += len(content)
        body = {
            "same": dict(same),
            "kv_bytes": sizes.kv_bytes,
            "temp_bytes": sizes.temp_bytes,
            "programs": digests,
        }
        manifest = {**body, "digest": _digest_of(body)}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the bundle cannot be written: {error}") from error
    return num_bytes


def read_bundle(folder: Path, same: Mapping[str, str]) -> Bundle | None:
    """Return a folder's bundle if its identity is this one; else None, and the log says why."""
    try:
        manifest = _read_manifest(folder)
        theirs = manifest.get("same")
        if not isinstance(theirs, dict):
            raise _BundleError(f"its {MANIFEST} is damaged")
        names = [name for name in {**same, **theirs} if same.get(name) != theirs.get(name)]
        if names:
            differences = (_difference(name, same.get(name), theirs.get(name)) for name in names)
            raise _BundleError("; ".join(differences))
    except _BundleError as error:
        _warn_unused(folder, str(error))
        return None
    sizes = PoolSizes(kv_bytes=manifest["kv_bytes"], temp_bytes=manifest["temp_bytes"])
    return Bundle(folder=folder, sizes=sizes, digests=manifest["programs"])


def _warn_unused(folder: Path, reason: str) -> None:
    logger.warning("%s is not used, all programs are compiled anew: %s", folder, reason)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: object = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise _BundleError(f"its {MANIFEST} cannot be read: {error}") from error
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.pop("digest", None) != _digest_of(manifest):
        raise _BundleError(f"its {MANIFEST} is damaged")
    return manifest


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


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.program"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(body: object) -> str:
    return _digest(json.dumps(body, sort_keys=True).encode())


def _difference(name: str, here: str | None, theirs: str | None) -> str:
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

"""Compiled programs in a folder: written on any machine, loaded where they run.

A bundle is code, and reading one runs it: whoever can write the folder can do all that the server
can. Its digests find damage, not malice. Why this form: docs/decisions/0020.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled

from jaxserve.device.bundle_identity import difference
from jaxserve.device.compiler import max_temp_bytes
from jaxserve.device.memory import PoolSizes
from jaxserve.device.runner import Program, name_of
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
BEGUN = "begun"
"""The folder of programs whose bundle is not complete."""


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


class BundleWriter:
    """Writes programs into a folder, where they replace its bundle once all are there.

    Until then they are in a folder within that; a later writer of the same identity goes on from
    them. Each call may raise ConfigError: they cannot be written.
    """

    def __init__(self, folder: Path, same: Mapping[str, str]) -> None:
        """`same` is the programs' identity."""
        self._folder, self._begun = folder, folder / BEGUN
        self._body: dict[str, Any] = {"same": dict(same), "programs": {}}
        with _writing():
            if not self._goes_on():
                shutil.rmtree(self._begun, ignore_errors=True)
                self._begun.mkdir(parents=True)

    @property
    def sizes(self) -> PoolSizes | None:
        """What the programs are planned for, if an earlier writer has said so."""
        if "kv_bytes" not in self._body:
            return None
        return PoolSizes(kv_bytes=self._body["kv_bytes"], temp_bytes=self._body["temp_bytes"])

    @property
    def temp_bytes(self) -> int:
        """Most that one of them needs beside its arguments and results."""
        temp_bytes: int = self._body["temp_bytes"]
        return temp_bytes

    def plan(self, sizes: PoolSizes) -> None:
        """Say what the programs will be planned for."""
        self._body |= {"kv_bytes": sizes.kv_bytes, "temp_bytes": sizes.temp_bytes}
        self._save(self._begun)

    def __contains__(self, program: Program) -> bool:
        return name_of(program) in self._body["programs"]

    def add(self, program: Program, compiled: Compiled) -> None:
        """Keep a program, from now on whatever happens."""
        content = pickle.dumps(serialize(compiled))
        with _writing():
            _file(self._begun, name_of(program)).write_bytes(content)
        self._body["programs"][name_of(program)] = _digest(content)
        self._body["temp_bytes"] = max(self._body["temp_bytes"], max_temp_bytes([compiled]))
        self._save(self._begun)

    def finish(self) -> tuple[int, int]:
        """Put the programs in place of those that the folder has; returns their number and bytes.

        An end halfway leaves no bundle: the manifest goes first and comes last.
        """
        names, num_bytes = self._body["programs"], 0
        with _writing():
            (self._folder / MANIFEST).unlink(missing_ok=True)
            for old in self._folder.glob("*.program"):
                old.unlink()
            for name in names:
                moved = _file(self._begun, name).rename(_file(self._folder, name))
                num_bytes += moved.stat().st_size
        self._save(self._folder)
        with _writing():
            shutil.rmtree(self._begun)
        return len(names), num_bytes

    def _goes_on(self) -> bool:
        """Take over what an earlier writer has left."""
        try:
            body = _read_manifest(self._begun)
        except _BundleError:
            return False
        if body.get("same") != self._body["same"]:
            return False
        whole = {
            name: digest
            for name, digest in body["programs"].items()
            if (file := _file(self._begun, name)).exists() and _digest(file.read_bytes()) == digest
        }
        self._body = {**body, "programs": whole}
        return True

    def _save(self, folder: Path) -> None:
        manifest = {**self._body, "digest": _digest_of(self._body)}
        with _writing():
            partial = folder / f"{MANIFEST}.partial"
            partial.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            partial.replace(folder / MANIFEST)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the bundle cannot be written: {error}") from error


def read_bundle(folder: Path, same: Mapping[str, str]) -> Bundle | None:
    """Return a folder's bundle if its identity is this one; else None, and the log says why."""
    try:
        manifest = _read_manifest(folder)
        theirs = manifest.get("same")
        if not isinstance(theirs, dict):
            raise _BundleError(f"its {MANIFEST} is damaged")
        names = [name for name in {**same, **theirs} if same.get(name) != theirs.get(name)]
        if names:
            differences = (difference(name, same.get(name), theirs.get(name)) for name in names)
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


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.program"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(body: object) -> str:
    return _digest(json.dumps(body, sort_keys=True).encode())

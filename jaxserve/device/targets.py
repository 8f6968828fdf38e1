"""Devices that programs are compiled for: the one at hand, or one that is known by name alone."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxserve.errors import ConfigError

V6E_BYTES = int(31.25 * (1 << 30))
"""What a v6e's runtime offers, by libtpu's compiler."""

COMPILED_FOR_BYTES = 31 << 30
"""What programs are compiled for: V6E_BYTES less what a chip's runtime may keep for itself."""

TPU_COMPILES = 1
"""Two at once, libtpu's compiler (0.0.42.1) overflowed a stack of its own in 3 of 5 tries of a tiny
model, compiled for a chip that was not there, and never one by one, which took no longer."""

QUIET = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""For libtpu where no chip is to be opened: it looks for no metadata server, and takes no lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device, and an accelerator's memory.

    Attributes:
        memory_bytes: what programs may use, on a CPU all of the machine's; None: unknown.
        max_compiles: programs to compile side by side; None: one for each core.
    """

    device: jax.Device
    memory_bytes: int | None
    max_compiles: int | None = None

    @property
    def is_accelerator(self) -> bool:
        return bool(self.device.platform != "cpu")

    @property
    def sharding(self) -> SingleDeviceSharding:
        """Where arguments of its programs lie."""
        return SingleDeviceSharding(self.device)

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has bfloat16 products; processors without emulate them, far slower."""
        flags = _processor_flags()
        return self.is_accelerator or "avx512_bf16" in flags or "amx_bf16" in flags


def find_target() -> Target:
    """Return the device that this process serves on.

    Raises:
        ConfigError: there is none.
    """
    try:
        device = jax.devices()[0]
    except RuntimeError as error:  # JAX_PLATFORMS names what is not here or cannot be opened
        raise ConfigError(f"no device to serve on: {error}") from error
    if device.platform == "cpu":
        return Target(device=device, memory_bytes=_host_memory_bytes())
    return Target(
        device=device,
        memory_bytes=int(device.memory_stats()["bytes_limit"]),
        max_compiles=TPU_COMPILES if device.platform == "tpu" else None,
    )


def find_target_by_name(name: str) -> Target:
    """Return one of config.TARGETS, opening no chip: from here on, this process uses the CPU alone.

    Raises:
        ConfigError: its compiler is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    if name == "cpu":
        return find_target()
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--target {name} needs the TPU's compiler: install the extra `tpu` (in a checkout"
            " `scripts/install demo,hf,guided,tpu`), on Linux on x86-64"
        )
    os.environ |= QUIET
    topology = topologies.get_topology_desc(name, "tpu", chips_per_host_bounds=(1, 1, 1))
    return Target(
        device=topology.devices[0],
        memory_bytes=COMPILED_FOR_BYTES,
        max_compiles=TPU_COMPILES,
    )


def processor_features() -> str:
    """Return the instruction sets that code for this processor may use; empty where not known."""
    return " ".join(sorted(_processor_flags()))


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    # "flags" on x86, "Features" on Arm; the same for every core.
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return set(next(found, "").split())


def _host_memory_bytes() -> int | None:
    """Return the machine's memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None

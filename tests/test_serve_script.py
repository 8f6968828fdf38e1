"""What scripts/serve installs, with a TPU and without: devices are files of a made-up /sys."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from jax._src import hardware_utils

ROOT = Path(__file__).parent.parent

V6E = "0x006f"
GOOGLE_NETWORK_CARD = ("0x1ae0", "0x0042")


def make_sys(folder: Path, *devices: tuple[str, str]) -> Path:
    """Make a /sys with these PCI devices, each a vendor and a device number."""
    for number, (vendor, device) in enumerate(devices):
        entry = folder / "bus" / "pci" / "devices" / f"0000:00:{number:02x}.0"
        entry.mkdir(parents=True)
        (entry / "vendor").write_text(f"{vendor}\n")
        (entry / "device").write_text(f"{device}\n")
    return folder


def has_tpu(sys_folder: Path) -> bool:
    result = subprocess.run(
        [ROOT / "scripts" / "has_tpu"],
        env={**os.environ, "JAXSERVE_SYS": str(sys_folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""
    return result.returncode == 0


@pytest.mark.parametrize("device", sorted(hardware_utils._TPU_PCI_DEVICE_IDS))
def test_what_jax_takes_for_a_tpu_is_one(tmp_path: Path, device: str) -> None:
    devices = [("0x8086", "0x1237"), GOOGLE_NETWORK_CARD, ("0x1ae0", device)]

    assert has_tpu(make_sys(tmp_path, *devices))


@pytest.mark.parametrize("devices", [[], [GOOGLE_NETWORK_CARD, ("0x10de", V6E)]])
def test_what_jax_does_not_is_none(tmp_path: Path, devices: list[tuple[str, str]]) -> None:
    assert not has_tpu(make_sys(tmp_path, *devices))


@pytest.mark.parametrize(
    ("devices", "platform", "extras", "expected"),
    [
        ([], None, "demo,hf,guided", ""),
        # A chip that cannot be opened then ends the start; JAX would take the CPU.
        ([("0x1ae0", V6E)], None, "demo,hf,guided,tpu", "tpu"),
        ([("0x1ae0", V6E)], "cpu", "demo,hf,guided,tpu", "cpu"),
    ],
)
def test_serve_installs_what_the_machine_needs_and_serves(
    tmp_path: Path,
    devices: list[tuple[str, str]],
    platform: str | None,
    extras: str,
    expected: str,
) -> None:
    for name in ("serve", "has_tpu"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    for name in ("scripts/install", ".venv/bin/jaxserve"):
        double = tmp_path / name
        double.parent.mkdir(parents=True, exist_ok=True)
        double.write_text('#!/bin/sh\necho "$(basename "$0") $* $JAX_PLATFORMS"\n')
        double.chmod(0o755)

    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if platform is not None:
        environment["JAX_PLATFORMS"] = platform
    result = subprocess.run(
        [tmp_path / "scripts" / "serve", "--port", "1"],
        env={**environment, "JAXSERVE_SYS": str(make_sys(tmp_path / "sys", *devices))},
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.splitlines() == [
        f"install {extras} {expected}",
        f"jaxserve serve --port 1 {expected}",
    ]

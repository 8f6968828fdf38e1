"""When a bundle of programs is used: its identity, and what damage does."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import PROGRAM_FLAGS
from jaxserve.device import targets
from jaxserve.device.bundle import BEGUN, MANIFEST, Bundle, BundleWriter, read_bundle
from jaxserve.device.bundle_identity import identity
from jaxserve.device.choices import Choices, LoadOptions
from jaxserve.device.memory import PoolSizes
from jaxserve.device.runner import Program
from jaxserve.device.targets import Target, find_target, find_target_by_name
from jaxserve.errors import ConfigError
from tests.checkpoints import DATA

SIZES = PoolSizes(kv_bytes=1 << 20, temp_bytes=5)
E2B = DATA / "checkpoints" / "gemma4-e2b-w4a16"
OPTIONS = LoadOptions(
    dtype="bfloat16",
    weights="auto",
    ple_dtype="auto",
    kv_dtype="auto",
    max_model_len=64,
    max_batch=2,
    kv_cache_bytes=None,
    tokens_per_resume_point=64,
)


def write_bundle(
    folder: Path,
    same: dict[str, str],
    sizes: PoolSizes,
    programs: dict[Program, jax.stages.Compiled],
) -> None:
    writer = BundleWriter(folder, same)
    writer.plan(sizes)
    for program, compiled in programs.items():
        writer.add(program, compiled)
    assert writer.finish()[0] == len(programs)


def identity_of(options: LoadOptions = OPTIONS, target: Target | None = None) -> dict[str, str]:
    choices = Choices.make(E2B, options, target or find_target())
    return identity(choices.target, choices.config, options, choices.open().describe())


def difference(folder: Path, same: dict[str, str], caplog: pytest.LogCaptureFixture) -> str:
    """Return what is logged of a bundle that is not used."""
    with caplog.at_level(logging.WARNING):
        assert read_bundle(folder, same) is None
    (message,) = caplog.messages
    prefix = f"{folder} is not used, all programs are compiled anew: "
    assert message.startswith(prefix)
    return message.removeprefix(prefix)


def test_the_flags_that_shape_programs_are_what_a_load_takes() -> None:
    assert {field.name for field in fields(LoadOptions)} == set(PROGRAM_FLAGS)


def test_a_bundle_of_the_same_identity_is_used(tmp_path: Path) -> None:
    write_bundle(tmp_path / "new", identity_of(), SIZES, {})
    expected = Bundle(folder=tmp_path / "new", sizes=SIZES, digests={})
    assert read_bundle(tmp_path / "new", identity_of()) == expected


def test_what_differs_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    other = identity_of(replace(OPTIONS, max_batch=4, weights="int4"))
    assert difference(tmp_path, other, caplog).split("; ")[:3] == [
        "--weights is 'int4', the bundle's is 'auto'",
        "--max-batch is '4', the bundle's is '2'",
        "what is packed is 'linear int4', the bundle's is 'nothing'",
    ]


def test_an_int8_head_has_programs_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    other = identity_of(replace(OPTIONS, head_dtype="int8"))
    assert difference(tmp_path, other, caplog).split("; ")[:2] == [
        "--head-dtype is 'int8', the bundle's is 'auto'",
        "what is packed is 'embedding int8', the bundle's is 'nothing'",
    ]


def test_a_long_value_is_shown_where_it_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = identity_of()
    write_bundle(tmp_path, same, SIZES, {})
    layers = same["the model's layers"].replace("mlp_dim=", "mlp_dim=9", 1)
    told = difference(tmp_path, same | {"the model's layers": layers}, caplog)
    assert told.startswith("the model's layers is '…")
    assert "mlp_dim=9" in told
    assert len(told) < 200


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_another_version_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    package: str,
) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9" if name == package else version(name))
    told = difference(tmp_path, identity_of(), caplog)
    assert told == f"{package} is '9', the bundle's is '{version(package)}'"


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_other_flags_of_the_compiler_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    monkeypatch.setenv(variable, "--other")
    assert difference(tmp_path, identity_of(), caplog).startswith(f"{variable} is '--other'")


def test_other_options_of_jax_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    with jax.default_matmul_precision("highest"):
        told = difference(tmp_path, identity_of(), caplog)
    assert told == "jax_default_matmul_precision is 'highest', the bundle's is 'None'"


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ({"avx2"}, "amx_tile, those here alone nothing"),
        ({"avx2", "amx_tile", "sse9"}, "nothing, those here alone sse9"),
        # Nobody knows what this one has: only what was compiled here is safe to run.
        (set(), "amx_tile avx2, those here alone this-machine"),
    ],
)
def test_what_another_processor_lacks_or_has_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    features: set[str],
    told: str,
) -> None:
    monkeypatch.setattr(targets, "_processor_flags", lambda: {"avx2", "amx_tile"})
    write_bundle(tmp_path, identity_of(), SIZES, {})
    monkeypatch.setattr(targets, "_processor_flags", lambda: features)
    monkeypatch.setattr("platform.node", lambda: "this-machine")
    assert difference(tmp_path, identity_of(), caplog) == (
        f"the processor's features: the bundle's alone have {told}"
    )


def test_another_system_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-14.0-arm64")
    told = difference(tmp_path, identity_of(), caplog)
    assert told.startswith("the system is 'macosx-14.0-arm64', the bundle's is ")


def test_another_device_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Chip:
        platform, device_kind = "rocket", "R1"

    same = identity_of()
    write_bundle(tmp_path, same, SIZES, {})
    chip = Target(device=Chip(), memory_bytes=1)
    told = difference(tmp_path, identity_of(target=chip), caplog)
    assert told.startswith("the device is 'rocket, R1', the bundle's is 'cpu, cpu'")


def damage_digits(manifest: bytes) -> bytes:
    return manifest.replace(b"1048576", b"1048577")


def no_object(_: bytes) -> bytes:
    return b"[]"


def no_digest(manifest: bytes) -> bytes:
    return json.dumps({"same": json.loads(manifest)["same"]}).encode()


def other_form(_: bytes) -> bytes:
    body: dict[str, object] = {"identity": {}}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}).encode()


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:-5], lambda _: b"", damage_digits, no_object, no_digest, other_form],
)
def test_a_damaged_manifest_is_no_bundle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    write_bundle(tmp_path, identity_of(), SIZES, {})
    manifest = tmp_path / MANIFEST
    manifest.write_bytes(damage(manifest.read_bytes()))
    assert difference(tmp_path, identity_of(), caplog) == f"its {MANIFEST} is damaged"


def test_a_folder_without_a_manifest_is_no_bundle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "cannot be read" in difference(tmp_path, identity_of(), caplog)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[Program, jax.stages.Compiled]]:
    """Write two programs; their arguments do not matter here."""
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    programs: dict[Program, jax.stages.Compiled] = {"copy_pages": compiled, "allocate": compiled}
    write_bundle(tmp_path, {}, SIZES, programs)
    return tmp_path, programs


def test_programs_are_loaded_without_compiling(
    written: tuple[Path, dict[Program, jax.stages.Compiled]],
) -> None:
    folder, programs = written
    bundle = read_bundle(folder, {})
    assert bundle is not None
    loaded = bundle.load(programs, jax.devices()[0])
    assert set(loaded) == {"copy_pages", "allocate"}
    assert loaded["allocate"](jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("damage", [lambda text: text[:-1], lambda text: text[:9] + b"!", None])
def test_a_damaged_program_is_left_out_and_named(
    written: tuple[Path, dict[Program, jax.stages.Compiled]],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes] | None,
) -> None:
    folder, programs = written
    file = folder / "allocate.program"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    bundle = read_bundle(folder, {})
    assert bundle is not None
    assert set(bundle.load(programs, jax.devices()[0])) == {"copy_pages"}
    (message,) = caplog.messages
    assert message.startswith(f"{folder}: allocate ")


def test_a_bundle_replaces_the_one_before(
    written: tuple[Path, dict[Program, jax.stages.Compiled]],
) -> None:
    folder, _ = written
    write_bundle(folder, {}, SIZES, {})
    assert [path.name for path in folder.iterdir()] == [MANIFEST]


def test_a_writer_goes_on_from_what_another_left(
    written: tuple[Path, dict[Program, jax.stages.Compiled]],
) -> None:
    folder, programs = written
    same = {"--max-batch": "3"}
    first = BundleWriter(folder, same)
    assert first.sizes is None
    first.plan(SIZES)
    for program in ("copy_pages", "write_table"):
        first.add(program, programs["allocate"])
    (folder / BEGUN / "write_table.program").write_bytes(b"cut off")
    # What was there before still is.
    assert read_bundle(folder, {}) is not None

    second = BundleWriter(folder, same)
    assert second.sizes == SIZES
    assert "copy_pages" in second
    assert "write_table" not in second
    second.plan(SIZES)
    second.add("allocate", programs["allocate"])
    count, num_bytes = second.finish()

    bundle = read_bundle(folder, same)
    assert bundle is not None
    assert set(bundle.digests) == {"allocate", "copy_pages"}
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {MANIFEST, "allocate.program", "copy_pages.program"}
    assert (count, num_bytes) == (2, sum(files.values()) - files[MANIFEST])
    assert set(bundle.load(programs, jax.devices()[0])) == set(programs)


def test_a_writer_of_another_identity_begins_anew(
    written: tuple[Path, dict[Program, jax.stages.Compiled]],
) -> None:
    folder, programs = written
    first = BundleWriter(folder, {"--max-batch": "3"})
    first.plan(SIZES)
    first.add("copy_pages", programs["allocate"])

    second = BundleWriter(folder, {"--max-batch": "4"})
    assert second.sizes is None
    assert "copy_pages" not in second
    assert list((folder / BEGUN).iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        BundleWriter(tmp_path / "file", {})


def test_a_target_whose_compiler_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--target v6e:1x1 .* install the extra `tpu`"):
        find_target_by_name("v6e:1x1")

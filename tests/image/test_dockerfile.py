"""What the Dockerfile says, read from the file; what it does is test_image's."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.image.context import ROOT, make_context
from tests.image.dockerfile import Copy, Run, Stage, read_stages


def stages(**arguments: str) -> list[Stage]:
    return read_stages(ROOT / "Dockerfile", arguments, {"PATH": "/bin"})


def test_every_base_is_an_exact_version_and_can_be_given_by_digest() -> None:
    assert {stage.base for stage in stages()} == {"python:3.11.15-slim-bookworm"}
    assert {stage.base for stage in stages(PYTHON_IMAGE="python@sha256:0")} == {"python@sha256:0"}


def test_the_last_stage_takes_only_what_was_built() -> None:
    build, final = stages()
    copies = [step for step in final.steps if isinstance(step, Copy)]

    assert [(copy.stage, copy.sources) for copy in copies] == [(build.name, ("/opt/jaxserve",))]


def test_it_runs_as_a_fixed_user_that_owns_the_volume() -> None:
    final = stages()[-1]
    runs = " ".join(step.command for step in final.steps if isinstance(step, Run))

    assert final.user == "10001:10001"
    assert final.volumes == [final.environment["HOME"]] == ["/data"]
    assert "install -d -o 10001 -g 10001 /data" in runs


def test_everything_that_is_kept_lies_on_the_volume() -> None:
    environment = stages()[-1].environment

    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert Path(environment[name]).is_relative_to("/data")


def test_it_listens_for_all_and_is_checked_where_it_listens() -> None:
    final = stages()[-1]

    assert final.environment["JAXSERVE_HOST"] == "0.0.0.0"
    assert final.ports == [final.environment["JAXSERVE_PORT"]]
    assert final.health == [*(final.entrypoint or []), "health"]
    assert set(final.health_flags) == {"--start-period", "--interval", "--timeout", "--retries"}
    assert (final.command, final.stop_signal) == (["serve"], "SIGTERM")


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_the_device_is_a_build_argument(device: str) -> None:
    build, final = stages(DEVICE=device)
    runs = [step for step in build.steps if isinstance(step, Run)]
    choice = next(step for step in runs if "extras=" in step.command)

    assert choice.environment["DEVICE"] == device
    assert final.environment["JAX_PLATFORMS"] == device


def test_no_extra_that_it_installs_holds_weights() -> None:
    build = stages()[0]
    commands = " ".join(step.command for step in build.steps if isinstance(step, Run))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    installed = {
        extra for names in re.findall(r"extras=([\w,]+)", commands) for extra in names.split(",")
    }

    assert installed == {"hf", "guided", "tpu"}
    assert installed < set(extras)


def test_the_licence_is_labelled() -> None:
    assert stages()[-1].labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_context_is_what_the_build_copies(tmp_path: Path) -> None:
    context = make_context(tmp_path / "context")
    copied = [
        source.rstrip("/")
        for step in stages()[0].steps
        if isinstance(step, Copy)
        for source in step.sources
    ]

    present = {str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()}

    assert all((context / source).exists() for source in copied)
    assert {path for path in present if not path.startswith("jaxserve/")} == {
        source for source in copied if not source.startswith("jaxserve")
    }

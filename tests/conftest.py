"""Settings of every test run: the same examples each time, a CPU unless a chip was asked for."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

# The same examples everywhere; time limits are pytest's, for machines differ too much for others.
hypothesis.settings.register_profile("jaxserve", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxserve")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports jax. Subprocesses inherit it.
    if config.option.markexpr != "accelerator":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="module")
def compile_fast() -> Iterator[None]:
    """Let what the server compiles in this process be compiled as tests compile."""
    from tests.compiling import OPTIONS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.device.compiler._compile", lambda lower: lower().compile(OPTIONS))
        yield


# What a folder's tests share is expensive here: a server, compiled programs.
_TOGETHER = ("tests/e2e/", "tests/engine/", "tests/image/")
_APART = "tests/e2e/test_real_model.py"


class _Sharing(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the processes that run the tests a file at a time, or a folder that shares much."""

    def _split_scope(self, nodeid: str) -> str:
        path: str = nodeid.partition("::")[0]
        if path == _APART:
            return path
        return next((folder for folder in _TOGETHER if path.startswith(folder)), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Sharing(config, log)

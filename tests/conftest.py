"""Settings of every test run: the same examples each time, a CPU unless a chip was asked for."""

import os

import hypothesis
import pytest

# The same examples everywhere; time limits are pytest's, for machines differ too much for others.
hypothesis.settings.register_profile("jaxserve", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxserve")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports jax. Subprocesses inherit it.
    if config.option.markexpr != "accelerator":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


# What these folders' tests share is expensive: a server, compiled programs.
_TOGETHER = ("e2e", "engine", "image")
_APART = "test_real_model.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, keep such a folder in one of them, else a file."""
    for item in items:
        folder = item.path.parent.name
        together = folder in _TOGETHER and item.path.name != _APART
        item.add_marker(pytest.mark.xdist_group(folder if together else str(item.path)))

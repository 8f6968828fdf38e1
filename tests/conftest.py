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

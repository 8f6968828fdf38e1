"""One runner a kind of model for the whole session, for compiling is what takes the time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxserve.device.compiler import on_compile
from tests.checkpoints import Kind
from tests.engine.tiny import PLAN, TinyModel, make_tiny_model

TinyModels = Callable[[Kind], TinyModel]


@pytest.fixture(scope="session")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The kind with most to get wrong, with a program for every number of rows."""
    return make_tiny_model(tmp_path_factory.mktemp("e2b"), "e2b")


@pytest.fixture(scope="session")
def tiny_models(e2b: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Models by kind, made when first asked for; all but e2b have two programs."""
    models: dict[Kind, TinyModel] = {"e2b": e2b}
    few = replace(PLAN, row_buckets=(8,), extend_buckets=PLAN.extend_buckets[1:])

    def get(kind: Kind) -> TinyModel:
        if kind not in models:
            folder = tmp_path_factory.mktemp(kind)
            models[kind] = make_tiny_model(folder, kind, plan=few)
        return models[kind]

    return get


@pytest.fixture(scope="session")
def num_compiles() -> Callable[[], int]:
    """How many programs this process has compiled since the session's first use of this."""
    compiled: list[None] = []
    on_compile(lambda: compiled.append(None))
    return lambda: len(compiled)

"""One byte model for all tests, and applications over scripted engines."""

from collections.abc import Callable

import pytest
from starlette.applications import Starlette

from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from tests.fake_engine import FakeEngine, byte_model

Serve = Callable[..., Starlette]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return byte_model(tmp_path_factory.mktemp("byte_model"))


@pytest.fixture
def serve(model: ServedModel) -> Serve:
    def serve(engine: FakeEngine, config: HttpConfig | None = None) -> Starlette:
        return build_app(engine, lambda: model, config=config or HttpConfig(), metrics=Metrics())

    return serve


@pytest.fixture(scope="session")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return byte_model(tmp_path_factory.mktemp("gemma4"), max_model_len=100_000, is_gemma4=True)


@pytest.fixture
def serve_gemma4(gemma4: ServedModel) -> Serve:
    """Serve a model with the markers of Gemma 4's turns."""

    def serve(
        engine: FakeEngine, config: HttpConfig | None = None, metrics: Metrics | None = None
    ) -> Starlette:
        return build_app(
            engine, lambda: gemma4, config=config or HttpConfig(), metrics=metrics or Metrics()
        )

    return serve

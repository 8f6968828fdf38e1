"""The ASGI application, wired from its parts."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxserve.errors import ApiError
from jaxserve.http.auth import AuthMiddleware
from jaxserve.http.config import HttpConfig
from jaxserve.http.errors import on_api_error, on_http_exception
from jaxserve.http.generation import Engine
from jaxserve.http.middleware import RequestMiddleware
from jaxserve.http.routes import Endpoints
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics


def build_app(
    engine: Engine,
    model: Callable[[], ServedModel | None],
    *,
    config: HttpConfig,
    metrics: Metrics,
) -> Starlette:
    """Build the application; `model` gives None until the model is loaded."""
    endpoints = Endpoints(engine, model, config=config, metrics=metrics)
    app = Starlette(
        routes=endpoints.routes(),
        middleware=_middleware(config, metrics),
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_exception},
    )
    # A redirect would turn a client's POST into a GET.
    app.router.redirect_slashes = False
    return app


def _middleware(config: HttpConfig, metrics: Metrics) -> list[Middleware]:
    """List what wraps the routes, the outermost first."""
    layers = []
    if config.cors_origins:
        # Outside of what answers a bug: a page is to read that answer too.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    layers.append(Middleware(RequestMiddleware, metrics=metrics))
    if config.api_keys:
        # The whole configuration, because it does not show the keys where this is printed.
        layers.append(Middleware(AuthMiddleware, config=config))
    return layers

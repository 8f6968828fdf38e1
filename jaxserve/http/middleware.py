"""What every HTTP request gets: an id, a metric, a line of the log, and an answer even to a bug.

Pure ASGI, since Starlette's BaseHTTPMiddleware hides disconnects from the endpoints.
"""

import asyncio
import logging
import uuid

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve import logs
from jaxserve.errors import ApiError, EngineError, UnavailableError
from jaxserve.http.errors import INTERNAL_ERROR_MESSAGE, error_response
from jaxserve.metrics import Metrics

logger = logging.getLogger(__name__)

# What nginx logs for a client that closed before its answer: there is nobody to send it to.
_CLIENT_GONE = 499

SUMMARY = "jaxserve.summary"
"""Where a scope has what tells, at the end, of the sequences that it had generated."""


class RequestMiddleware:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope; only HTTP ones are touched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # The endpoint may have found an id in the body.
                request_id = logs.request_id.get().encode()
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        async def fail(error: ApiError) -> None:
            if status == _CLIENT_GONE:
                await error_response(error)(scope, receive, send_with_id)

        token = logs.request_id.set(header_request_id(scope) or uuid.uuid4().hex)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            # The server ends, and this is not done: its body never came, or nobody reads it.
            await fail(UnavailableError("The server is stopping."))
        except Exception:  # the last place where a bug can still be answered in the API's shape
            logger.exception("a request broke")
            await fail(EngineError(INTERNAL_ERROR_MESSAGE))
        finally:
            endpoint = _endpoint(scope)
            if SUMMARY in scope:
                logger.info("finished: %s %d %s", endpoint, status, scope[SUMMARY]())
            logs.request_id.reset(token)
            self._metrics.observe_http(endpoint, status)


def header_request_id(scope: Scope) -> str | None:
    """Return the id that the client gave in a header, if it can be one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and logs.is_request_id(text := value.decode("latin-1")):
            return str(text)
    return None


def _endpoint(scope: Scope) -> str:
    """The route's own path, so that clients cannot invent label values."""
    route = scope.get("route")
    # A parameter's converter is the router's own.
    return route.path_format if isinstance(route, Route) else "unknown"

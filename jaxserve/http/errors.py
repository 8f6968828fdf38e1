"""The one translation of errors into HTTP responses."""

import logging
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxserve.errors import (
    ApiError,
    InvalidRequestError,
    InvariantError,
    MethodNotAllowedError,
    NotFoundError,
)
from jaxserve.openai.responses import error_body

logger = logging.getLogger(__name__)

# Their messages quote the request: no line of the log holds text of a prompt, or breaks for a path.
_QUOTING = (InvalidRequestError, NotFoundError, MethodNotAllowedError)

INTERNAL_ERROR_MESSAGE = "An internal error ended this request; the server's log has the details."


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """Write an error in OpenAI's shape, with Retry-After where it has one."""
    if isinstance(error, _QUOTING):
        logger.info("refused: %d %s, param %.100r", error.status, error.code, error.param)
    else:
        logger.info("refused: %d %s: %s", error.status, error.code, error.message)
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return Response(error_body(error), error.status, headers=headers, media_type="application/json")


async def on_api_error(request: HttpRequest, error: Exception) -> Response:
    """Answer an ApiError that an endpoint raised."""
    if not isinstance(error, ApiError):
        raise InvariantError(f"registered for ApiError, called with {type(error).__name__}")
    return error_response(error)


async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
    """Answer what the router raises: 405 for a path it knows, 404 otherwise."""
    if not isinstance(error, HTTPException):
        raise InvariantError(f"registered for HTTPException, called with {type(error).__name__}")
    # As it was sent: what is encoded may be anything, and a log's reader is a terminal.
    path, method = quote(request.scope["path"]), request.method
    if error.status_code == MethodNotAllowedError.status:
        refusal: ApiError = MethodNotAllowedError(f"{method} is not allowed on {path}.")
    else:
        refusal = NotFoundError(f"There is no {path} on this server.")
    return error_response(refusal, headers=dict(error.headers or {}))

"""Who may call: with keys configured, everything but the probes needs one of them.

Pure ASGI, in front of the routes: what is not listed here is closed, routes to come as well.
"""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import AuthenticationError
from jaxserve.http.config import HttpConfig
from jaxserve.http.errors import error_response

# What load balancers and orchestrators ask; neither tells anything of the model or its users.
OPEN_PATHS = frozenset({"/health", "/live"})


class AuthMiddleware:
    """Lets requests in that bring a key as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        self._keys = [key.strip().encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] != "http" or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
            return
        response = error_response(AuthenticationError(refusal), {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        # A browser asks with OPTIONS before it sends a key, and no route does anything for it.
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not key.strip():
            return "This server needs an API key: send it as the header Authorization: Bearer KEY."
        # All are compared, and each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return None if any(matches) else "The API key is not known."

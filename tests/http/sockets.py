"""The application on a loopback socket, under uvicorn with the project's own protocol."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from jaxserve.http.protocol import HttpProtocol


@asynccontextmanager
async def running(app: ASGIApp) -> AsyncIterator[int]:
    """Serve on a free port; yields it. What is not done at the end is cut off at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=0,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()

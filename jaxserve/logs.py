"""The one place where log handlers are made, and the request id that every line carries.

No line holds text of a prompt or of an answer, at any level.
"""

import logging
import re
import sys
from contextvars import ContextVar
from typing import TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Id of the HTTP request that the current task serves."""

MAX_REQUEST_ID_CHARS = 128
REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}")
"""What a line and a header can hold: visible ASCII characters, no space."""

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"


def is_request_id(text: str) -> bool:
    """Tell whether a text may stand as a request's id in a header and in the log."""
    return REQUEST_ID.fullmatch(text) is not None


class _AddRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Write the project's and uvicorn's lines from `level` on, and everybody's warnings.

    They go to `stream`, or to stderr.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_AddRequestId())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("jaxserve", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    # One line per finished request says more than uvicorn's line per connection.
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)

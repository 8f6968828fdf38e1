import io
import logging
from collections.abc import Iterator

import pytest

from jaxserve import logs


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = ("jaxserve", "uvicorn", "uvicorn.access")
    levels = {name: logging.getLogger(name).level for name in names}
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)


def test_lines_carry_the_request_id() -> None:
    stream = io.StringIO()
    logs.configure("info", stream)
    token = logs.request_id.set("abc")
    logging.getLogger("jaxserve.x").info("inside")
    logs.request_id.reset(token)
    logging.getLogger("jaxserve.x").info("outside")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("jaxserve.x [abc] inside")
    assert second.endswith("jaxserve.x [-] outside")


def test_only_warnings_of_others() -> None:
    stream = io.StringIO()
    logs.configure("DEBUG", stream)
    logging.getLogger("jaxserve").debug("ours")
    logging.getLogger("other").info("theirs")
    logging.getLogger("uvicorn.access").info("a request")
    logging.getLogger("other").warning("trouble")
    assert len(stream.getvalue().splitlines()) == 2


def test_configuring_again_replaces() -> None:
    stream = io.StringIO()
    logs.configure("INFO", io.StringIO())
    logs.configure("INFO", stream)
    logging.getLogger("jaxserve").info("once")
    assert len(stream.getvalue().splitlines()) == 1

"""Work that would hold every stream up, on one of a few worker threads. Event loop only."""

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

T = TypeVar("T")

# Tokenizing takes 1 to 2 µs a character, a worker thread 0.1 ms; every stream waits meanwhile.
INLINE_COST = 1_000

MAX_WORKERS = 2
"""Tokenizing takes 100 bytes a character: a flood of long texts queues for these threads."""

_limiters = {is_foreign: RunVar[CapacityLimiter](f"aside {is_foreign}") for is_foreign in (0, 1)}


async def run_aside(work: Callable[[], T], cost: int, *, is_foreign: bool = False) -> T:
    """Do something that takes as long as tokenizing `cost` characters.

    `is_foreign`: a request's own program, which gets threads that nobody else waits for.
    """
    if cost < INLINE_COST and not is_foreign:
        return work()
    return await anyio.to_thread.run_sync(work, limiter=limiter(is_foreign=is_foreign))


def limiter(*, is_foreign: bool = False) -> CapacityLimiter:
    """Return what bounds the threads in this event loop."""
    variable = _limiters[is_foreign]
    try:
        return variable.get()
    except LookupError:
        variable.set(CapacityLimiter(MAX_WORKERS))
        return variable.get()

"""Work that would hold every stream up, on one of a few worker threads. Event loop only."""

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

T = TypeVar("T")

# Tokenizing takes 1 to 2 µs a character, a worker thread 0.1 ms; every stream waits meanwhile.
INLINE_COST = 1_000

_MAX_WORKERS = 2
"""Tokenizing takes 100 bytes a character: a flood of long texts queues for these threads."""

_limiter: RunVar[CapacityLimiter] = RunVar("aside")


async def run_aside(work: Callable[[], T], cost: int) -> T:
    """Do something that takes as long as tokenizing `cost` characters."""
    if cost < INLINE_COST:
        return work()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(_MAX_WORKERS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, limiter=limiter)

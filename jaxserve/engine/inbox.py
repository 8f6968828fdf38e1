"""The one way into the device thread: commands from any thread, taken in order.

It owns the queue and whether anybody still takes from it; it does not know what commands mean. A
closed inbox refuses commands, so that each one is either taken, returned by `close`, or known by
its sender to be refused: none is lost.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.types import EndedBy, GenerationRequest

if TYPE_CHECKING:
    from jaxserve.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Generate this sequence. `arrival_s` is in seconds of the engine's clock."""

    request: GenerationRequest
    arrival_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End this sequence now; no effect on one that has ended."""

    request_id: str
    reason: EndedBy = "abort"


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Let the scheduler do something between two steps; `answer` gets what comes of it."""

    run: "Callable[[Scheduler], Any]"
    answer: Future[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop once no sequence is live."""


Command = Submit | Abort | Ask | Stop


class Inbox:
    """A queue with one taker, which may sleep on it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._is_closed = False

    def put(self, *commands: Command) -> bool:
        """Queue commands; False where the inbox is closed and all of them are refused."""
        with self._changed:
            if self._is_closed:
                return False
            self._commands += commands
            self._changed.notify()
            return True

    def take(self, *, block: bool) -> list[Command]:
        """Return all queued commands; with `block` sleep until there is one."""
        with self._changed:
            while block and not self._commands:
                self._changed.wait()
            commands, self._commands = self._commands, []
            return commands

    def close(self) -> list[Command]:
        """Refuse commands from now on; return those that were never taken."""
        with self._changed:
            self._is_closed = True
            commands, self._commands = self._commands, []
            return commands

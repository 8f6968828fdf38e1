"""How far a long job is: one redrawn bar on a terminal, otherwise a log line for each tenth.

And what its parts took.
"""

import logging
import sys
import time
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

_REDRAW_INTERVAL_S = 0.1
_BAR_WIDTH = 30


class Progress:
    """Counts up to `total` on stderr. A context manager: leaving it ends the terminal's line."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._logged_tenths = 0
        self._redraw_at = 0.0
        self._on_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._on_terminal:
            sys.stderr.write("\n")

    def advance(self, amount: int) -> None:
        """Count `amount` more as done."""
        self.reach(self._done + amount)

    def reach(self, done: int) -> None:
        """Count `done` as done."""
        self._done = done
        if self._on_terminal:
            self._redraw()
        else:
            self._log()

    def _redraw(self) -> None:
        now = time.monotonic()
        if now >= self._redraw_at or self._done >= self._total:
            self._redraw_at = now + _REDRAW_INTERVAL_S
            bar = "█" * (_BAR_WIDTH * self._done // self._total)
            percent = 100 * self._done // self._total
            sys.stderr.write(f"\r{self._label}: {bar:░<{_BAR_WIDTH}} {percent:3d} %")
            sys.stderr.flush()

    def _log(self) -> None:
        tenths = 10 * self._done // self._total
        if tenths > self._logged_tenths:
            self._logged_tenths = tenths
            logger.info("%s: %d %%", self._label, 10 * tenths)


class Phases:
    """What the parts of a job took: each begins where the one before ends."""

    def __init__(self, started_s: float) -> None:
        """`started_s` is when the first began, by `time.perf_counter`."""
        self._ended_s = started_s
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Note that a part has ended, and how it is called."""
        now_s = time.perf_counter()
        self.seconds[name] = now_s - self._ended_s
        self._ended_s = now_s

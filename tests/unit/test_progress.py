"""Progress on a terminal and in a log."""

import io
import logging

import pytest

from jaxserve.progress import Phases, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("working", 200) as progress:
        for _ in range(200):
            progress.advance(1)
    lines = terminal.getvalue().split("\r")
    assert lines[-1] == "working: " + "█" * 30 + " 100 %\n"
    assert len(lines) < 10  # however often it advances, it is redrawn some times a second


def test_elsewhere_each_tenth_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Progress("working", 40) as progress:
        for _ in range(40):
            progress.advance(1)
    assert [record.getMessage() for record in caplog.records] == [
        f"working: {percent} %" for percent in range(10, 101, 10)
    ]


def test_phases_leave_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases(started_s=10.0)
    for now_s, name in ((11.0, "one"), (11.5, "two"), (14.0, "three")):
        monkeypatch.setattr("time.perf_counter", lambda now_s=now_s: now_s)
        phases.end(name)
    assert phases.seconds == {"one": 1.0, "two": 0.5, "three": 2.5}

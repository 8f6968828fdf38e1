"""The file of scripts/revalidate.py's results, from which the next run with it goes on."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Record:
    """Answers by their case; each is in the file, which is whole at any time, once it is added.

    An answer that is a fault of the process ("error", and no "fits") is kept for the reader only.
    """

    def __init__(self, out: Path, mode: str, device: dict[str, Any]) -> None:
        """Go on with the file if there is one, else make it; exits where it is of something else.

        `device` is what has to be the same for answers to belong together.
        """
        self._out = out
        self._body: dict[str, Any] = {
            "mode": mode,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device,
            "results": [],
            "probes": [],
            "capacity": [],
        }
        if out.exists():
            body = _read(out)
            for name in ("mode", "device"):
                if body[name] != self._body[name]:
                    sys.exit(
                        f"{out} is of {_differences(body[name], self._body[name])}: delete it, or"
                        " name another file"
                    )
            self._body = body
        self._save()

    def __len__(self) -> int:
        return sum(_is_answer(e) for name in ("results", "probes") for e in self._body[name])

    def find(self, case: dict[str, Any]) -> dict[str, Any] | None:
        """Return what a case was answered, without the case."""
        for entry in (*self._body["results"], *self._body["probes"]):
            if entry["case"] == case and _is_answer(entry):
                return {name: value for name, value in entry.items() if name != "case"}
        return None

    def add(self, case: dict[str, Any], answer: dict[str, Any]) -> None:
        """Keep an answer, in place of one that the case had."""
        self._put("probes" if case["is_probe"] else "results", {"case": case, **answer})

    def add_capacity(self, entry: dict[str, Any]) -> None:
        """Keep what a search found, in place of what it found before."""
        self._put("capacity", entry)

    def _put(self, name: str, entry: dict[str, Any]) -> None:
        others = [other for other in self._body[name] if other["case"] != entry["case"]]
        self._body[name] = [*others, entry]
        self._save()

    def _save(self) -> None:
        partial = self._out.with_name(self._out.name + ".partial")
        try:
            partial.write_text(json.dumps(self._body, indent=1), encoding="utf-8")
            partial.replace(self._out)
        except OSError as error:
            sys.exit(f"--out {self._out} cannot be written: {error}")


def _is_answer(entry: dict[str, Any]) -> bool:
    return "error" not in entry or "fits" in entry


def _read(out: Path) -> dict[str, Any]:
    try:
        body: object = json.loads(out.read_bytes())
    except (OSError, ValueError) as error:
        sys.exit(f"--out {out} is there and cannot be gone on with: {error}")
    names = ("mode", "device", "results", "probes", "capacity")
    if not isinstance(body, dict) or any(name not in body for name in names):
        sys.exit(f"--out {out} is there and holds no results of this script")
    return body


def _differences(theirs: object, ours: object) -> str:
    """Say of what else answers are, part by part."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return f"{theirs!r}, not {ours!r}"
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    parts = (f"{name} {theirs.get(name)!r}, not {ours.get(name)!r}" for name in names)
    return "; ".join(parts)

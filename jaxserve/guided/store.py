"""Compiled grammars as files: written whole or not at all, read only if whole.

A file that cannot be read, is of another compiler or was damaged is as good as absent. Any process.
"""

import contextlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.guided.tables import Grammar, HostGrammar, TokenTables

MAX_FOLDER_BYTES = 1 << 30
_SUFFIX = ".grammar"
_LOOSENED = "loosened"
_ARRAYS = tuple(name for name in TokenTables.__dataclass_fields__ if name != _LOOSENED)


class GrammarStore:
    """A folder of grammars by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Grammar | None:
        """Return a grammar, None where there is none that is whole."""
        path = self._folder / (name + _SUFFIX)
        try:
            # A file that is broken would stay open otherwise.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                loosened = tuple(map(str, json.loads(str(file[_LOOSENED]))))
                if "host" in file:
                    return HostGrammar(**json.loads(str(file["host"])), loosened=loosened)
                arrays = {array: file[array] for array in _ARRAYS}
                tables = TokenTables(**arrays, loosened=loosened)
            _check(tables)
            tables.freeze()
        except (
            *(OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile),
            *(NotImplementedError, RuntimeError),  # what zipfile says of odd flags
        ):
            return None
        with contextlib.suppress(OSError):  # whoever may only read it leaves no trace
            os.utime(path)
        return tables

    def write(self, name: str, grammar: Grammar) -> bool:
        """Keep a grammar; False where the folder cannot be written to."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                arrays: dict[str, Any] = {_LOOSENED: np.array(json.dumps(grammar.loosened))}
                if isinstance(grammar, HostGrammar):
                    text = json.dumps({"text": grammar.text, "reason": grammar.reason})
                    arrays["host"] = np.array(text)
                else:
                    arrays |= grammar.arrays
                np.savez(file, **arrays)
            os.replace(file.name, self._folder / (name + _SUFFIX))
            self._make_room()
        except OSError:
            return False
        return True

    def _make_room(self) -> None:
        """Delete what was not used for longest."""
        files = [(path, path.stat()) for path in self._folder.glob(f"*{_SUFFIX}")]
        total = sum(stat.st_size for _, stat in files)
        for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
            if total <= MAX_FOLDER_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size


def _check(tables: TokenTables) -> None:
    """Refuse arrays that do not belong together (ValueError)."""
    num_states, num_classes = tables.next_SC.shape
    num_masks, num_words = tables.masks_DW.shape
    per_state = (
        tables.mask_id_S,
        tables.accepting_S,
        tables.forced_byte_S,
        tables.forced_next_S,
    )
    whole = (
        all(array.shape == (num_states,) for array in per_state)
        and tables.class_of_V.ndim == 1
        and num_words * 32 >= len(tables.class_of_V)
        and int(tables.class_of_V.max(initial=0)) < num_classes
        and int(tables.next_SC.max(initial=-1)) < num_states
        and int(tables.mask_id_S.max(initial=0)) < num_masks
    )
    if not whole:
        raise ValueError("arrays of different grammars")

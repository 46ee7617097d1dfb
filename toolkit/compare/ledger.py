"""The ledger: one JSON line a finished trial, on disk before the next one starts.

Killed at any byte it can be read again: a last line that was cut off is dropped, and its trial is run again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows of finished trials by trial id."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """Trial id to row; of a trial that was run again, the last."""
        rows = (json.loads(line) for line in self._whole_lines())
        return {row["trial"]: row for row in rows}

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, flushed to the disk when this returns."""
        self._drop_torn_line()
        with self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        return self.path.read_bytes().split(b"\n")[:-1]

    def _drop_torn_line(self) -> None:
        """A line without its newline was cut off by a kill; appending to it would spoil the next one too."""
        whole = sum(len(line) + 1 for line in self._whole_lines())
        if self.path.exists() and self.path.stat().st_size > whole:
            os.truncate(self.path, whole)

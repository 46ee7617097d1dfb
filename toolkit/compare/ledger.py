"""The ledger: one JSON line a finished trial, on disk before the next one starts.

Killed at any byte it can be read again: a last line that was cut off is dropped, and its trial is run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

LOCK_FILE = "comparison.lock"
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


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a comparison's folder while it runs; the kernel lets go of it when this process ends, however it does.

    Raises ToolkitError while another process runs the same comparison.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise ToolkitError(
                f"{folder} holds a comparison that is still going (process {holder})",
                hint="wait for it, or name another folder: `--output DIR`",
            ) from None
        except OSError:  # a file system without locks
            pass
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)

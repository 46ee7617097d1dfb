"""Lines of a data file, and how a mistake in one of them is said: file, place, cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

Placed = tuple[str, Any, int]
"""A place ("row 250, line 250"), what stands there, and about how many bytes were read up to its end."""


def failure_at(path: Path, place: str, why: str, *, hint: str | None = None) -> ToolkitError:
    return ToolkitError(f"{path}: {place}: {why}", hint=hint)


class Lines:
    """The lines of a UTF-8 file, decoded one by one so that a wrong byte has a line number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                self.bytes_read += len(line)
                yield self._decoded(line, number)

    def _decoded(self, line: bytes, number: int) -> str:
        try:
            return line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            why = f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8"
            raise failure_at(self.path, f"line {number}", why, hint="save the file as UTF-8") from None


def json_failure(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON: {error.msg} (column {error.colno})"
    return "malformed JSON: " + ("nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0])

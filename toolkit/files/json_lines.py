"""JSON lines: one object per line, appended by a process that may be killed at any byte.

A last line without its line feed was cut off and is left out; any other line that is no object is an error, with its
number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from toolkit.errors import ToolkitError
from toolkit.files.json_files import as_mapping, parse_json
from toolkit.files.reading import MAX_TEXT_BYTES, OverLimit, open_file
from toolkit.files.value_limits import RECORDS, Limits
from toolkit.units import MIB

MAX_LINES_BYTES = 4096 * MIB


class JsonLine(NamedTuple):
    """One complete line."""

    number: int
    """From 1, as an editor counts."""
    content: dict[str, Any]


def read_json_lines(
    path: Path,
    *,
    limits: Limits = RECORDS,
    max_bytes: int = MAX_LINES_BYTES,
    max_line_bytes: int = MAX_TEXT_BYTES,
    max_lines: int | None = None,
    allow_nan: bool = False,
    hint: str | None = None,
) -> Iterator[JsonLine]:
    """Yield the complete lines of a file, without blank ones.

    Raises ToolkitError as `open_file` does, and with `hint` for a line that is not a JSON object; OverLimit for a
    larger file or line.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OverLimit(f"{path} has more than {max_bytes // MIB} MiB, more than any file of its kind")
        if max_lines is not None and _count_lines(file) > max_lines:  # before any is parsed
            raise OverLimit(f"{path} has more than {max_lines:,} lines, more than any file of its kind")
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                raise OverLimit(f"{line_name(path, number)}: longer than {max_line_bytes:,} bytes")
            if not line.endswith(b"\n"):
                return
            if line.strip():
                name = line_name(path, number)
                try:
                    value = parse_json(line.decode(), name, limits=limits, allow_nan=allow_nan, is_line=True)
                    content = as_mapping(value, name)
                except UnicodeDecodeError as error:
                    raise ToolkitError(f"{name}: not UTF-8 text (byte {error.start})", hint=hint) from None
                except ToolkitError as error:
                    raise type(error)(error.message, hint=error.hint or hint) from None
                yield JsonLine(number, content)


def _count_lines(file: BinaryIO) -> int:
    count = sum(block.count(b"\n") for block in iter(lambda: file.read(MIB), b""))
    file.seek(0)
    return count


def line_name(path: Path, number: int) -> str:
    """Return what messages call a line."""
    return f"{path}, line {number}"


def complete_bytes(path: Path) -> int:
    """Return the size of a file without a last line that was cut off; 0 without a file."""
    if not path.exists():
        return 0
    with open_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - MIB)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0

"""JSON files and JSON lines, read with limits on size, depth and numbers.

Lines are appended by a process that may be killed at any byte: a last line without its line feed was cut off and is
left out; any other line that is no object is an error, with its number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import OverLimit, ToolkitError
from toolkit.files.reading import MAX_TEXT_BYTES, open_file, read_text
from toolkit.files.value_limits import RECORDS, Limits, check_values
from toolkit.units import MIB

MAX_LINES_BYTES = 4096 * MIB


def read_json(path: Path, *, limits: Limits = RECORDS, max_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False) -> Any:
    """Return the value in a JSON file. Raises ToolkitError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path), limits=limits, allow_nan=allow_nan)


def read_json_object(
    path: Path, *, limits: Limits = RECORDS, max_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False
) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ToolkitError as `read_json` does, and for another type."""
    return as_mapping(read_json(path, limits=limits, max_bytes=max_bytes, allow_nan=allow_nan), str(path))


def parse_json(
    text: str, name: str, *, limits: Limits = RECORDS, allow_nan: bool = False, is_line: bool = False
) -> Any:
    """Return the value in a text that messages call `name`; `is_line` where that names a line already.

    Raises ToolkitError for malformed JSON, with its line; for more or deeper values than `limits`; for integers beyond
    64 bits; and, unless `allow_nan`, for NaN and infinities.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        place = name if is_line else f"{name}, line {error.lineno}"
        raise ToolkitError(f"{place}: not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        limits.check(name, values=0, depth=limits.depth + 1)
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ToolkitError(f"{name} is not JSON: {str(error).split(';')[0]}") from None
    check_values(content, name, limits, allow_nan=allow_nan)
    return content


def as_mapping(content: Any, name: str) -> dict[str, Any]:
    """Return a value that must be keys and values. Raises ToolkitError for another type."""
    if not isinstance(content, dict):
        raise ToolkitError(f"{name} holds {type(content).__name__}, expected keys and values")
    return content


def read_json_lines(
    path: Path, *, max_line_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False, hint: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete lines of a file, without blank ones: what messages call the line, and its object.

    Raises ToolkitError as `open_file` does, and with `hint` for a line that is not a JSON object; OverLimit for a
    larger file or line.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:
            raise OverLimit(f"{path} has more than {MAX_LINES_BYTES // MIB} MiB, more than any file of its kind")
        for number, line in enumerate(iter(lambda: file.readline(max_line_bytes + 1), b""), start=1):
            name = f"{path}, line {number}"
            if len(line) > max_line_bytes:
                raise OverLimit(f"{name}: longer than {max_line_bytes:,} bytes")
            if not line.endswith(b"\n"):
                return
            if line.strip():
                try:
                    content = as_mapping(parse_json(line.decode(), name, allow_nan=allow_nan, is_line=True), name)
                except UnicodeDecodeError as error:
                    raise ToolkitError(f"{name}: not UTF-8 text (byte {error.start})", hint=hint) from None
                except ToolkitError as error:
                    raise type(error)(error.message, hint=error.hint or hint) from None
                yield name, content


def complete_bytes(path: Path) -> int:
    """Return the size of a file without a last line that was cut off; 0 without a file."""
    if not path.exists():
        return 0
    with open_file(path) as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))

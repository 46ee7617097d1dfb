"""JSON files, read with limits on size, depth and numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.reading import MAX_TEXT_BYTES, read_text
from toolkit.files.value_limits import RECORDS, Limits, check_values


def read_json(path: Path, *, limits: Limits = RECORDS, max_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False) -> Any:
    """Return the value in a JSON file. Raises ToolkitError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path), limits=limits, allow_nan=allow_nan)


def read_json_object(
    path: Path, *, limits: Limits = RECORDS, max_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False
) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ToolkitError as `read_json` does, and for another type."""
    return as_mapping(read_json(path, limits=limits, max_bytes=max_bytes, allow_nan=allow_nan), str(path))


def read_json_object_if_present(
    path: Path, *, limits: Limits = RECORDS, allow_nan: bool = False
) -> dict[str, Any] | None:
    """Return the object in a JSON file, None where there is no file. Raises ToolkitError as `read_json_object` does."""
    return read_json_object(path, limits=limits, allow_nan=allow_nan) if os.path.lexists(path) else None


def check_json(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> None:
    """Raise ToolkitError for a file that is no JSON at all; its values are not read (a tokenizer's may be any)."""
    try:
        json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as error:
        raise ToolkitError(f"{path} is not JSON: {str(error)[:80]}", hint="copy or download it again") from None


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

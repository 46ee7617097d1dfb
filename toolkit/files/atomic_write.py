"""Write a file completely or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write text as `write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write under a temporary name, then rename: a reader sees the old file or the new one.

    Creates the folder if it is missing. Raises OSError, and leaves no temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

"""Write a file completely or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name, then rename it: a reader sees the old file or the new one.

    Creates the folder if it is missing. Raises OSError, and leaves no temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

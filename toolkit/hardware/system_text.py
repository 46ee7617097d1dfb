"""Text of this system's files and programs; None where there is none: a node without a program is not an error.

>>> output_of("no-such-program") is None
True
"""

import contextlib
import subprocess
from pathlib import Path

PROGRAM_SECONDS = 20


def output_of(*command: str) -> str | None:
    """Return a program's stripped stdout; None if it is not installed, fails, or takes longer than 20 s."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ended = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=PROGRAM_SECONDS, check=True
        )
        return ended.stdout.strip()
    return None


def text_of(path: Path) -> str | None:
    """Return a small text file, stripped; None if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip()
    return None


def entries_of(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted; nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []

"""Reading a file that anyone may have written: only regular files, only up to a size, and errors that name the file."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from toolkit.errors import OverLimit, ToolkitError
from toolkit.units import KIB, MIB

MAX_TEXT_BYTES = 64 * MIB
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}


def shareable(text: str) -> str:
    """Return a path or a command with its paths relative to the working directory, or with `~` for the home folder.

    >>> shareable(f"train --dataset {Path.cwd()}/rows.jsonl --model {Path.home()}/models/tiny")
    'train --dataset rows.jsonl --model ~/models/tiny'
    """
    with contextlib.suppress(OSError, RuntimeError):  # a deleted working directory, a user without a home folder
        for folder, instead in ((Path.cwd(), ""), (Path.home(), "~/")):
            if folder != Path(folder.anchor):
                start = re.escape(f"{folder}/")
                text = re.sub(rf"(?<![^\s=]){start}", instead, text)
                text = re.sub(rf"(?<![^\s=])'{start}", f"{instead}'", text)  # no shell expands a quoted `~`
    return text


def user_path(text: str | Path) -> Path:
    """Return a path that a user wrote, with `~` and `~name` expanded: quoted, and in YAML, no shell does it.

    >>> user_path("runs/~first")
    PosixPath('runs/~first')

    Raises ToolkitError for a name that no file can have.
    """
    path = Path(os.path.expanduser(text))  # noqa: PTH111  (`Path.expanduser` raises for an unknown user)
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if "\0" in str(path) or longest > 255 or len(os.fsencode(path)) >= 4096:
        raise ToolkitError(
            f"the path {str(path)[:80]!r} is not one that a file can have",
            hint="names of at most 255 bytes, 4,095 in all, without null bytes",
        )
    return path


def is_file(path: Path) -> bool:
    """Return True for a regular file; False for anything else, and for a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113  (`Path.is_file` raises for a name that is too long)


def expand_home(text: str) -> str:
    """Return a path or another name with `~` expanded if it begins with it; every other text is unchanged."""
    return str(user_path(text)) if text.startswith("~") else text


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises ToolkitError, also for a pipe or a device, which might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would wait for a writer
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ToolkitError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, expected a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return a file's content. Raises ToolkitError as `open_file` does, and OverLimit above `max_bytes`."""
    with open_file(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise _unreadable(path, error) from None
    if len(content) > max_bytes:
        most = f"{max_bytes // MIB} MiB" if max_bytes >= MIB else f"{max_bytes // KIB} KiB"
        raise OverLimit(f"{path} has more than {most}, expected at most that for a file of its kind")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a UTF-8 file's text. Raises ToolkitError as `read_bytes` does, and for bytes that are not UTF-8."""
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ToolkitError(f"{path} is not UTF-8 text: byte {error.start}") from None


def _unreadable(path: Path, error: OSError | ValueError) -> ToolkitError:
    name = str(path)[:1024]
    if isinstance(error, FileNotFoundError):
        return ToolkitError(f"no such file: {name}")
    return ToolkitError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")


def read_folder_name(path: Path) -> str:
    """Return the name in DeepSpeed's `latest`. Raises ToolkitError for anything but the name of a folder beside it."""
    name = read_text(path, max_bytes=256).strip()
    if name in ("", ".", "..") or "/" in name or "\0" in name or not (path.parent / name).is_dir():
        raise ToolkitError(f"{path} holds {name[:40]!r}, expected the name of a folder beside it")
    return name

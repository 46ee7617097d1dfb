"""Paths that a user wrote, paths as others may read them, and the folder of the toolkit's cache."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from toolkit.errors import ToolkitError


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
        what = f"the path {str(path)[:80]!r} is not one that a file can have"
        raise ToolkitError(what, hint="names of at most 255 bytes, 4,095 in all, without null bytes")
    return path


def is_file(path: Path) -> bool:
    """Return True for a regular file; False for anything else, and for a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113  (`Path.is_file` raises for a name that is too long)


def find_file(name: str, near: Path) -> Path | None:
    """Return the file that a configuration names, relative to the working directory or to a folder above `near`."""
    path = user_path(name)
    folders = [Path.cwd(), *near.resolve().parents]
    return next((folder / path for folder in folders if is_file(folder / path)), None)


def expand_home(text: str) -> str:
    """Return a path or another name with `~` expanded if it begins with it; every other text is unchanged."""
    return str(user_path(text)) if text.startswith("~") else text


def cache_folder() -> Path:
    """Return the root of the cache, which may not exist yet.

    `TOOLKIT_CACHE` moves it; by default it follows the XDG base directory specification.
    """
    if named := os.environ.get("TOOLKIT_CACHE"):
        return user_path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "finetune-toolkit"


def home_folder() -> Path:
    """Return the user's home folder; for a user without one, as in some containers, that for temporary files."""
    home = user_path("~")
    return home if home.is_absolute() else Path(tempfile.gettempdir())

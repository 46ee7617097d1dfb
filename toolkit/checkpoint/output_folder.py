"""A new folder that appears complete or not at all: written under a temporary name beside it, then renamed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.hardware.disks import existing_folder, free_bytes
from toolkit.run.resource_exhaustion import is_disk_full
from toolkit.units import gib


def check_empty(out: Path) -> None:
    """Raise ToolkitError if `out` is a file or a folder that holds anything."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ToolkitError(f"{out} already exists and is not empty", hint="name a new folder")


def check_disk_space(out: Path, needed_bytes: int) -> None:
    """Raise ToolkitError if the disk of `out` has fewer free bytes."""
    existing = existing_folder(out)
    free = free_bytes(existing)
    if free < needed_bytes:
        raise ToolkitError(
            f"{existing} has {gib(free)} free, {out} needs about {gib(needed_bytes)}",
            hint="name a folder on another disk",
        )


@contextlib.contextmanager
def temporary_beside(out: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of `out`; whatever is still in it afterwards is removed.

    Raises ToolkitError if the disk cannot be written.
    """
    temporary = out.absolute().with_name(f".exporting-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except BaseException as error:  # torch's zip writer and its distributed checkpoint raise no OSError
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else "No space left on device"
        raise ToolkitError(
            f"{out} cannot be written: {why}; everything written so far was removed",
            hint="free disk space, or name a folder on another disk",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rename_to(out: Path, temporary: Path) -> None:
    """Give the finished folder its name."""
    if out.exists():
        out.rmdir()  # it is empty
    temporary.rename(out)

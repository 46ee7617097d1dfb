"""A new folder that appears complete or not at all: written under a temporary name beside it, then renamed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files.json_files import check_json
from toolkit.files.reading import open_file
from toolkit.hardware.disks import existing_folder, free_bytes
from toolkit.record.resource_exhaustion import is_disk_full
from toolkit.units import MIB, gib

MAX_TOKENIZER_BYTES = 512 * MIB


def check_output(out: Path, *, source: Path) -> None:
    """Raise ToolkitError for an output folder that is used already, that cannot be written, or inside of `source`."""
    try:
        used = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
        inside = out.resolve().is_relative_to(source.resolve())
        if not used and not inside:
            with tempfile.TemporaryDirectory(dir=existing_folder(out), prefix=".write-probe-"):
                pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ToolkitError(f"{out} cannot be written: {why}", hint="name a folder that you can write to") from None
    if used:
        raise ToolkitError(f"{out} already exists and is not empty", hint="name a new folder")
    if inside:
        raise ToolkitError(f"{out} is inside of {source}, which it is made from", hint="name a folder beside it")


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file; one in JSON must be valid. Raises ToolkitError."""
    with open_file(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    if target.suffix == ".json":
        check_json(source, max_bytes=MAX_TOKENIZER_BYTES)


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

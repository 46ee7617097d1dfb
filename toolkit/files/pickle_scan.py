"""What a pickle would import, found without importing any of it.

A pickle is a program: loading it may run any function that it names. `check_pickle` runs that program with inert
stand-ins in place of everything that it names, and refuses the file at the first name that is not on a list.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from toolkit.errors import ToolkitError

ZIP_START = b"PK\x03\x04"
# torch's format before its zip files: five pickles after each other, then raw bytes.
LEGACY_PICKLES = 5
# The pickle of a checkpoint holds names and shapes; its tensors are stored beside it.
MAX_PICKLE_BYTES = 512 * 2**20


class Refused(Exception):
    """The pickle names something that is not on the list."""


class TooLarge(Exception):
    """The pickle is larger than any checkpoint's."""


def check_pickle(path: Path, allowed: Collection[str]) -> None:
    """Refuse a pickle, or a file of `torch.save`, that names anything but `allowed` (`module.name`).

    Raises ToolkitError with the file and the name; OSError if it cannot be read.
    """
    with path.open("rb") as file:
        check_archive(file, allowed, name=str(path))


def check_archive(file: IO[bytes], allowed: Collection[str], *, name: str) -> None:
    """Like `check_pickle`, for an open file that messages call `name`."""
    try:
        for stream in _pickles(file):
            _Scanner(stream, allowed).load()
    except Refused as refused:
        raise ToolkitError(
            f"{name} would run {refused}, which no checkpoint of ours contains",
            hint="do not load it unless you trust who wrote it; then: `--trust-pickle`",
        ) from None
    except TooLarge as error:
        raise ToolkitError(f"{name} has {error}, expected at most {MAX_PICKLE_BYTES:,}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises whatever the opcode at its end leads to
        raise ToolkitError(f"{name} is damaged: {type(error).__name__} in its pickle: {error}") from None


class _Standin:
    """Takes any arguments, items and state, and keeps none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def append(self, _value: Any) -> None:
        """Take an item of a pickled list subclass."""

    def extend(self, _values: Any) -> None:
        """Take the items of a pickled list subclass."""

    def add(self, _value: Any) -> None:
        """Take an item of a pickled set subclass."""


class _Scanner(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], allowed: Collection[str]) -> None:
        super().__init__(stream)
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.allowed:
            raise Refused(f"{module}.{name}")
        return type("Standin", (_Standin,), {})

    def persistent_load(self, _pid: Any) -> Any:
        return _Standin()


def _pickles(file: IO[bytes]) -> Iterator[IO[bytes]]:
    start = file.read(len(ZIP_START))
    file.seek(0)
    if start == ZIP_START:
        yield from _zipped_pickles(file)
        return
    stream = io.BytesIO(file.read(MAX_PICKLE_BYTES + 1))
    size = len(stream.getbuffer())
    if size > MAX_PICKLE_BYTES:
        raise TooLarge("a pickle of more bytes")
    for _ in range(LEGACY_PICKLES):
        yield stream
        if stream.tell() == size:
            return


def _zipped_pickles(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """torch reads the one `data.pkl`; every file that is a pickle by name is checked."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith((".pkl", ".pickle")):
                if entry.file_size > MAX_PICKLE_BYTES:
                    raise TooLarge(f"a pickle of {entry.file_size:,} bytes ({entry.filename})")
                yield io.BytesIO(archive.read(entry))

"""What a pickle would import, found without importing any of it.

A pickle is a program: loading it may run any function that it names. `check_content` runs that program with inert
stand-ins in place of everything that it names, and refuses the file at the first name that is not on a list.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

from toolkit.errors import ToolkitError
from toolkit.files.reading import open_file
from toolkit.files.torch_archive import NotTorchs, read_pickle

# The pickle of a checkpoint holds names and shapes; its tensors are stored beside it.
MAX_PICKLE_BYTES = 512 * 2**20


class Refused(Exception):
    """The pickle names something that is not on the list."""


def pickle_in(path: Path, *, bare: bool = False) -> bytes:
    """Return the pickle in a file of `torch.save`, or (`bare`) of `pickle.dump`. Raises ToolkitError."""
    with open_file(path) as file:
        return pickle_in_open_file(file, name=str(path), bare=bare)


def pickle_in_open_file(file: IO[bytes], *, name: str, bare: bool = False) -> bytes:
    """Like `pickle_in`, for an open file that messages call `name`."""
    try:
        content = file.read(MAX_PICKLE_BYTES + 1) if bare else read_pickle(file, max_bytes=MAX_PICKLE_BYTES)
    except NotTorchs as error:
        raise ToolkitError(f"{name} is no file of torch.save: {error}", hint="copy or download it again") from None
    except OSError as error:
        raise ToolkitError(f"{name} cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_PICKLE_BYTES:
        raise ToolkitError(f"{name} has more than {MAX_PICKLE_BYTES:,} bytes, more than any checkpoint's")
    return content


def check_content(content: bytes, allowed: Collection[str], *, name: str) -> None:
    """Refuse a pickle that names anything but `allowed` (`module.name`).

    Raises ToolkitError with the file, which messages call `name`, and the name; nothing of it has run.
    """
    try:
        _Scanner(io.BytesIO(content), allowed).load()
    except Refused as refused:
        raise ToolkitError(
            f"{name} would run {refused}, which no checkpoint of ours contains",
            hint="do not load it unless you trust who wrote it; then: `--trust-pickle`",
        ) from None
    except Exception as error:  # a damaged pickle raises whatever the opcode at its end leads to
        why = f"{type(error).__name__} in its pickle: {str(error)[:80]}"
        raise ToolkitError(f"{name} is damaged: {why}", hint="copy or download it again") from None


class _Standin:
    """Takes any arguments, items and state, and keeps none."""

    def __init__(self, *args: Any) -> None:
        accepts = _ARGUMENTS.get(type(self).__name__)
        if accepts is not None and not accepts(args):
            raise Refused(f"{type(self).__name__} with other arguments than any library")

    def __setstate__(self, _state: Any) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass


def _is_latin1(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1")


def _is_empty_array(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and args[1] == (0,)


# Functions that would do more than the libraries use them for: other codecs, and arrays of any size.
_ARGUMENTS: Mapping[str, Callable[[tuple[Any, ...]], bool]] = {
    "_codecs.encode": _is_latin1,
    "numpy._core.multiarray._reconstruct": _is_empty_array,
    "numpy.core.multiarray._reconstruct": _is_empty_array,
}


class _Scanner(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], allowed: Collection[str]) -> None:
        super().__init__(stream)
        self.allowed = allowed
        self.standins: dict[str, type[_Standin]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise Refused(full[:80])
        if full not in self.standins:
            self.standins[full] = type(full, (_Standin,), {})
        return self.standins[full]

    def persistent_load(self, _pid: Any) -> Any:
        return _Standin()

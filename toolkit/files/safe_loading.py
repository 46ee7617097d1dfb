"""Loading a checkpoint's pickles without running anything that they name.

`check_pickles` (in `toolkit.files.checkpoint_pickles`) has read each file before; here torch refuses a second time,
also where a library loads (`load_only_known_classes`), and where a file has changed in between.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, StorageMeta

from toolkit.errors import ToolkitError
from toolkit.files.checkpoint_pickles import DCP_METADATA, DEEPSPEED_STATES, TENSORS, allowed_names, check_pickles
from toolkit.files.pickle_scan import check_content, pickle_in, pickle_in_open_file
from toolkit.files.reading import open_file

DCP_METADATA_FILE = ".metadata"
# A tensor described as fp32 may be stored in 8 bits (torchao's optimizer states).
EXPANSION = 4
# torch then loads with `weights_only=True`, whatever a library asks for.
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint whose pickles name anything unknown, those inside distributed checkpoints too.

    Raises ToolkitError with the file and the name; nothing of it has run.
    """
    check_pickles(folder)
    for metadata in sorted(folder.rglob(DCP_METADATA_FILE)):
        read_dcp_metadata(metadata.parent)


def load_only_known_classes(*, deepspeed: bool) -> None:
    """From here on let no library of this process unpickle anything but tensors and the classes on our lists.

    DeepSpeed and torch's distributed checkpoints load with `weights_only=False`.
    """
    os.environ[_FORCED] = "1"
    if deepspeed:
        torch.serialization.add_safe_globals([_imported(name) for name in DEEPSPEED_STATES - TENSORS])
    setattr(FileSystemReader, "read_metadata", _read_metadata)  # noqa: B010  (mypy takes no assignment to a method)


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Let torch load tensors and plain containers only, in whatever library it is called."""
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = before


def _read_metadata(reader: Any, *_: Any, rank: int | None = None, **__: Any) -> Any:
    """`FileSystemReader.read_metadata` of torch 2.13 with the checked unpickler."""
    path = Path(reader._get_metadata_path(rank))
    metadata = read_dcp_metadata(path.parent, file_name=path.name)
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata


def torch_load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Load a file of `torch.save`, memory-mapped, on the CPU; by default only tensors and plain containers.

    Raises ToolkitError for a damaged file.
    """
    try:
        if trust_pickle:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) & (allowed_names(path) or frozenset())
        with torch.serialization.safe_globals([_imported(name) for name in unknown]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, EOFError, pickle.UnpicklingError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolkitError(f"{path} cannot be loaded: {why[:200]}", hint="copy or download it again") from None


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def read_dcp_metadata(folder: Path, *, file_name: str = DCP_METADATA_FILE, trust_pickle: bool = False) -> Any:
    """Return the metadata of a distributed checkpoint, once the pickles that torch would load with it are checked.

    Raises ToolkitError for a name that is not DCP's, for an entry that lies outside the folder, and for a tensor larger
    than its files.
    """
    path = folder / file_name
    if trust_pickle:
        with open_file(path) as file:
            return pickle.load(file)
    content = pickle_in(path, bare=True)
    check_content(content, DCP_METADATA, name=str(path))
    try:
        metadata = _DcpUnpickler(io.BytesIO(content)).load()
        _check_metadata(path, metadata)
    except ToolkitError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError, pickle.UnpicklingError) as error:
        raise ToolkitError(
            f"{path} is damaged: {type(error).__name__}: {str(error)[:80]}", hint="copy or download it again"
        ) from None
    return metadata


class _DcpUnpickler(pickle.Unpickler):
    """Admits only the classes of `DCP_METADATA`."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in DCP_METADATA:
            raise pickle.UnpicklingError(f"{module}.{name} is no class of a distributed checkpoint's metadata")
        return super().find_class(module, name)


def _check_metadata(path: Path, metadata: Any) -> None:
    folder, root = path.parent, path.parent.resolve()
    sizes: dict[str, int] = {}
    for index, entry in metadata.storage_data.items():
        name = entry.relative_path
        if name not in sizes:
            stored = (folder / name).resolve()
            if not stored.is_relative_to(root):
                raise ToolkitError(f"{path} names {name[:80]}, which is outside its folder")
            with open_file(stored) as file:
                sizes[name] = file.seek(0, 2)
        if not 0 <= entry.offset <= entry.offset + entry.length <= sizes[name]:
            raise ToolkitError(f"{path} names bytes beyond the end of {name}", hint="copy or download it again")
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            _check_entry(folder / name, entry)
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, BytesStorageMetadata):
            needed = described.size.numel() * described.properties.dtype.itemsize
            if not 0 <= needed <= EXPANSION * sum(sizes.values()):
                raise ToolkitError(f"{path}: {str(name)[:80]} would have {needed:,} bytes, more than its files")


def _check_entry(stored: Path, entry: Any) -> None:
    """Check one pickled value, for example a hyperparameter of the optimizer."""
    with open_file(stored) as file:
        file.seek(entry.offset)
        name = f"{stored} at {entry.offset}"
        content = pickle_in_open_file(io.BytesIO(file.read(entry.length)), name=name)
    check_content(content, TENSORS, name=name)

"""Loading a checkpoint's pickles without running anything that they name.

`check_pickles` (in `toolkit.files.checkpoint_pickles`) has read each file before; here torch refuses a second time.
"""

from __future__ import annotations

import importlib
import io
import pickle
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from toolkit.errors import ToolkitError
from toolkit.files.checkpoint_pickles import DCP_METADATA, DEEPSPEED_STATES, TENSORS, check_pickles
from toolkit.files.pickle_scan import check_archive

DCP_METADATA_FILE = ".metadata"


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint whose pickles name anything unknown, those inside distributed checkpoints too.

    Raises ToolkitError with the file and the name; nothing of it has run.
    """
    check_pickles(folder)
    for metadata in sorted(folder.rglob(DCP_METADATA_FILE)):
        read_dcp_metadata(metadata.parent)


def torch_load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Load a file of `torch.save`, memory-mapped, on the CPU; by default only tensors and plain containers."""
    if trust_pickle:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    with _known_classes():
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _known_classes() -> AbstractContextManager[Any]:
    names = [name for name in DEEPSPEED_STATES if name.startswith("deepspeed.")]
    split = [name.rpartition(".") for name in names]
    classes = [getattr(importlib.import_module(module), name) for module, _, name in split]
    allowed: AbstractContextManager[Any] = torch.serialization.safe_globals(classes)
    return allowed


def read_dcp_metadata(folder: Path, *, trust_pickle: bool = False) -> Any:
    """Return the metadata of a distributed checkpoint, once the pickles that torch would load with it are checked.

    Raises ToolkitError for a name that is not DCP's, and for an entry that lies outside the folder.
    """
    path = folder / DCP_METADATA_FILE
    with path.open("rb") as file:
        if trust_pickle:
            return pickle.load(file)
        metadata = _DcpUnpickler(file).load()
    for index, entry in metadata.storage_data.items():
        stored = (folder / entry.relative_path).resolve()
        if not stored.is_relative_to(folder.resolve()):
            raise ToolkitError(f"{path} names {entry.relative_path}, which is outside its folder")
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            _check_entry(stored, entry)
    return metadata


class _DcpUnpickler(pickle.Unpickler):
    """Admits only the classes of `DCP_METADATA`."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in DCP_METADATA:
            raise pickle.UnpicklingError(f"{module}.{name} is no class of a distributed checkpoint's metadata")
        return super().find_class(module, name)


def _check_entry(stored: Path, entry: Any) -> None:
    """Check one pickled value, for example a hyperparameter of the optimizer."""
    with stored.open("rb") as file:
        file.seek(entry.offset)
        check_archive(io.BytesIO(file.read(entry.length)), TENSORS, name=f"{stored} at {entry.offset}")

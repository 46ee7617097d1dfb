"""Load a checkpoint's pickles with `torch.load(weights_only=True)`: nothing that another one names is imported or run.

torch itself admits tensors and plain containers; `ENGINE_CLASSES` are what DeepSpeed, torchao and numpy write besides.
The metadata of a distributed checkpoint is a bare pickle of newer opcodes, which torch reads without such a list:
`read_dcp_metadata` reads it with one.
"""

import contextlib
import importlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from toolkit.engines import zero_process
from toolkit.engines.zero import CHECKPOINT_CLASSES
from toolkit.errors import ToolkitError
from toolkit.files.documents import open_file, read_bytes, read_folder_name

ENGINE_CLASSES = (
    *CHECKPOINT_CLASSES,
    *("torchao.optim.subclass_4bit.OptimState4bit", "torchao.optim.subclass_8bit.OptimState8bit"),
    # The random states, which the Trainer loads with a list of its own.
    *("numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
)
_DTYPES = ("bfloat16", "bool", "float16", "float32", "float64", "int32", "int64", "uint8")
_DESCRIPTIONS = ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
_STORED = ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")
DCP_CLASSES = (
    *("pathlib.PosixPath", "torch.Size", "torch.serialization._get_layout", *(f"torch.{name}" for name in _DTYPES)),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"{metadata.__name__}.{name}" for name in (*_DESCRIPTIONS, *_STORED)),
)
DCP_METADATA = ".metadata"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
NEVER_LOADED = ("training_args.bin",)
MAX_METADATA_BYTES = 512 * 2**20
_AGAIN = "copy or download it again"
EXPANSION = 4  # a tensor described as fp32 may be stored in 8 bits (torchao's optimizer states)


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint with a pickle that is damaged, or names anything that no engine writes.

    Raises ToolkitError with the file and the name. This is for the message: the loads themselves refuse it, too.
    """
    for path in sorted(folder.rglob("*")):
        if path.name in ("latest", "latest_universal"):  # DeepSpeed loads the folder that such a file names
            read_folder_name(path)
        elif path.name == DCP_METADATA:
            read_dcp_metadata(path)
        elif path.suffix in PICKLE_SUFFIXES and path.name not in NEVER_LOADED:
            _engine_classes_in(path)


def load_only_known_classes(training: Any) -> None:
    """From here on let no library of this process unpickle anything but tensors and the classes on these lists.

    DeepSpeed and torch's distributed checkpoints load with `weights_only=False`.
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if zero_process.is_used(training):
        torch.serialization.add_safe_globals([_imported(name) for name in CHECKPOINT_CLASSES])
    setattr(FileSystemReader, "read_metadata", _read_metadata)  # noqa: B010  (mypy takes no assignment to a method)


def _read_metadata(reader: Any, *_: Any, rank: int | None = None, **__: Any) -> Any:
    """`FileSystemReader.read_metadata` of torch 2.13 with the list."""
    content = read_dcp_metadata(Path(reader._get_metadata_path(rank)))
    content.storage_meta = getattr(content, "storage_meta", None) or metadata.StorageMeta()
    content.storage_meta.load_id = reader.load_id
    return content


def torch_load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Load a file of `torch.save`, memory-mapped, on the CPU; `trust_pickle` admits every class.

    Raises ToolkitError for a damaged file, and for one that names anything that no engine writes.
    """
    open_file(path).close()  # torch would wait for a named pipe
    classes = [] if trust_pickle else [_imported(name) for name in _engine_classes_in(path)]
    with damage_reported(path), torch.serialization.safe_globals(classes):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=not trust_pickle)


def _engine_classes_in(path: Path) -> list[str]:
    """Return the names beyond torch's own list, read from the opcodes."""
    with damage_reported(path), open_file(path) as file:
        names: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    for name in names:
        _check_known(path, name, ENGINE_CLASSES)
    return names


def _check_known(path: Path, name: str, classes: tuple[str, ...]) -> None:
    if name not in classes:
        what = f"{path} would run {name[:80]}, which no checkpoint of ours contains"
        raise ToolkitError(what, hint="do not load it unless you trust who wrote it; then: `--trust-pickle`")


@contextlib.contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Report any other exception as ToolkitError: a damaged pickle raises whatever the opcode at its end leads to."""
    try:
        yield
    except ToolkitError:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0][:160]
        raise ToolkitError(f"{path} is damaged: {type(error).__name__}: {why}", hint=_AGAIN) from None


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def read_dcp_metadata(path: Path, *, trust_pickle: bool = False) -> Any:
    """Return the metadata of a distributed checkpoint, from its `.metadata`.

    Raises ToolkitError for a name that is not DCP's, for bytes that are not in a file beside it, and for a tensor
    larger than those files.
    """
    content = io.BytesIO(read_bytes(path, max_bytes=MAX_METADATA_BYTES))
    if trust_pickle:
        return pickle.load(content)
    with damage_reported(path):
        unpickler = _MetadataUnpickler(content)
        unpickler.path = path
        found = unpickler.load()
        stored = {file.name: file.stat().st_size for file in path.parent.iterdir() if file.is_file()}
        for entry in found.storage_data.values():
            name, end = entry.relative_path, entry.offset + entry.length
            if name not in stored:
                raise ToolkitError(f"{path} names {name[:80]}, which is missing or outside its folder", hint=_AGAIN)
            if not 0 <= entry.offset <= end <= stored[name]:
                raise ToolkitError(f"{path} names bytes beyond the end of {name}", hint=_AGAIN)
        for name, described in found.state_dict_metadata.items():
            if not isinstance(described, metadata.BytesStorageMetadata):
                needed = described.size.numel() * described.properties.dtype.itemsize
                if not 0 <= needed <= EXPANSION * sum(stored.values()):
                    raise ToolkitError(f"{path}: {str(name)[:80]} would have {needed:,} bytes, more than its files")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    path: Path

    def find_class(self, module: str, name: str) -> Any:
        _check_known(self.path, f"{module}.{name}", DCP_CLASSES)
        return super().find_class(module, name)


def read_dcp_value(folder: Path, content: Any, key: str, *, trust_pickle: bool = False) -> Any:
    """Return a value of a distributed checkpoint, by its metadata, that is not a tensor, such as a hyperparameter."""
    entry = content.storage_data[metadata.MetadataIndex(key)]
    path = folder / entry.relative_path
    with open_file(path) as file, damage_reported(path):
        file.seek(entry.offset)
        return torch.load(io.BytesIO(file.read(entry.length)), weights_only=not trust_pickle)

"""Load a checkpoint's pickles with `torch.load(weights_only=True)`: nothing that another one names is imported or run.

torch itself admits tensors and plain containers; `ENGINE_CLASSES` are what DeepSpeed, torchao and numpy write besides.
The metadata of a distributed checkpoint is a bare pickle of newer opcodes, which torch reads without such a list:
`read_dcp_metadata` reads it with one.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, StorageMeta

from toolkit.errors import ToolkitError
from toolkit.files.reading import open_file, read_bytes, read_folder_name

DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
ENGINE_CLASSES = (
    *DEEPSPEED_CLASSES,
    *("torchao.optim.subclass_4bit.OptimState4bit", "torchao.optim.subclass_8bit.OptimState8bit"),
    # The random states, which the Trainer loads with a list of its own.
    *("numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
)
_DTYPES = ("bfloat16", "bool", "float16", "float32", "float64", "int32", "int64", "uint8")
DCP_CLASSES = (
    *("pathlib.PosixPath", "torch.Size", "torch.serialization._get_layout", *(f"torch.{name}" for name in _DTYPES)),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"torch.distributed.checkpoint.metadata.{kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")),
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ),
)
DCP_METADATA = ".metadata"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
NEVER_LOADED = ("training_args.bin",)
MAX_METADATA_BYTES = 512 * 2**20
# A tensor described as fp32 may be stored in 8 bits (torchao's optimizer states).
EXPANSION = 4


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint with a pickle that is damaged, or names anything that no engine writes.

    Raises ToolkitError with the file and the name. This is for the message: the loads themselves refuse it, too.
    """
    for path in sorted(folder.rglob("*")):
        if path.name in ("latest", "latest_universal"):  # DeepSpeed loads the folder that such a file names
            read_folder_name(path)
        elif path.name == DCP_METADATA:
            read_dcp_metadata(path.parent)
        elif path.suffix in PICKLE_SUFFIXES and path.name not in NEVER_LOADED:
            _engine_classes_in(path)


def load_only_known_classes(*, deepspeed: bool) -> None:
    """From here on let no library of this process unpickle anything but tensors and the classes on these lists.

    DeepSpeed and torch's distributed checkpoints load with `weights_only=False`.
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if deepspeed:
        torch.serialization.add_safe_globals([_imported(name) for name in DEEPSPEED_CLASSES])
    setattr(FileSystemReader, "read_metadata", _read_metadata)  # noqa: B010  (mypy takes no assignment to a method)


def _read_metadata(reader: Any, *_: Any, rank: int | None = None, **__: Any) -> Any:
    """`FileSystemReader.read_metadata` of torch 2.13 with the list."""
    path = Path(reader._get_metadata_path(rank))
    metadata = read_dcp_metadata(path.parent, file_name=path.name)
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata


def torch_load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Load a file of `torch.save`, memory-mapped, on the CPU; `trust_pickle` admits every class.

    Raises ToolkitError for a damaged file, and for one that names anything that no engine writes.
    """
    open_file(path).close()  # torch would wait for a named pipe
    classes = [] if trust_pickle else [_imported(name) for name in _engine_classes_in(path)]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=not trust_pickle)
    except Exception as error:  # a damaged pickle raises whatever the opcode at its end leads to
        raise _damaged(path, error) from None


def _engine_classes_in(path: Path) -> list[str]:
    """Return the names beyond torch's own list, read from the opcodes."""
    try:
        with open_file(path) as file:
            names: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except ToolkitError:
        raise
    except Exception as error:
        raise _damaged(path, error) from None
    for name in names:
        if name not in ENGINE_CLASSES:
            raise _unknown(path, name)
    return names


def _unknown(path: Path, name: str) -> ToolkitError:
    return ToolkitError(
        f"{path} would run {name[:80]}, which no checkpoint of ours contains",
        hint="do not load it unless you trust who wrote it; then: `--trust-pickle`",
    )


def _damaged(path: Path, error: Exception) -> ToolkitError:
    why = (str(error).strip().splitlines() or [""])[0][:160]
    return ToolkitError(f"{path} is damaged: {type(error).__name__}: {why}", hint="copy or download it again")


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def read_dcp_metadata(folder: Path, *, file_name: str = DCP_METADATA, trust_pickle: bool = False) -> Any:
    """Return the metadata of a distributed checkpoint.

    Raises ToolkitError for a name that is not DCP's, for an entry that lies outside the folder, and for a tensor larger
    than its files.
    """
    path = folder / file_name
    content = io.BytesIO(read_bytes(path, max_bytes=MAX_METADATA_BYTES))
    if trust_pickle:
        return pickle.load(content)
    try:
        metadata = _MetadataUnpickler(content, path).load()
        _check_metadata(path, metadata)
    except ToolkitError:
        raise
    except Exception as error:
        raise _damaged(path, error) from None
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, path: Path) -> None:
        super().__init__(content)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in DCP_CLASSES:
            raise _unknown(self.path, f"{module}.{name}")
        return super().find_class(module, name)


def _check_metadata(path: Path, metadata: Any) -> None:
    folder, root = path.parent, path.parent.resolve()
    sizes: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        name = entry.relative_path
        if name not in sizes:
            stored = (folder / name).resolve()
            if not stored.is_relative_to(root):
                raise ToolkitError(f"{path} names {name[:80]}, which is outside its folder")
            with open_file(stored) as file:
                sizes[name] = file.seek(0, 2)
        if not 0 <= entry.offset <= entry.offset + entry.length <= sizes[name]:
            raise ToolkitError(f"{path} names bytes beyond the end of {name}", hint="copy or download it again")
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, BytesStorageMetadata):
            needed = described.size.numel() * described.properties.dtype.itemsize
            if not 0 <= needed <= EXPANSION * sum(sizes.values()):
                raise ToolkitError(f"{path}: {str(name)[:80]} would have {needed:,} bytes, more than its files")


def read_dcp_value(folder: Path, metadata: Any, key: str, *, trust_pickle: bool = False) -> Any:
    """Return a value of a distributed checkpoint that is not a tensor, such as a hyperparameter."""
    entry = metadata.storage_data[MetadataIndex(key)]
    path = folder / entry.relative_path
    with open_file(path) as file:
        file.seek(entry.offset)
        content = io.BytesIO(file.read(entry.length))
    try:
        return torch.load(content, weights_only=not trust_pickle)
    except Exception as error:
        raise _damaged(path, error) from None

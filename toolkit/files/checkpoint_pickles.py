"""Which pickles a checkpoint has, and everything that each of them may name.

`check_pickles` is called before any library loads a checkpoint: to resume, and in `toolkit checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.files.pickle_scan import check_pickle

_FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"]
_INTEGERS = ["bool", "int8", "int16", "int32", "int64", "uint8"]
_STORAGES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]

TENSORS = frozenset(
    {
        "collections.OrderedDict",
        "collections.defaultdict",
        "builtins.dict",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        *(f"torch.{name}" for name in [*_FLOATS, *_INTEGERS]),
        *(f"torch.{name}Storage" for name in _STORAGES),
    }
)
# The random states of Python, numpy and torch, as the Trainer saves them.
RANDOM_STATES = TENSORS | {
    "_codecs.encode",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray._reconstruct",  # numpy 1
    "numpy.dtypes.UInt32DType",
}
DEEPSPEED_STATES = TENSORS | {
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
_DCP = "torch.distributed.checkpoint"
DCP_METADATA = TENSORS | {
    "pathlib.PosixPath",
    f"{_DCP}.filesystem._StorageInfo",
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}

# File name pattern -> what such a file may name. `training_args.bin` is never loaded.
PICKLES = {
    "rng_state*.pth": RANDOM_STATES,
    "optimizer.pt": TENSORS,
    "scheduler.pt": TENSORS,
    "scaler.pt": TENSORS,
    ".metadata": DCP_METADATA,
    "*_states.pt": DEEPSPEED_STATES,
    "*.pt": DEEPSPEED_STATES,  # of DeepSpeed's universal layout: one file per state
    "*.pth": TENSORS,
    "*.bin": TENSORS,
    "*.pkl": RANDOM_STATES,
}
NEVER_LOADED = ("training_args.bin",)


def check_pickles(folder: Path) -> None:
    """Refuse a checkpoint in which a pickle names anything that no library writes into such a file.

    Raises ToolkitError with the file and the name; nothing of it has run.
    """
    for path, allowed in pickles_of(folder):
        check_pickle(path, allowed)


def pickles_of(folder: Path) -> Iterator[tuple[Path, frozenset[str]]]:
    """Yield each pickle below a folder with the names that it may contain."""
    for path in sorted(folder.rglob("*")):
        if path.name in NEVER_LOADED or not path.is_file():
            continue
        allowed = next((names for pattern, names in PICKLES.items() if path.match(pattern)), None)
        if allowed is not None:
            yield path, allowed

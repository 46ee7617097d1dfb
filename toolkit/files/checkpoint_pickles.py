"""Which pickles a checkpoint has, and everything that each of them may name.

`check_pickles` is called before any library loads a checkpoint: to resume, and in `toolkit checkpoint`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import EXIT_INVALID_INPUT, ToolkitError
from toolkit.files.pickle_scan import check_content, pickle_in
from toolkit.files.reading import read_text

_STORAGES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
_DTYPES = ["bfloat16", "bool", "float16", "float32", "float64", "int32", "int64", "uint8"]

TENSORS = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.Tensor",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        *(f"torch.{name}" for name in _DTYPES),
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
}
# torchao's quantized states: `_rebuild_wrapper_subclass` makes an empty tensor of a class that is named here too, and
# gives it the tensors inside.
OPTIMIZER_STATES = TENSORS | {
    "torch._utils._rebuild_wrapper_subclass",
    "torch.device",
    "torch.serialization._get_layout",
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_8bit.OptimState8bit",
}
DEEPSPEED_STATES = TENSORS | {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
_DCP = "torch.distributed.checkpoint"
DCP_METADATA = frozenset(
    {
        "pathlib.PosixPath",
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"torch.{name}" for name in _DTYPES),
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
)

# File name pattern -> what such a file may name. `training_args.bin` is never loaded.
PICKLES = {
    "rng_state*.pth": RANDOM_STATES,
    "optimizer.pt": OPTIMIZER_STATES,
    "optimizer_stage*.pt": OPTIMIZER_STATES,
    "scheduler.pt": TENSORS,
    "scaler.pt": TENSORS,
    "*.metadata": DCP_METADATA,
    "*_states.pt": DEEPSPEED_STATES,
    "*.pt": DEEPSPEED_STATES,  # of DeepSpeed's universal layout: one file per state
    "*.pth": TENSORS,
    "*.bin": TENSORS,
    "*.pkl": RANDOM_STATES,
}
NEVER_LOADED = ("training_args.bin",)
BARE_PICKLE = ".metadata"
# DeepSpeed loads the folder that such a file names, wherever it is.
FOLDER_NAMES = ("latest", "latest_universal")
MAX_NAME_BYTES = 256

# The scan reads about 30 MB of pickles per second; one made to take longer, or more memory, ends with its process.
SCAN_CPU_SECONDS, SCAN_BYTES_PER_SECOND = 2, 5 * 10**6
SCAN_MEMORY_BYTES, SCAN_MEMORY_PER_BYTE = 2 * 2**30, 30


def check_pickles(folder: Path) -> None:
    """Refuse a checkpoint in which a pickle names anything that no library writes into such a file.

    Raises ToolkitError with the file and the name; nothing of it has run. The scan is a process of its own, with limits
    on its time and memory.
    """
    paths = [path for path, _ in pickles_of(folder)]
    for path in _files_below(folder):
        if path.name in FOLDER_NAMES:
            read_folder_name(path)
    if not paths:
        return
    # -P: a module in the working directory, which may be the checkpoint, is not imported.
    command = [sys.executable, "-P", "-m", "toolkit.files.checkpoint_pickles"]
    words = json.dumps([str(path.absolute()) for path in paths])
    scan = subprocess.run(command, input=words, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in scan.stdout.splitlines()]
    if scan.returncode == EXIT_INVALID_INPUT:
        raise ToolkitError(lines[-1]["message"], hint=lines[-1]["hint"])
    if scan.returncode in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGSEGV):
        raise ToolkitError(
            f"{lines[-1]} is damaged: reading its pickle takes more time or memory than its size explains",
            hint="copy or download it again",
        )
    if scan.returncode != 0:
        raise RuntimeError(f"the scan of pickles failed: {scan.stderr}")


def pickles_of(folder: Path) -> Iterator[tuple[Path, frozenset[str]]]:
    """Yield each pickle below a folder with the names that it may contain."""
    for path in _files_below(folder):
        allowed = allowed_names(path)
        if allowed is not None and path.name not in NEVER_LOADED:
            yield path, allowed


def allowed_names(path: Path) -> frozenset[str] | None:
    """Return what a file of this name may name; None if no library unpickles it."""
    return next((names for pattern, names in PICKLES.items() if path.match(pattern)), None)


def read_folder_name(path: Path) -> str:
    """Return the name in DeepSpeed's `latest`. Raises ToolkitError for anything but the name of a folder beside it."""
    name = read_text(path, max_bytes=MAX_NAME_BYTES).strip()
    folder = path.parent / name
    if not name or name in (".", "..") or "/" in name or "\0" in name or not folder.is_dir():
        raise ToolkitError(f"{path} holds {name[:40]!r}, expected the name of a folder beside it")
    return name


def _files_below(folder: Path) -> list[Path]:
    """Every file below a folder, also through links to folders, each folder once."""
    found, seen, pending = [], set(), [folder]
    while pending:
        inside = pending.pop()
        try:
            status = inside.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            for entry in os.scandir(inside):
                if entry.is_dir():
                    pending.append(Path(entry.path))
                else:
                    found.append(Path(entry.path))
        except OSError as error:
            raise ToolkitError(f"{inside} cannot be read: {error.strerror}") from None
    return sorted(found)


def _scan(paths: list[str]) -> int:
    """The scanning process: print each path, and as the last line the error."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path in map(Path, paths):
        print(json.dumps(str(path)), flush=True)
        try:
            content = pickle_in(path, bare=path.name.endswith(BARE_PICKLE))
            _limit_process(len(content))
            check_content(content, allowed_names(path) or (), name=str(path))
        except ToolkitError as error:
            print(json.dumps({"message": error.message, "hint": error.hint}), flush=True)
            return EXIT_INVALID_INPUT
    return 0


def _limit_process(num_bytes: int) -> None:
    """Limit time and memory to what a pickle of this size explains."""
    seconds = int(time.process_time()) + SCAN_CPU_SECONDS + num_bytes // SCAN_BYTES_PER_SECOND
    memory = SCAN_MEMORY_BYTES + SCAN_MEMORY_PER_BYTE * num_bytes
    for limit, value in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.exit(_scan(json.load(sys.stdin)))

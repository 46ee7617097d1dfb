"""Ends that a machine causes: a full disk, host memory that ran out. Recognised by their words, told with a way out.

>>> is_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
True
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from toolkit.runs.checkpoints import SAVING_PREFIX, list_checkpoints
from toolkit.units import gib

# As Python, the C++ library, torch's CPU allocator and the dynamic linker say it.
HOST_MEMORY_WORDS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "DefaultCPUAllocator",
    "MemoryError",
    "can't start new thread",
)
# As Python, Rust (safetensors, tokenizers) and torch's zip writer say it.
DISK_FULL_WORDS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "PytorchStreamWriter failed writing",
    "inline_container.cc",  # "unexpected pos 704 vs 598": all that a distributed checkpoint passes on of it
    "iostream error",
)


def is_out_of_memory(text: str) -> bool:
    """Whether a message says that the host has no memory left."""
    return any(word in text for word in HOST_MEMORY_WORDS)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that a disk has no room."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(word in str(error) for word in DISK_FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def failure_of_memory(who: str, phase: str | None, step: int, cause: str) -> tuple[str, str]:
    """Message and hint where host memory ran out; `who` is a rank, as far as it is known."""
    during = f" in phase {phase}" if phase else ""
    first = cause.strip().splitlines()[0] if cause.strip() else ""
    message = f"{who} ran out of host memory{during}, step {step + 1}" + (f": {first}" if first else "")
    return message, "give the job more host memory, start fewer ranks, or lower `--per_device_train_batch_size` or" + (
        " `--max_seq_length`"
    )


def kept(output_dir: Path) -> str:
    """The newest whole checkpoint, in words."""
    whole = next((found for found in list_checkpoints(output_dir) if found.problem() is None), None)
    return "there is no whole checkpoint" if whole is None else f"{whole.path.name} is the newest whole checkpoint"


def failure_of_disk(output_dir: Path, who: str, phase: str, step: int) -> tuple[str, str]:
    """Message and hint where the run folder's disk is full. Removes half checkpoints first: nothing reads them."""
    free = shutil.disk_usage(output_dir).free
    halves = [path for path in output_dir.glob(f"{SAVING_PREFIX}*") if path.is_dir()]
    for half in halves:
        shutil.rmtree(half, ignore_errors=True)
    whole = [found for found in list_checkpoints(output_dir) if found.problem() is None]
    needed = f", a checkpoint needs {gib(whole[0].bytes)}" if whole and whole[0].bytes else ""
    room = f"{gib(free)} free{needed}; {kept(output_dir)}"
    message = f"{who} found the disk of {output_dir} full in phase {phase}, step {step}: {room}"
    return (
        message,
        "make room or keep fewer checkpoints (`--save_total_limit 1`), then `--resume_from_checkpoint latest`",
    )

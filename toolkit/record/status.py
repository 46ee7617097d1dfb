"""How a run ends: its statuses, the exit code of each, and a full disk or exhausted host memory, by their messages.

>>> {name: code for name in STATUSES if (code := exit_code_of(name)) != 1}
{'completed': 0, 'out_of_memory': 3, 'host_out_of_memory': 3}
>>> is_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
True
"""

import errno
from typing import Literal, get_args

from toolkit.errors import EXIT_DONE, EXIT_INVALID_INPUT, EXIT_OUT_OF_MEMORY, EXIT_RUN_FAILED

RunStatus = Literal[
    "planned",
    "running",
    "completed",
    "out_of_memory",
    "host_out_of_memory",
    "timed_out",
    "diverged",
    "attestation_failed",
    "failed",
    "interrupted",
]
STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
PLANNED, RUNNING, COMPLETED, OUT_OF_MEMORY, HOST_OUT_OF_MEMORY, *_ = STATUSES
*_, TIMED_OUT, DIVERGED, ATTESTATION_FAILED, FAILED, INTERRUPTED = STATUSES
# Messages of Python, the C++ library, torch's CPU allocator and the dynamic linker.
HOST_MEMORY_WORDS = (
    *("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "DefaultCPUAllocator", "MemoryError"),
    "can't start new thread",
)
# Messages of Python, Rust (safetensors, tokenizers) and torch's zip writer.
DISK_FULL_WORDS = (
    *("No space left on device", "Disk quota exceeded", "File too large", "iostream error"),
    "PytorchStreamWriter failed writing",
    "inline_container.cc",  # "unexpected pos 704 vs 598": all that a distributed checkpoint reports
)


def exit_code_of(status: str, *, invalid_input: bool = False) -> int:
    """Return the exit code: 0 done, 1 the run failed, 2 invalid input, 3 out of memory."""
    if invalid_input:
        return EXIT_INVALID_INPUT
    if status == COMPLETED:
        return EXIT_DONE
    return EXIT_OUT_OF_MEMORY if status in (OUT_OF_MEMORY, HOST_OUT_OF_MEMORY) else EXIT_RUN_FAILED


# -- a full disk, and host memory that ran out


def is_out_of_memory(text: str) -> bool:
    """Return True if a message says that the host has no memory left."""
    return any(word in text for word in HOST_MEMORY_WORDS)


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, says that a disk is full."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(word in str(error) for word in DISK_FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_host_oom(who: str, phase: str | None, step: int, cause: str) -> tuple[str, str]:
    """Return message and hint for host memory that ran out; `who` names the rank if it is known."""
    during = f" in phase {phase}" if phase else ""
    reason = "".join(f": {line}" for line in cause.strip().splitlines()[:1])
    hint = "give the job more host memory, start fewer ranks, or lower `--per_device_train_batch_size` or"
    return f"{who} ran out of host memory{during}, step {step + 1}{reason}", f"{hint} `--max_seq_length`"

"""Limits of the kernel on this process: memory that it may lock, files, processes.

>>> open_files_limit() is None or open_files_limit() > 0
True
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

CAP_IPC_LOCK = 14  # linux/capability.h


def locked_memory_limit_bytes() -> int | None:
    """Return how much memory this process may lock; None without a limit, also by the capability that ignores it."""
    return None if _has_capability(CAP_IPC_LOCK) else _soft_limit(resource.RLIMIT_MEMLOCK)


def open_files_limit() -> int | None:
    """Return how many files and sockets this process may have open; None without a limit."""
    return _soft_limit(resource.RLIMIT_NOFILE)


def processes_limit() -> int | None:
    """Return how many processes and threads this user may have; None without a limit."""
    return _soft_limit(resource.RLIMIT_NPROC)


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _has_capability(number: int) -> bool:
    """Root has it on a node, but not in a container by default."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number & 1)

"""This node as facts for run.json: processor, memory, disks, git commit, library versions.

>>> sorted(library_versions())[0]
'accelerate'
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from toolkit.hardware.disks import mount_of
from toolkit.hardware.gpus import describe_gpus
from toolkit.hardware.system_text import output_of, text_of
from toolkit.versions import installed_version

LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "peft", "datasets", "finetune-toolkit")


def library_versions() -> dict[str, str | None]:
    """Return the version of each library that a run depends on; None if it is not installed."""
    return {library: installed_version(library) for library in LIBRARIES}


def describe_node() -> dict[str, Any]:
    """Return processor, usable cores, host memory in bytes, operating system, and GPUs as the driver names them."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "host_memory_bytes": host_memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpus": describe_gpus(),
    }


def _cpu_name() -> str | None:
    lines = (text_of(Path("/proc/cpuinfo")) or "").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def host_memory_bytes() -> int:
    """Return the memory of this node, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_facts(folder: Path) -> dict[str, Any]:
    """Return file system, size and free space of the disk of an existing folder."""
    usage, mount = shutil.disk_usage(folder), None
    with contextlib.suppress(OSError):
        mount = mount_of(folder)
    filesystem = None if mount is None else mount.filesystem
    return {"filesystem": filesystem, "total_bytes": usage.total, "free_bytes": usage.free}


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out in `folder`, with `+changes` if the tree differs from it; None outside git."""
    git = ("git", "-C", str(folder))
    head = output_of(*git, "rev-parse", "--short=12", "HEAD")
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return None if head is None or changed is None else f"{head}+changes" if changed else head

"""This node as facts for run.json: processor, memory and its limits, disks, git commit, library versions.

>>> sorted(library_versions())[0]
'accelerate'
>>> cpu_cores("150000 100000")
1.5

Limits are those of the container, or of any other cgroup above this process, in both versions of the kernel's cgroups;
None where nothing is limited or nothing can be read.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.hardware.disks import mount_of
from toolkit.hardware.gpus import describe_gpus
from toolkit.versions import installed_version

LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "peft", "datasets", "finetune-toolkit")
CGROUP_ROOT = Path("/sys/fs/cgroup")


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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


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
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def memory_limit_bytes(root: Path = CGROUP_ROOT) -> int | None:
    """Return the smallest cgroup limit on this process that is below the node's memory."""
    installed = host_memory_bytes()
    limits = [*_read(root, "", "memory.max"), *_read(root, "memory", "memory.limit_in_bytes")]
    return min((int(text) for text in limits if text.isdigit() and int(text) < installed), default=None)


def cpu_limit(root: Path = CGROUP_ROOT) -> float | None:
    """Return the smallest cgroup limit on this process's processor time, in cores."""
    limits = _read(root, "", "cpu.max")
    quotas, periods = _read(root, "cpu", "cpu.cfs_quota_us"), _read(root, "cpu", "cpu.cfs_period_us")
    limits += [f"{quota} {period}" for quota, period in zip(quotas, periods, strict=False)]
    return min((cores for text in limits if (cores := cpu_cores(text)) is not None), default=None)


def cpu_cores(text: str) -> float | None:
    """Return the cores in a cgroup's `quota period`; None for `max` or -1."""
    quota, _, period = text.partition(" ")
    is_limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if is_limited else None


def _read(root: Path, controller: str, name: str) -> list[str]:
    """Contents of this file in each cgroup from this process's own up to the root."""
    return [text for folder in _cgroups(root, controller) if (text := _text(folder / name)) is not None]


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, own = line.split(":", 2)
        if (controller in controllers.split(",")) if controller else not controllers:
            top = root / controller
            folder = top / own.lstrip("/")
            yield from [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return None

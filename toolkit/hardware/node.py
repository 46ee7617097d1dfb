"""This node as facts for run.json, and the limits of its kernel on this process: of its cgroups and its own.

>>> cpu_cores("150000 100000")
1.5

A limit is None where nothing is limited or nothing can be read.
"""

import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

from toolkit import installation
from toolkit._version import __version__
from toolkit.hardware.gpus import describe_gpus
from toolkit.hardware.system_text import output_of, text_of
from toolkit.versions import installed_version

CGROUP_ROOT = Path("/sys/fs/cgroup")
CAP_IPC_LOCK = 14  # linux/capability.h
# The load of the last minute that is not from a run which just ended.
BUSY_LOAD_PER_CORE = 1.5
LIBRARIES = (*installation.LIBRARIES, "datasets")


def library_versions() -> dict[str, str | None]:
    """Return the version of each library that a run depends on, and of this package; None if it is not installed."""
    return {**{library: installed_version(library) for library in LIBRARIES}, installation.PACKAGE: __version__}


def describe_node() -> dict[str, Any]:
    """Return processor, usable cores, host memory in bytes, operating system, and GPUs as the driver names them."""
    lines = (text_of(Path("/proc/cpuinfo")) or "").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, None) or platform.processor() or None,
        "cpu_count": len(os.sched_getaffinity(0)),
        "host_memory_bytes": host_memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpus": describe_gpus(),
    }


def host_memory_bytes() -> int:
    """Return the memory of this node, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def busy_cores() -> str | None:
    """Return a sentence about the load of this node's cores, where other programs slow down a run; otherwise None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= BUSY_LOAD_PER_CORE * cores:
        return None
    return f"other programs use this node's cores, and each step takes longer: load {load:.1f} on {cores} cores"


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out in `folder`, with `+changes` if the tree differs from it; None outside git."""
    git = ("git", "-C", str(folder))
    head = output_of(*git, "rev-parse", "--short=12", "HEAD")
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return None if head is None or changed is None else f"{head}+changes" if changed else head


# -- Limits and counters of this process's cgroups, which a container sets, in both versions of the kernel's cgroups


def memory_limit_bytes(root: Path = CGROUP_ROOT) -> int | None:
    """Return the smallest cgroup limit on this process that is below the node's memory."""
    installed = host_memory_bytes()
    limits = [*_read(root, "", "memory.max"), *_read(root, "memory", "memory.limit_in_bytes")]
    return min((int(text) for text in limits if text.isdigit() and int(text) < installed), default=None)


def usable_memory_bytes() -> int:
    """Return the memory that processes here may use: the smallest cgroup limit, or all of the node's."""
    return memory_limit_bytes() or host_memory_bytes()


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


def count_oom_kills(root: Path = CGROUP_ROOT) -> int:
    """Return how many processes were killed for lack of memory: in this cgroup, or on the node since boot."""
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        folders = cgroup_folders(root, controller)
        if folders and (killed := _oom_kills(folders[0] / name)) is not None:
            return killed
    return _oom_kills(Path("/proc/vmstat")) or 0


def _oom_kills(path: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", text_of(path) or "", re.MULTILINE)
    return int(found[1]) if found else None


def _read(root: Path, controller: str, name: str) -> list[str]:
    """Contents of this file in each cgroup from this process's own up to the root."""
    return [text for folder in cgroup_folders(root, controller) if (text := text_of(folder / name)) is not None]


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folder of this process's own cgroup, then those above it; `controller` is empty for version 2."""
    for line in (text_of(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, own = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / controller
            folder = top / own.lstrip("/")
            return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]
    return []


# -- Limits of the kernel on this process


def locked_memory_limit_bytes() -> int | None:
    """Return how much memory this process may lock; None without a limit, also by the capability that ignores it."""
    # Root has the capability on a node, but not in a container by default.
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", text_of(Path("/proc/self/status")) or "", re.MULTILINE)
    unlimited = capabilities is not None and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1
    return None if unlimited else soft_limit(resource.RLIMIT_MEMLOCK)


def soft_limit(kind: int) -> int | None:
    """Return a limit of `resource.RLIMIT_...`; None without one."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft

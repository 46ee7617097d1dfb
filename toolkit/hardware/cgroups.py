"""Limits and counters of this process's cgroups, which a container sets, in both versions of the kernel's cgroups.

>>> cpu_cores("150000 100000")
1.5

A limit is None where nothing is limited or nothing can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.hardware.node import host_memory_bytes
from toolkit.hardware.system_text import text_of

CGROUP_ROOT = Path("/sys/fs/cgroup")


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


def tasks_limit(root: Path = CGROUP_ROOT) -> int | None:
    """Return the smallest cgroup limit on the number of processes and threads."""
    limits = [*_read(root, "", "pids.max"), *_read(root, "pids", "pids.max")]
    return min((int(text) for text in limits if text.isdigit()), default=None)


def cpu_cores(text: str) -> float | None:
    """Return the cores in a cgroup's `quota period`; None for `max` or -1."""
    quota, _, period = text.partition(" ")
    is_limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if is_limited else None


def count_oom_kills(root: Path = CGROUP_ROOT) -> int:
    """Return how many processes the kernel has killed for lack of memory: in this process's cgroup, or since boot.

    The cgroup's own counter is preferred: /proc/vmstat counts the whole node, other containers included.
    """
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        own = next(cgroup_folders(root, controller), None)
        counters = {} if own is None else _counters(own / name)
        if "oom_kill" in counters:
            return counters["oom_kill"]
    return _counters(Path("/proc/vmstat")).get("oom_kill", 0)


def _counters(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in (text_of(path) or "").splitlines()]
        return {name: int(value) for name, value in pairs}
    except ValueError:
        return {}


def _read(root: Path, controller: str, name: str) -> list[str]:
    """Contents of this file in each cgroup from this process's own up to the root."""
    return [text for folder in cgroup_folders(root, controller) if (text := text_of(folder / name)) is not None]


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's own cgroup, then those above it; `controller` is empty for version 2."""
    for line in (text_of(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, own = line.split(":", 2)
        if (controller in controllers.split(",")) if controller else not controllers:
            top = root / controller
            folder = top / own.lstrip("/")
            yield from [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]

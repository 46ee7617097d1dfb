"""What the container, or any other cgroup above this process, allows: memory and processor time.

    >>> cpu_cores("150000 100000")
    1.5

Version 1 and version 2 of the kernel's cgroups; None where nothing is limited or nothing can be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from toolkit.hardware.machine import host_memory_bytes

CGROUP_ROOT = Path("/sys/fs/cgroup")


def memory_limit_bytes(root: Path = CGROUP_ROOT) -> int | None:
    """The smallest limit above this process that is below the machine's memory."""
    installed = host_memory_bytes()
    said = [*_read(root, "", "memory.max"), *_read(root, "memory", "memory.limit_in_bytes")]
    return min((int(text) for text in said if text.isdigit() and int(text) < installed), default=None)


def cpu_limit(root: Path = CGROUP_ROOT) -> float | None:
    """The smallest share of processor time above this process, in cores."""
    said = _read(root, "", "cpu.max")
    quotas, periods = _read(root, "cpu", "cpu.cfs_quota_us"), _read(root, "cpu", "cpu.cfs_period_us")
    said += [f"{quota} {period}" for quota, period in zip(quotas, periods, strict=False)]
    return min((cores for text in said if (cores := cpu_cores(text)) is not None), default=None)


def cpu_cores(text: str) -> float | None:
    """Cores out of `quota period`; None for `max` or -1."""
    quota, _, period = text.partition(" ")
    limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if limited else None


def _read(root: Path, controller: str, name: str) -> list[str]:
    """The file of each cgroup from this process's own up to the root's, where it is there."""
    return [text for folder in _folders(root, controller) if (text := _text(folder / name)) is not None]


def _folders(root: Path, controller: str) -> Iterator[Path]:
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

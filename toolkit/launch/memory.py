"""Kills by the kernel for lack of host memory, counted before and after a run.

>>> host_memory_kills() >= 0
True
"""

from __future__ import annotations

from pathlib import Path


def host_memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory: in this process's cgroup, or since boot.

    The cgroup's own count where it can be read: a container sees the machine's in /proc/vmstat, others' kills too.
    """
    for path in _memory_events(Path("/proc/self/cgroup")):
        counters = _counters(path)
        if "oom_kill" in counters:
            return counters["oom_kill"]
    return _counters(Path("/proc/vmstat")).get("oom_kill", 0)


def _memory_events(cgroups: Path) -> list[Path]:
    """Where version 2 and version 1 of the kernel's cgroups count."""
    try:
        lines = [line.split(":", 2) for line in cgroups.read_text().splitlines()]
    except OSError:
        return []
    root = Path("/sys/fs/cgroup")
    found = [root / name.lstrip("/") / "memory.events" for _, controllers, name in lines if not controllers]
    for _, controllers, name in lines:
        if "memory" in controllers.split(","):
            found.append(root / "memory" / name.lstrip("/") / "memory.oom_control")
    return found


def _counters(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return {}

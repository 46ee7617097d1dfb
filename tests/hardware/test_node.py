"""Limits of a container, from both versions of cgroups, and of this process, set and lowered for real in a child."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.hardware.node import CGROUP_ROOT, cgroup_folders, count_oom_kills, cpu_limit, memory_limit_bytes


def test_the_smallest_limit_of_the_hierarchy_applies(tmp_path: Path) -> None:
    """Both hierarchies are laid out below a folder: this node may have either version."""
    for controller in ("memory", "cpu"):
        (tmp_path / controller).mkdir()
    for name, text in {
        "memory.max": "1048576",
        "memory/memory.limit_in_bytes": "1048576",
        "cpu.max": "150000 100000",
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert (memory_limit_bytes(tmp_path), cpu_limit(tmp_path)) == (2**20, 1.5)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # no limit in version 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert (memory_limit_bytes(tmp_path), cpu_limit(tmp_path)) == (None, None)


def test_processes_killed_for_memory_are_counted_in_the_cgroup_before_the_node(tmp_path: Path) -> None:
    """The folder of this process's own cgroup is laid out below another root."""
    own = [*cgroup_folders(tmp_path, ""), *cgroup_folders(tmp_path, "memory")][0]
    own.mkdir(parents=True, exist_ok=True)
    for name in ("memory.events", "memory.oom_control"):
        (own / name).write_text("low 0\noom 5\noom_kill 3\n")
    assert count_oom_kills(tmp_path) == 3
    for name in ("memory.events", "memory.oom_control"):
        (own / name).write_text("low 0\n")
    in_vmstat = [line.split() for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill ")]
    assert count_oom_kills(tmp_path) == int(in_vmstat[0][1])
    assert count_oom_kills(CGROUP_ROOT) >= 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has the capability to give up")
def test_the_soft_limits_are_reported_and_the_capability_to_lock_memory_overrides_its_limit() -> None:
    program = """
import os, resource
from toolkit.hardware.node import locked_memory_limit_bytes, soft_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 1000))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**23, 2**23))
print(soft_limit(resource.RLIMIT_NOFILE), locked_memory_limit_bytes())
os.setresuid(65534, 65534, 65534)
print(locked_memory_limit_bytes())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == f"500 None\n{2**23}\n"

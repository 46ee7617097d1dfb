"""CPU and memory limits of a container, and its counter of killed processes, from both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

from toolkit.hardware.cgroups import (
    CGROUP_ROOT,
    cgroup_folders,
    count_oom_kills,
    cpu_cores,
    cpu_limit,
    memory_limit_bytes,
    tasks_limit,
)


def test_cpu_quotas_of_both_versions_of_cgroups_are_cores() -> None:
    assert (cpu_cores("200000 100000"), cpu_cores("max 100000"), cpu_cores("-1 100000")) == (2.0, None, None)


def test_the_smallest_limit_of_the_hierarchy_applies(tmp_path: Path) -> None:
    """Both hierarchies are laid out below a folder: this node may have either version."""
    for controller in ("", "memory", "cpu"):
        folder = tmp_path / controller
        folder.mkdir(exist_ok=True)
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1048576\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert memory_limit_bytes(tmp_path) == 2**20
    assert cpu_limit(tmp_path) == 1.5
    (tmp_path / "pids.max").write_text("4096\n")
    assert tasks_limit(tmp_path) == 4096
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # no limit in version 1
    assert memory_limit_bytes(tmp_path) is None


def test_processes_killed_for_memory_are_counted_in_the_cgroup_before_the_node(tmp_path: Path) -> None:
    """The folder of this process's own cgroup is laid out below another root."""
    own = next(cgroup_folders(tmp_path, ""), None) or next(cgroup_folders(tmp_path, "memory"))
    own.mkdir(parents=True, exist_ok=True)
    for name in ("memory.events", "memory.oom_control"):
        (own / name).write_text("low 0\noom 5\noom_kill 3\n")
    assert count_oom_kills(tmp_path) == 3
    for name in ("memory.events", "memory.oom_control"):
        (own / name).write_text("low 0\n")
    in_vmstat = [line.split() for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill ")]
    assert count_oom_kills(tmp_path) == int(in_vmstat[0][1])
    assert count_oom_kills(CGROUP_ROOT) >= 0

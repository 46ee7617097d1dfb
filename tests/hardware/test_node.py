"""This node: disks, and the CPU and memory limits of its container from both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

from toolkit.hardware.node import cpu_cores, cpu_limit, disk_facts, memory_limit_bytes


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
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # no limit in version 1
    assert memory_limit_bytes(tmp_path) is None


def test_the_disk_of_a_folder_has_a_size(tmp_path: Path) -> None:
    found = disk_facts(tmp_path)
    assert 0 < found["free_bytes"] <= found["total_bytes"]

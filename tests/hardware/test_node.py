"""This node's disks."""

from __future__ import annotations

from pathlib import Path

from toolkit.hardware.node import disk_facts


def test_the_disk_of_a_folder_has_a_size(tmp_path: Path) -> None:
    found = disk_facts(tmp_path)
    assert 0 < found["free_bytes"] <= found["total_bytes"]

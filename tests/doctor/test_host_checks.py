"""RDMA ports and NUMA nodes, as the kernel's files describe them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.doctor import host_checks  # noqa: F401  (registers its checks)
from toolkit.doctor.checks import CHECKS, NodeReadings
from toolkit.doctor.environment_report import rdma_ports
from toolkit.doctor.options import DoctorOptions


def write_port(root: Path, device: str, state: str, rate: str, link_layer: str = "InfiniBand") -> None:
    port = root / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {"state": state, "rate": rate, "link_layer": link_layer}.items():
        (port / name).write_text(f"{text}\n")


def levels_and_values(root: Path) -> dict[str, tuple[str, str]]:
    node = NodeReadings(DoctorOptions())
    node.__dict__["rdma_ports"] = rdma_ports(root)
    return {found.what: (found.level, found.value) for found in CHECKS["rdma"].run(node).findings}


def test_a_port_that_is_down_or_slower_is_a_finding(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    write_port(tmp_path, "mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)")
    write_port(tmp_path, "mlx5_2", "1: DOWN", "10 Gb/sec (4X SDR)")
    write_port(tmp_path, "mlx5_3", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet")  # of a storage network
    assert levels_and_values(tmp_path) == {
        "mlx5_1 port 1 is slower than the other ports": ("warning", "200 Gb/sec (4X HDR)"),
        "mlx5_2 port 1 is not active": ("warning", "DOWN"),
    }


def test_a_node_without_an_active_port_is_an_error(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", "2: INIT", "400 Gb/sec (4X NDR)")
    assert levels_and_values(tmp_path) == {"mlx5_0 port 1 is not active": ("error", "INIT")}
    assert rdma_ports(tmp_path / "no such folder") == []


def test_a_gpu_at_a_numa_node_without_a_usable_core_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, cpus in {"node0": (0, 1, 2, 3, 8), "node1": (4, 5, 6, 7)}.items():
        for cpu in cpus:
            (tmp_path / name / f"cpu{cpu}").mkdir(parents=True)
    gpus = [tmp_path / "0000:17:00.0", tmp_path / "0000:9d:00.0", tmp_path / "0000:c3:00.0"]
    for gpu, at in zip(gpus, ("0", "1", "-1"), strict=True):
        gpu.mkdir()
        (gpu / "numa_node").write_text(f"{at}\n")
    monkeypatch.setattr("toolkit.doctor.host_checks.NUMA_NODES", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 8})
    node = NodeReadings(DoctorOptions())
    monkeypatch.setitem(node.__dict__, "pci_gpus", gpus)
    outcome = CHECKS["numa"].run(node)
    assert outcome.measured["nodes"] == {"0": 5, "1": 4}
    assert [(found.level, found.value) for found in outcome.findings if "core" in found.what] == [
        ("warning", "0000:9d:00.0")
    ]

"""Checks of GPUs on a stand-in for `pynvml`, which a test marked `gpu` asks for real; of the host."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import PYTHON_PATH

from toolkit.doctor.checks import CHECKS, NodeCheck, NodeFinding, NodeReadings, Outcome
from toolkit.doctor.environment_report import rdma_ports
from toolkit.doctor.examination import node_facts
from toolkit.doctor.options import DoctorOptions

NVML_CHECKS = [name for name in CHECKS if name.startswith("gpu-") and name not in ("gpu-xid", "gpu-count")]
NO_REAL_GPU = pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")
SOUND: dict[str, Any] = {
    **{"Name": "NVIDIA H100 80GB HBM3", "VbiosVersion": "96.00.89.00.01", "PersistenceMode": 1, "EccMode": [1, 1]},
    **{"TotalEccErrors": 0, "MemoryErrorCounter": 0, "RemappedRows": (0, 0, 0, 0)},
    "CurrentClocksThrottleReasons": 0x1,  # idle
    **{"Temperature": 41, "MaxClockInfo": 1980, "ComputeRunningProcesses": []},
    **{"PowerManagementLimit": 700_000, "PowerManagementDefaultLimit": 700_000},
    **{"NvLinkState": 1, "NvLinkErrorCounter": 0, "P2PStatus": 0},
    "recovery": 0,
    "fabric": (3, 0),  # completed, success
}
FAULTY = SOUND | {
    "PersistenceMode": 0,
    "TotalEccErrors": 1,
    "MemoryErrorCounter": 5,
    "RemappedRows": (0, 8, 1, 1),  # correctable, uncorrectable, pending, failed
    "CurrentClocksThrottleReasons": 0x40,
    "PowerManagementLimit": 500_000,
    "ComputeRunningProcesses": [SimpleNamespace(pid=4711, usedGpuMemory=3 * 2**30)],
    "NvLinkState": lambda link: int(link != 3),
    "NvLinkErrorCounter": lambda link, counter: 7 if (link, counter) == (2, 1) else 0,
    "recovery": 1,
    "fabric": (2, 0),
}


class FabricInfo(ctypes.Structure):
    _fields_ = (("state", ctypes.c_uint), ("status", ctypes.c_uint))


class FakeNvml:
    """The functions of `pynvml` on GPUs given as dictionaries; a handle is the GPU's place."""

    NVMLError = RuntimeError
    c_nvmlGpuFabricInfo_v2_t = FabricInfo  # noqa: N815
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, *gpus: dict[str, Any], failure: str | None = None) -> None:
        self.gpus, self.failure = gpus, failure
        self.nvmlDeviceGetCount = lambda: len(gpus)
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(busId=f"00000000:{handle}9:00.0")

    def nvmlInit(self) -> None:  # noqa: N802
        if self.failure:
            raise self.NVMLError(self.failure)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [230]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.gpus[handle]["recovery"]))]

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, reference: Any) -> None:  # noqa: N802
        reference._obj.state, reference._obj.status = self.gpus[handle]["fabric"]

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def answer(handle: int, *arguments: Any) -> Any:
            value = self.gpus[handle][function.removeprefix("nvmlDeviceGet")]  # KeyError: not supported
            return value(*arguments) if callable(value) else value

        return answer


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NodeReadings]:
    def node(*gpus: dict[str, Any], failure: str | None = None, **options: Any) -> NodeReadings:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, failure=failure))
        return NodeReadings(DoctorOptions(**options))

    return node


Node = Callable[..., NodeReadings]


def findings(node: NodeReadings, checks: list[str]) -> list[tuple[str, NodeFinding]]:
    return [(check, found) for check in checks for found in CHECKS[check].run(node).findings]


def run_here(check: str, **readings: Any) -> Outcome:
    here = NodeReadings(DoctorOptions())
    here.__dict__.update(readings)
    return CHECKS[check].run(here)


def test_sound_gpus_have_no_finding_and_old_ones_none_for_what_they_do_not_support(node: Node) -> None:
    sound = node(SOUND, SOUND, gpus_per_node=2)
    assert findings(sound, [*NVML_CHECKS, "gpu-count"] if not sound.pci_gpus else NVML_CHECKS) == []
    assert CHECKS["gpu-count"].run(sound).measured["names"] == ["NVIDIA H100 80GB HBM3"] * 2
    clocks = {"power_limit_watts": 700.0, "max_sm_clock_mhz": 1980, "celsius": 41, "reduced_by": [], "persistence": 1}
    assert CHECKS["gpu-clocks"].run(sound).measured["1"] == clocks
    assert CHECKS["gpu-links"].run(sound).measured["0"] == {"active_nvlinks": 18}
    facts = node_facts(sound)
    assert (facts["gpus"], facts["vbios"]) == ("2 × NVIDIA H100 80GB HBM3", "2 × 96.00.89.00.01")
    old = node({"Name": "Tesla T4", "recovery": 0, "fabric": (0, 0)})
    assert findings(old, NVML_CHECKS) == []
    assert CHECKS["gpu-ecc"].run(old).measured["0"]["enabled"] is None


def test_every_fault_of_a_gpu_is_found_with_its_level(node: Node) -> None:
    faulty = node(SOUND | {"P2PStatus": 4}, FAULTY)
    found = findings(faulty, NVML_CHECKS)
    assert {check: [finding.level for name, finding in found if name == check] for check in NVML_CHECKS} == {
        "gpu-ecc": ["error", "error", "error", "warning"],  # in its life, not remapped, since the driver; one waits
        "gpu-recovery": ["error", "error"],  # of the GPU, of the NVSwitch fabric
        "gpu-clocks": ["error", "warning", "warning", "warning"],  # heat, power limit, persistence, unlike the other
        "gpu-processes": ["note"],
        "gpu-links": ["warning", "warning", "warning", "warning"],  # inactive, errors, no NVLink, no peer access
    }
    blamed = {finding.what.partition(": ")[0] for _, finding in found if finding.what.startswith("GPU ")}
    assert blamed == {"GPU 1 (0000:19:00.0)"}
    values = {finding.value for _, finding in found}
    assert {"5", "500 W", "3.00 GiB", "7 recoveries", "hardware thermal slowdown, at 41 °C", "0-1"} <= values
    assert "nvidia-smi -i 1 -pl 700" in {finding.fix for _, finding in found}


@NO_REAL_GPU
def test_a_driver_that_does_not_answer_and_a_missing_package_are_named(
    node: Node, program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("nvidia-smi", 'echo "GPU 0: NVIDIA H100"')
    broken = node(failure="Driver/library version mismatch")
    ((_, found),) = findings(broken, ["gpu-count"])
    assert (found.level, found.value) == ("error", "0 listed, NVML: Driver/library version mismatch")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert run_here("gpu-ecc").skipped == "nvidia-ml-py is not installed: pip install 'finetune-toolkit[gpu]'"


def test_xids_are_counted_by_gpu_and_code_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        "[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15\n"
        "[12.5] NVRM: Xid (PCI:0000:9D:00): 13, pid=4711, Graphics Exception: ESR 0x504730=0x10\n"
        "[12.6] NVRM: Xid (PCI:0000:9D:00): 13, pid=4711, Graphics Exception: ESR 0x504730=0x11\n"
        "[99.0] NVRM: Xid (PCI:0000:c3:00): 79, pid=0, GPU has fallen off the bus.\n"
        "[99.9] NVRM: Xid (PCI:0000:c3:00): 250\n"
    )
    monkeypatch.setattr("toolkit.doctor.gpu_checks.output_of", lambda *_: log)
    rows = [(row.what, row.value[:3], row.level, row.fix[:10]) for row in run_here("gpu-xid").findings]
    assert rows == [
        ("Xid 79 of 0000:c3:00", "1 ×", "error", "reboot the"),
        ("Xid 13 of 0000:9d:00", "2 ×", "warning", "look for t"),
        ("Xid 250 of 0000:c3:00", "1 ×", "warning", "look it up"),
    ]
    monkeypatch.setattr("toolkit.doctor.gpu_checks.output_of", lambda *_: None)
    assert run_here("gpu-xid").skipped == "this user may not read the kernel log: `sudo dmesg | grep Xid`"


@pytest.mark.gpu
def test_gpus_of_this_node_are_examined() -> None:
    """Every reading meets the real NVML."""
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-m", "toolkit", "doctor", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=560)
    report = json.loads(ended.stdout)
    rows = {row["check"]: row for row in report["checks"]}
    assert rows["gpu-count"]["measured"]["listed"] > 0
    assert [rows[check] for check in NVML_CHECKS if rows[check]["status"] == "skipped"] == []
    assert all(row["power_limit_watts"] for row in rows["gpu-clocks"]["measured"].values())
    assert report["node_facts"]["driver"]
    assert report["node_facts"]["vbios"]


# -- host and network


def test_a_check_that_cannot_read_the_node_is_skipped_with_the_reason() -> None:
    def unreadable(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/sys/secret")

    broken = NodeCheck(source="", examine=unreadable)
    outcome = broken.run(NodeReadings(DoctorOptions()))
    assert (outcome.status, outcome.skipped) == (
        "skipped",
        "cannot be read: PermissionError: [Errno 13] Permission denied: '/sys/secret'",
    )


def write_port(root: Path, device: str, state: str, rate: str, link_layer: str = "InfiniBand") -> None:
    port = root / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {"state": state, "rate": rate, "link_layer": link_layer}.items():
        (port / name).write_text(f"{text}\n")


def test_a_port_that_is_down_or_slower_is_a_finding(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    write_port(tmp_path, "mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)")
    write_port(tmp_path, "mlx5_2", "1: DOWN", "10 Gb/sec (4X SDR)")
    write_port(tmp_path, "mlx5_3", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet")  # of a storage network
    ports = rdma_ports(tmp_path)
    assert [(row.what, row.level, row.value) for row in run_here("rdma", rdma_ports=ports).findings] == [
        ("mlx5_1 port 1 is slower than the other ports", "warning", "200 Gb/sec (4X HDR)"),
        ("mlx5_2 port 1 is not active", "warning", "DOWN"),
    ]
    (alone,) = run_here("rdma", rdma_ports=ports[2:3]).findings
    assert alone.level == "error", "no port is active"
    assert rdma_ports(tmp_path / "no such folder") == []

"""Checks of GPUs, on a stand-in for `pynvml`: no GPU is here to ask. A test marked `gpu` asks the real one."""

from __future__ import annotations

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
from launching import ROOT

from toolkit.doctor.checks import CHECKS, NodeFinding, NodeReadings, Outcome
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
    **{"CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16, "MaxPcieLinkGeneration": 5, "GpuMaxPcieLinkGeneration": 5},
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
    **{"CurrPcieLinkWidth": 8, "MaxPcieLinkGeneration": 4},
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


def test_sound_gpus_have_no_finding(node: Node) -> None:
    sound = node(SOUND, SOUND, gpus_per_node=2)
    assert findings(sound, [*NVML_CHECKS, "gpu-count"] if not sound.pci_gpus else NVML_CHECKS) == []
    assert CHECKS["gpu-count"].run(sound).measured["names"] == ["NVIDIA H100 80GB HBM3"] * 2
    clocks = {"power_limit_watts": 700.0, "max_sm_clock_mhz": 1980, "celsius": 41, "reduced_by": [], "persistence": 1}
    assert CHECKS["gpu-clocks"].run(sound).measured["1"] == clocks
    assert CHECKS["gpu-links"].run(sound).measured["0"] == {"active_nvlinks": 18}
    facts = node_facts(sound)
    assert (facts["gpus"], facts["vbios"]) == ("2 × NVIDIA H100 80GB HBM3", "2 × 96.00.89.00.01")


def test_every_fault_of_a_gpu_is_found_with_its_level(node: Node) -> None:
    faulty = node(SOUND | {"P2PStatus": 4}, FAULTY)
    found = findings(faulty, NVML_CHECKS)
    assert {check: [finding.level for name, finding in found if name == check] for check in NVML_CHECKS} == {
        "gpu-ecc": ["error", "error", "error", "warning"],  # in its life, not remapped, since the driver; one waits
        "gpu-recovery": ["error", "error"],  # of the GPU, of the NVSwitch fabric
        "gpu-clocks": ["error", "warning", "warning", "warning"],  # heat, power limit, persistence, unlike the other
        "gpu-processes": ["note"],
        "gpu-pcie": ["warning", "note"],  # lanes, generation
        "gpu-links": ["warning", "warning", "warning", "warning"],  # inactive, errors, no NVLink, no peer access
    }
    blamed = {finding.what.partition(": ")[0] for _, finding in found if finding.what.startswith("GPU ")}
    assert blamed == {"GPU 1 (0000:19:00.0)"}
    values = {finding.value for _, finding in found}
    assert {"5", "500 W", "8x", "3.00 GiB", "7 recoveries", "hardware thermal slowdown, at 41 °C", "0-1"} <= values
    assert "nvidia-smi -i 1 -pl 700" in {finding.fix for _, finding in found}


def test_what_a_gpu_does_not_support_is_no_finding(node: Node) -> None:
    old = node({"Name": "Tesla T4", "recovery": 0, "fabric": (0, 0)})
    assert findings(old, NVML_CHECKS) == []
    assert CHECKS["gpu-ecc"].run(old).measured["0"]["enabled"] is None


def test_a_gpu_that_is_missing_is_an_error(node: Node) -> None:
    ((_, found),) = findings(node(SOUND, gpus_per_node=2), ["gpu-count"])
    assert (found.level, found.value, found.expected) == ("error", "1 listed", "2, as --gpus-per-node says")


@NO_REAL_GPU
def test_a_driver_that_does_not_answer_and_a_missing_package_are_named(
    node: Node, program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("nvidia-smi", 'echo "GPU 0: NVIDIA H100"')
    broken = node(failure="Driver/library version mismatch")
    ((_, found),) = findings(broken, ["gpu-count"])
    assert (found.level, found.value) == ("error", "0 listed, NVML: Driver/library version mismatch")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    skipped = CHECKS["gpu-ecc"].run(NodeReadings(DoctorOptions())).skipped
    assert skipped == "nvidia-ml-py is not installed: pip install -c constraints.txt -e '.[gpu]'"


def test_xids_are_counted_by_gpu_and_code_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        "[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15\n"
        "[12.5] NVRM: Xid (PCI:0000:9D:00): 13, pid=4711, Graphics Exception: ESR 0x504730=0x10\n"
        "[12.6] NVRM: Xid (PCI:0000:9D:00): 13, pid=4711, Graphics Exception: ESR 0x504730=0x11\n"
        "[99.0] NVRM: Xid (PCI:0000:c3:00): 79, pid=0, GPU has fallen off the bus.\n"
        "[99.9] NVRM: Xid (PCI:0000:c3:00): 250\n"
    )
    monkeypatch.setattr("toolkit.doctor.gpu_checks.output_of", lambda *_: log)
    found = CHECKS["gpu-xid"].run(NodeReadings(DoctorOptions())).findings
    assert [(finding.what, finding.value[:3], finding.level, finding.fix[:10]) for finding in found] == [
        ("Xid 79 of 0000:c3:00", "1 ×", "error", "reboot the"),
        ("Xid 13 of 0000:9d:00", "2 ×", "warning", "look for t"),
        ("Xid 250 of 0000:c3:00", "1 ×", "warning", "look it up"),
    ]
    monkeypatch.setattr("toolkit.doctor.gpu_checks.output_of", lambda *_: None)
    unreadable = CHECKS["gpu-xid"].run(NodeReadings(DoctorOptions()))
    assert unreadable.skipped == "this user may not read the kernel log: `sudo dmesg | grep Xid`"


def test_nvidias_diagnostics_decide_where_they_are_installed(node: Node, program: Callable[[str, str], None]) -> None:
    def run(table: str, exit_code: int) -> Outcome:
        program("dcgmi", f"[ \"$*\" = 'diag -r 2' ] || exit 9\necho '{table}'\nexit {exit_code}")
        return CHECKS["dcgm"].run(node(SOUND))

    assert str(CHECKS["dcgm"].run(node(SOUND)).skipped).startswith("dcgmi is not installed")
    assert run("| PCIe        | Pass - All    |", 0).findings == []
    (failed,) = run("| GPU Memory  | Fail - GPU: 3 |", 0).findings
    assert (failed.level, failed.value) == ("error", "GPU Memory: Fail - GPU: 3")
    (stopped,) = run("Error: unable to connect to host engine", 255).findings
    assert stopped.value == "Error: unable to connect to host engine"


@pytest.mark.gpu
def test_gpus_of_this_node_are_examined() -> None:
    """Every reading meets the real NVML, and NCCL is measured where there are two GPUs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "toolkit", "doctor", "--long", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=560)
    report = json.loads(ended.stdout)
    rows = {row["check"]: row for row in report["checks"]}
    assert rows["gpu-count"]["measured"]["listed"] > 0
    assert [rows[check] for check in NVML_CHECKS if rows[check]["status"] == "skipped"] == []
    assert all(row["power_limit_watts"] for row in rows["gpu-clocks"]["measured"].values())
    assert rows["gpu-pcie"]["measured"]["0"]["max_width"] in (1, 2, 4, 8, 16)
    assert report["node_facts"]["driver"]
    assert report["node_facts"]["vbios"]
    if rows["gpu-count"]["measured"]["listed"] > 1:
        assert rows["all-reduce"]["status"] != "error", rows["all-reduce"]

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

from toolkit.doctor.checks import CHECKS, NodeFinding, NodeReadings, NotMeasured, Outcome
from toolkit.doctor.examination import all_checks, node_facts
from toolkit.doctor.options import DoctorOptions

NVML_CHECKS = [name for name in CHECKS if name.startswith("gpu-") and name not in ("gpu-xid", "gpu-count")]
NO_REAL_GPU = pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")
SOUND: dict[str, Any] = {
    "Name": "NVIDIA H100 80GB HBM3",
    "VbiosVersion": "96.00.89.00.01",
    "PersistenceMode": 1,
    "EccMode": [1, 1],
    "TotalEccErrors": 0,
    "MemoryErrorCounter": 0,
    "RemappedRows": (0, 0, 0, 0),
    "CurrentClocksThrottleReasons": 0x1,  # idle
    "Temperature": 41,
    "PowerManagementLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "MaxClockInfo": 1980,
    "ComputeRunningProcesses": [],
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

    c_nvmlGpuFabricInfo_v2_t = FabricInfo  # noqa: N815
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: dict[str, Any], failure: str | None = None) -> None:
        self.gpus, self.failure = gpus, failure

    def nvmlInit(self) -> None:  # noqa: N802
        if self.failure:
            raise self.NVMLError(self.failure)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle}9:00.0")

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [230]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.gpus[handle]["recovery"]))]

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, reference: Any) -> None:  # noqa: N802
        reference._obj.state, reference._obj.status = self.gpus[handle]["fabric"]

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def answer(handle: int, *arguments: Any) -> Any:
            name = function.removeprefix("nvmlDeviceGet")
            if name not in self.gpus[handle]:
                raise self.NVMLError("Not Supported")
            value = self.gpus[handle][name]
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
    return [(check, found) for check in checks for found in CHECKS[check].examine(node).findings]


def test_sound_gpus_have_no_finding(node: Node) -> None:
    sound = node(SOUND, SOUND, gpus_per_node=2)
    assert findings(sound, [*NVML_CHECKS, "gpu-count"] if not sound.pci_gpus else NVML_CHECKS) == []
    assert CHECKS["gpu-count"].examine(sound).measured["names"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert CHECKS["gpu-clocks"].examine(sound).measured["1"] == {
        "power_limit_watts": 700.0,
        "max_sm_clock_mhz": 1980,
        "celsius": 41,
        "reduced_by": [],
        "persistence": 1,
    }
    assert CHECKS["gpu-links"].examine(sound).measured["0"] == {"active_nvlinks": 18}


def test_every_fault_of_a_gpu_is_found_with_its_level(node: Node) -> None:
    faulty = node(SOUND | {"P2PStatus": 4}, FAULTY)
    found = findings(faulty, NVML_CHECKS)
    assert [(check, finding.level) for check, finding in found] == [
        ("gpu-ecc", "error"),  # five uncorrectable SRAM errors in its life
        ("gpu-ecc", "error"),  # a row that could not be remapped
        ("gpu-ecc", "error"),  # an error since the driver was loaded
        ("gpu-ecc", "warning"),  # a row that waits
        ("gpu-recovery", "error"),  # the driver asks for a reset
        ("gpu-recovery", "error"),  # NVSwitch
        ("gpu-clocks", "error"),  # throttled by the hardware
        ("gpu-clocks", "warning"),  # power limit below its default
        ("gpu-clocks", "warning"),  # persistence mode
        ("gpu-clocks", "warning"),  # a power limit that is not that of the other GPU
        ("gpu-processes", "note"),
        ("gpu-pcie", "warning"),  # 8 lanes of 16
        ("gpu-pcie", "note"),  # generation 4 of 5
        ("gpu-links", "warning"),  # an inactive link
        ("gpu-links", "warning"),  # errors of another
        ("gpu-links", "warning"),  # a pair without NVLink
        ("gpu-links", "warning"),  # and without peer access
    ]
    blamed = {finding.what.partition(": ")[0] for _, finding in found if finding.what.startswith("GPU ")}
    assert blamed == {"GPU 1 (0000:19:00.0)"}
    values = {finding.value for _, finding in found}
    assert {"5", "500 W", "8x", "3.00 GiB", "7 recoveries", "hardware thermal slowdown, at 41 °C", "0-1"} <= values
    assert "nvidia-smi -i 1 -pl 700" in {finding.fix for _, finding in found}


def test_what_a_gpu_does_not_support_is_no_finding(node: Node) -> None:
    old = node({"Name": "Tesla T4", "recovery": 0, "fabric": (0, 0)})
    assert findings(old, NVML_CHECKS) == []
    assert CHECKS["gpu-ecc"].examine(old).measured["0"]["enabled"] is None


def test_facts_for_the_comparison_of_nodes_name_gpus_and_firmware(node: Node) -> None:
    facts = node_facts(node(SOUND, SOUND))
    assert (facts["gpus"], facts["vbios"]) == ("2 × NVIDIA H100 80GB HBM3", "2 × 96.00.89.00.01")


def test_a_gpu_that_is_missing_is_an_error(node: Node) -> None:
    ((_, found),) = findings(node(SOUND, gpus_per_node=2), ["gpu-count"])
    assert (found.level, found.value, found.expected) == ("error", "1 listed", "2, as --gpus-per-node says")


@NO_REAL_GPU
def test_a_driver_that_does_not_answer_and_a_missing_package_are_named(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "GPU 0: NVIDIA H100"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    broken = node(failure="Driver/library version mismatch")
    ((_, found),) = findings(broken, ["gpu-count"])
    assert (found.level, found.value) == ("error", "0 listed, NVML: Driver/library version mismatch")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotMeasured, match=r"nvidia-ml-py is not installed: pip install .*\[gpu\]"):
        CHECKS["gpu-ecc"].examine(NodeReadings(DoctorOptions()))


def test_xids_are_counted_by_gpu_and_code_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        "[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15\n"
        "[12.5] NVRM: Xid (PCI:0000:9D:00): 13, pid=4711, Graphics Exception: ESR 0x504730=0x10\n"
        "[12.6] NVRM: Xid (PCI:0000:9D:00): 13, pid=4711, Graphics Exception: ESR 0x504730=0x11\n"
        "[99.0] NVRM: Xid (PCI:0000:c3:00): 79, pid=0, GPU has fallen off the bus.\n"
        "[99.9] NVRM: Xid (PCI:0000:c3:00): 250\n"
    )
    monkeypatch.setattr("toolkit.doctor.gpu_checks.output_of", lambda *_: log)
    found = CHECKS["gpu-xid"].examine(NodeReadings(DoctorOptions())).findings
    assert [(finding.what, finding.value[:3], finding.level) for finding in found] == [
        ("Xid 13 of 0000:9d:00", "2 ×", "warning"),
        ("Xid 79 of 0000:c3:00", "1 ×", "error"),
        ("Xid 250 of 0000:c3:00", "1 ×", "warning"),
    ]
    assert found[1].fix == "reboot the node; if it returns, replace the GPU"
    assert found[2].fix.startswith("look it up: https://docs.nvidia.com/")


def test_a_kernel_log_that_cannot_be_read_is_not_taken_for_a_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.doctor.gpu_checks.output_of", lambda *_: None)
    with pytest.raises(NotMeasured, match="sudo dmesg"):
        CHECKS["gpu-xid"].examine(NodeReadings(DoctorOptions()))


def test_nvidias_diagnostics_decide_where_they_are_installed(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(table: str, exit_code: int) -> Outcome:
        program = tmp_path / "dcgmi"
        program.write_text(f"#!/bin/sh\n[ \"$*\" = 'diag -r 2' ] || exit 9\necho '{table}'\nexit {exit_code}\n")
        program.chmod(0o755)
        return CHECKS["dcgm"].examine(node(SOUND))

    with pytest.raises(NotMeasured, match="dcgmi is not installed"):
        CHECKS["dcgm"].examine(node(SOUND))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert examine("| PCIe        | Pass - All    |", 0).findings == []
    (failed,) = examine("| GPU Memory  | Fail - GPU: 3 |", 0).findings
    assert (failed.level, failed.value) == ("error", "GPU Memory: Fail - GPU: 3")
    (stopped,) = examine("Error: unable to connect to host engine", 255).findings
    assert stopped.value == "Error: unable to connect to host engine"


@pytest.mark.gpu
def test_gpus_of_this_node_are_examined() -> None:
    """Every reading meets the real NVML, and NCCL is measured where there are two GPUs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "toolkit", "doctor", "--long", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=560)
    report = json.loads(ended.stdout)
    rows = {row["check"]: row for row in report["checks"]}
    assert list(rows) == [check.name for check in all_checks()]
    assert rows["gpu-count"]["measured"]["listed"] > 0
    for check in ("gpu-ecc", "gpu-recovery", "gpu-clocks", "gpu-processes", "gpu-links", "gpu-pcie"):
        assert rows[check]["status"] != "skipped", rows[check]
    assert all(row["power_limit_watts"] for row in rows["gpu-clocks"]["measured"].values())
    assert rows["gpu-pcie"]["measured"]["0"]["max_width"] in (1, 2, 4, 8, 16)
    assert report["node_facts"]["driver"]
    assert report["node_facts"]["vbios"]
    if rows["gpu-count"]["measured"]["listed"] > 1:
        assert rows["all-reduce"]["status"] != "error", rows["all-reduce"]

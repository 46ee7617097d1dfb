"""Matmul and all-reduce: really measured in two processes, and judged against published figures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from launching import ROOT

from toolkit.doctor import speed_probe
from toolkit.doctor.checks import CHECKS
from toolkit.doctor.node_readings import NodeReadings
from toolkit.doctor.options import DoctorOptions
from toolkit.doctor.speed_checks import matmul_findings
from toolkit.doctor.speed_probe import PAYLOAD_BYTES, NodeSpeed, achievable_matmul, measure_speed
from toolkit.hardware.gpu_table import find_gpu

NVLINK_H100 = "NVIDIA H100 80GB HBM3"


def speed(**changes: object) -> NodeSpeed:
    measured = NodeSpeed(
        device="cuda",
        world_size=8,
        shape=(2048, 2048, 13312),
        matmul_tflops=(790.0,) * 8,
        all_reduce_seconds=0.002,
    )
    return dataclasses.replace(measured, **changes)


def test_every_published_figure_is_below_the_peak_of_its_gpu() -> None:
    for name, figure in speed_probe.ACHIEVABLE_MATMUL.items():
        assert 0.5 < figure.tflops / (find_gpu(name).bf16_tflops or 0) < 1, name
    assert achievable_matmul("NVIDIA H200") == achievable_matmul(NVLINK_H100)
    assert (achievable_matmul("Tesla T4"), achievable_matmul("a card from the future")) == (None, None)


def test_a_gpu_more_than_five_percent_below_the_others_is_found() -> None:
    assert matmul_findings((790.0, 752.0), 794.5) == []
    (finding,) = matmul_findings((790.0, 790.0, 740.0), 794.5)
    assert finding.what.startswith("GPU 2 computes more slowly")
    assert finding.value == "740 TFLOP/s, 6% below GPU 0"


def test_gpus_that_are_all_slow_are_found_against_the_published_figure() -> None:
    (finding,) = matmul_findings((650.0, 655.0), 794.5)
    assert (finding.value, finding.expected) == ("655 TFLOP/s", "at least 715 of 794 TFLOP/s")
    assert matmul_findings((650.0, 655.0), None) == []  # no figure is known


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 2 x 7/8 of 256 MiB in 2 ms
    assert speed().bus_bytes_per_second == pytest.approx(2 * 7 / 8 * PAYLOAD_BYTES / 0.002)
    assert speed(all_reduce_seconds=None).bus_bytes_per_second is None


@pytest.mark.parametrize(
    ("measured", "levels"),
    [
        (speed(), []),  # 235 GB/s, within the planner's range of 107 to 450
        (speed(all_reduce_seconds=0.01), ["warning"]),  # 47 GB/s
        (speed(all_reduce_seconds=None, failure="rank 3: NCCL error"), ["error"]),
        (speed(world_size=1, matmul_tflops=(790.0,), all_reduce_seconds=None), []),
    ],
)
def test_an_all_reduce_is_judged_by_the_planners_table(
    measured: NodeSpeed, levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeReadings(DoctorOptions())
    monkeypatch.setitem(node.__dict__, "speed", measured)
    monkeypatch.setattr("toolkit.doctor.speed_checks._gpu_name", lambda _: NVLINK_H100)
    outcome = CHECKS["all-reduce"].examine(node)
    assert [finding.level for finding in outcome.findings] == levels


@pytest.mark.launch
@pytest.mark.cold_start
def test_two_processes_really_multiply_and_reduce_on_a_cpu() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "toolkit", "doctor", "--long", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    rows = {row["check"]: row for row in json.loads(ended.stdout)["checks"]}
    matmul, all_reduce = rows["matmul"]["measured"], rows["all-reduce"]["measured"]
    assert (matmul["device"], matmul["dtype"], len(matmul["tflops"])) == ("cpu", "fp32", 2)
    assert min(matmul["tflops"]) > 0
    assert matmul["remark"] == "two processes on the CPU: says nothing about a GPU"
    assert (all_reduce["backend"], all_reduce["ranks"], all_reduce["payload_bytes"]) == ("gloo", 2, 256 * 2**20)
    # 2 x 1/2 of the payload per second
    assert all_reduce["bus_bytes_per_second"] == pytest.approx(PAYLOAD_BYTES / all_reduce["seconds"], rel=1e-6)
    assert (rows["matmul"]["status"], rows["all-reduce"]["status"]) == ("ok", "ok")
    assert "measuring: matmul" in ended.stderr
    speeds = rows["disk-speed"]["measured"]["run folder"]
    assert speeds.get("writes_bytes_per_second", 1) > 0


@pytest.mark.launch
@pytest.mark.cold_start
def test_a_process_that_fails_is_an_error_and_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_probe, "CPU_SHAPE", (8, 8, -8))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    measured = measure_speed(None)
    assert measured.matmul_tflops == ()
    assert measured.all_reduce_seconds is None
    assert measured.failure is not None
    assert "negative dimension -8" in measured.failure
    node = NodeReadings(DoctorOptions())
    monkeypatch.setitem(node.__dict__, "speed", measured)
    for check in ("matmul", "all-reduce"):
        (finding,) = CHECKS[check].examine(node).findings
        assert (finding.level, finding.value) == ("error", measured.failure)


@pytest.mark.gpu
def test_gpus_of_this_node_are_examined() -> None:
    """Every parser meets the real nvidia-smi, and NCCL is measured where there are two GPUs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "toolkit", "doctor", "--long", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=560)
    report = json.loads(ended.stdout)
    rows = {row["check"]: row for row in report["checks"]}
    listed = rows["gpu-count"]["measured"]["listed"]
    assert listed > 0
    for check in ("gpu-persistence", "gpu-ecc", "gpu-row-remap", "gpu-throttling", "gpu-clocks", "gpu-pcie"):
        assert rows[check]["status"] != "skipped", rows[check]
    assert all(row["power_limit_watts"] for row in rows["gpu-clocks"]["measured"].values())
    assert rows["gpu-pcie"]["measured"]["0"]["max_width"] in (1, 2, 4, 8, 16)
    assert report["node_facts"]["driver"]
    assert report["node_facts"]["vbios"]
    matmul = rows["matmul"]["measured"]
    assert (matmul["device"], matmul["dtype"]) == ("cuda", "bf16")
    peak = find_gpu(rows["gpu-count"]["measured"]["names"][0]).bf16_tflops
    assert peak is None or all(0.1 * peak < value < peak for value in matmul["tflops"])
    assert rows["all-reduce"]["measured"]["backend"] == "nccl"

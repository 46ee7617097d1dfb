"""The all-reduce: really run in two processes, and judged by the planner's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.doctor import speed_checks
from toolkit.doctor.checks import CHECKS, NodeReadings
from toolkit.doctor.options import DoctorOptions
from toolkit.doctor.speed_checks import read_nccl_tests, run_program


@pytest.mark.parametrize(
    ("printed", "levels"),
    [
        ("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 235.1", []),  # the planner's range: 107 to 450
        ("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 47.0", ["warning"]),
        ("# Out of bounds values : 3 FAILED\n# Avg bus bandwidth    : 235.1", ["error"]),
        ("n1: Test NCCL failure common.cu:958 'unhandled system error'", ["error"]),
    ],
)
def test_the_verdict_of_nccl_tests_is_reported_where_they_are_installed(
    printed: str, levels: list[str], program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("all_reduce_perf", f"[ \"$*\" = '-b {2**28} -e {2**28} -g 8' ] || exit 9\ncat <<'END'\n{printed}\nEND")
    monkeypatch.setattr("toolkit.doctor.speed_checks.count_gpus", lambda: 8)
    node = NodeReadings(DoctorOptions())
    monkeypatch.setitem(node.__dict__, "gpu_names", ["NVIDIA H100 80GB HBM3"] * 8)
    outcome = CHECKS["all-reduce"].run(node)
    assert [finding.level for finding in outcome.findings] == levels
    assert outcome.measured["measured_by"] == "nccl-tests"
    assert outcome.measured["bus_bytes_per_second"] == read_nccl_tests(printed)


def test_a_program_that_does_not_end_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_checks, "PROGRAM_SECONDS", 0.2)
    code, printed = run_program(["sh", "-c", "sleep 60 & wait"])
    assert (code, printed) == (124, "sh does not end within 0 s")


def test_torch_reduces_between_the_gpus_where_nccl_tests_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {}

    def run_probe(command: list[str], **variables: str) -> tuple[int, str]:
        run.update(command=command[1:], variables=variables)
        return 1, "RuntimeError: the all-reduce of ones over 8 ranks returned 7.0\n"

    monkeypatch.setattr(speed_checks, "run_program", run_probe)
    monkeypatch.setattr(speed_checks, "count_gpus", lambda: 8)
    monkeypatch.setattr("shutil.which", lambda _: None)
    outcome = CHECKS["all-reduce"].run(NodeReadings(DoctorOptions()))
    assert run == {"command": ["-m", "toolkit.doctor.speed_checks", "8"], "variables": {}}
    assert (outcome.measured["measured_by"], outcome.measured["remark"]) == ("torch, nccl", None)
    (found,) = outcome.findings
    assert (found.level, found.value[-12:]) == ("error", "returned 7.0")


@pytest.mark.launch
@pytest.mark.cold_start
def test_two_processes_really_reduce_on_a_cpu_without_nccl_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.doctor.speed_checks.count_gpus", lambda: 0)
    outcome = CHECKS["all-reduce"].run(NodeReadings(DoctorOptions()))
    assert outcome.findings == []
    assert outcome.measured["bus_bytes_per_second"] > 0
    assert (outcome.measured["measured_by"], outcome.measured["ranks"]) == ("torch, gloo", 2)
    assert outcome.measured["remark"] == "two processes on the CPU: says nothing about a GPU"

"""The all-reduce: really run in two processes, and judged by the planner's table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

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
    printed: str, levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "all_reduce_perf"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '-b {2**28} -e {2**28} -g 8' ] || exit 9\ncat <<'END'\n{printed}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("toolkit.doctor.speed_checks.count_gpus", lambda: 8)
    node = NodeReadings(DoctorOptions())
    monkeypatch.setitem(node.__dict__, "gpu_names", ["NVIDIA H100 80GB HBM3"] * 8)
    outcome = CHECKS["all-reduce"].examine(node)
    assert [finding.level for finding in outcome.findings] == levels
    assert outcome.measured["measured_by"] == "nccl-tests"
    assert outcome.measured["bus_bytes_per_second"] == read_nccl_tests(printed)


def test_a_program_that_does_not_end_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_checks, "PROGRAM_SECONDS", 0.2)
    code, printed = run_program(["sh", "-c", "sleep 60 & wait"])
    assert (code, printed) == (124, "sh does not end within 0 s")


@pytest.mark.launch
@pytest.mark.cold_start
def test_two_processes_really_reduce_on_a_cpu() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "toolkit", "doctor", "--long", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    rows = {row["check"]: row for row in json.loads(ended.stdout)["checks"]}
    measured = rows["all-reduce"]["measured"]
    assert (measured["measured_by"], measured["ranks"], measured["payload_bytes"]) == ("torch, gloo", 2, 256 * 2**20)
    assert measured["bus_bytes_per_second"] > 0
    assert measured["remark"] == "two processes on the CPU: says nothing about a GPU"
    assert rows["all-reduce"]["status"] == "ok"
    assert "measuring: all-reduce" in ended.stderr
    assert rows["disk-speed"]["measured"]["run folder"].get("writes_bytes_per_second", 1) > 0


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.cold_start
def test_a_rank_that_fails_is_reported_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong result comes from a torch whose all-reduce does nothing."""
    patch = "import torch.distributed as d\nd.all_reduce = lambda payload: None\n"
    hook = f"import sys\nif 'multiprocessing.spawn' in ' '.join(sys.orig_argv):\n    exec({patch!r})\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(speed_checks, "count_gpus", lambda: 0)
    (found,) = CHECKS["all-reduce"].examine(NodeReadings(DoctorOptions())).findings
    assert (found.level, found.what) == ("error", "the all-reduce of 2 processes fails")
    assert found.value == "RuntimeError: the all-reduce of ones over 2 ranks returned 1.0"

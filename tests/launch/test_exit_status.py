"""The final status of a run, from the failing rank or from how its processes ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.launch.launch import record_result
from toolkit.launch.process import ProcessResult, find_killed_rank
from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder, write_json


def running_folder(path: Path, **run: Any) -> RunFolder:
    folder = RunFolder(path)
    start_attempt(folder)
    folder.update_run(status="running", launcher_pid=os.getpid(), **run)
    folder.log.write_text("loading\n\n=====\nfirst\nsecond\nthird\n")
    return folder


def ended(folder: RunFolder, *, exit_code: int = 1, memory: bool = False, **how: bool) -> tuple[str, int, Any]:
    result = record_result(folder, ProcessResult(exit_code=exit_code, seconds=12.3456, **how), oom_killed=memory)
    run = folder.read_run()
    assert run is not None
    assert (run["status"], run["exit_code"]) == (result.status, result.exit_code)
    assert (run["wall_seconds"], run["launcher_pid"]) == (12.346, None)
    return result.status, result.exit_code, result.failure


@pytest.mark.parametrize(
    ("kind", "invalid_input", "code"),
    [
        ("out_of_memory", False, 3),
        ("host_out_of_memory", False, 3),
        ("attestation_failed", False, 1),
        ("diverged", False, 1),
        ("failed", False, 1),
        ("failed", True, 2),
    ],
)
def test_the_failing_ranks_report_decides_the_status(kind: str, invalid_input: bool, code: int, tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    written = {"kind": kind, "message": "reported by rank 1", "rank": 1, "invalid_input": invalid_input}
    write_json(folder.failure_json, written)
    assert ended(folder, memory=True) == (kind, code, written)


def test_without_a_report_the_last_log_lines_are_the_message(tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    status, code, failure = ended(folder, exit_code=-11)
    assert (status, code) == ("failed", 1)
    assert failure["message"] == "the launcher ended with code -11: first | second | third"
    assert (failure["kind"], failure["rank"], failure["hint"]) == ("failed", None, f"see {folder.log}")
    assert json.loads(folder.failure_json.read_text()) == failure


REFUSED_BY_A_RANK = """
error: the job asked for 2 ranks (TOOLKIT_WORLD_SIZE), and 1 were started
  hint: ask for 2 GPUs
E1123 11:10:15.326000 2299 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank: 0
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 2303)
"""


@pytest.mark.parametrize("code", [2, 1])
def test_a_rank_that_refused_its_input_before_it_had_a_folder_is_quoted(code: int, tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    folder.log.write_text(REFUSED_BY_A_RANK.format(code=code))
    status, exit_code, failure = ended(folder)
    assert (status, exit_code, failure["invalid_input"]) == ("failed", code, code == 2)
    if code == 2:
        assert failure["message"] == "the job asked for 2 ranks (TOOLKIT_WORLD_SIZE), and 1 were started"
        assert failure["hint"] == "ask for 2 GPUs"


def test_exit_code_0_without_a_completed_run_is_a_failure(tmp_path: Path) -> None:
    status, code, failure = ended(running_folder(tmp_path), exit_code=0)
    assert (status, code) == ("failed", 1)
    assert failure["message"].startswith("the launcher ended with code 0")


def test_an_interrupt_is_the_status_whatever_a_rank_reported_meanwhile(tmp_path: Path) -> None:
    folder = running_folder(tmp_path / "silent")
    assert ended(folder, interrupted=True)[2]["message"].startswith("ended by a signal, without a checkpoint")
    folder = running_folder(tmp_path / "spoken")
    write_json(folder.failure_json, {"kind": "failed", "message": "connection reset", "invalid_input": False})
    assert ended(folder, interrupted=True)[:2] == ("interrupted", 1)


def test_an_oom_kill_is_host_out_of_memory(tmp_path: Path) -> None:
    status, code, failure = ended(running_folder(tmp_path), exit_code=-9, memory=True)
    assert (status, code) == ("host_out_of_memory", 3)
    assert "killed by the kernel" in failure["message"]


PEERS = {
    "failed": {"message": "Connection reset by peer", "rank": 0},
    "interrupted": {"message": "SIGTERM ended the run in step 1", "rank": 0},  # the launcher ends the others
}


@pytest.mark.parametrize("kind", PEERS)
def test_a_killed_rank_is_the_cause_and_not_the_rank_that_lost_its_connection(kind: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.failure_json, {"kind": kind} | PEERS[kind])
    folder.log.write_text(
        "[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7) \nRoot Cause (first observed failure):\n"
        "[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)  (SIGKILL)\n"
    )
    ended = record_result(folder, ProcessResult(exit_code=1, seconds=1.0), oom_killed=False)
    assert (ended.status, ended.exit_code) == ("failed", 1)
    assert ended.failure is not None
    assert (ended.failure["rank"], ended.failure["message"]) == (1, "rank 1 exited in step 1: killed by SIGKILL")
    assert ended.failure["seen_by_peer"]["message"] == PEERS[kind]["message"]
    starved = record_result(folder, ProcessResult(exit_code=1, seconds=1.0), oom_killed=True)
    assert (starved.status, starved.exit_code) == ("host_out_of_memory", 3)


def test_a_rank_killed_after_another_failed_is_not_the_cause() -> None:
    log = (
        "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)  (SIGKILL)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 2 (pid: 7) \n"
    )
    assert find_killed_rank(log) is None

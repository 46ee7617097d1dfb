"""A run's processes: logged while they run, and all gone afterwards."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from toolkit.launch.command import RUN_ID_VARIABLE, ProcessCommand
from toolkit.launch.launch import record_result
from toolkit.launch.process import ProcessResult, find_killed_rank, processes_of, run_command, start_process
from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder, write_json


def python_command(program: str, *words: str) -> ProcessCommand:
    run_id = uuid.uuid4().hex
    argv = [sys.executable, "-c", program, *words]
    return ProcessCommand(argv=argv, environment={RUN_ID_VARIABLE: run_id}, shown="", run_id=run_id)


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# Starts a process in a session of its own, which a process group does not reach, and writes its pid.
WITH_GRANDCHILD = """
import pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(grandchild.pid))
time.sleep(float(sys.argv[2]))
"""
# Notes SIGTERM, which torch's elastic agent would pass on to its ranks, and does not end.
IGNORES_SIGTERM = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "told").write_text("SIGTERM"))
(folder / "ready").write_text("ready")
time.sleep(600)
"""


@pytest.fixture
def grandchild(tmp_path: Path) -> Iterator[Path]:
    """The file into which WITH_GRANDCHILD writes its grandchild's pid; a test that fails leaves none behind."""
    path = tmp_path / "grandchild"
    yield path
    if path.exists() and is_running(path):
        os.kill(int(path.read_text()), signal.SIGKILL)


def is_running(pid_file: Path) -> bool:
    try:
        return psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_both_streams_are_logged_and_relayed(tmp_path: Path) -> None:
    program = "import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); print('last', end='')"
    lines: list[str] = []
    outcome = run_command(python_command(program), tmp_path / "train.log", on_line=lines.append)
    assert lines == ["out", "err", "last"]
    assert (tmp_path / "train.log").read_text() == "out\nerr\nlast"
    assert (outcome.exit_code, outcome.timed_out, outcome.interrupted) == (0, False, False)


def test_a_run_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.launch.process.GRACE_SECONDS", 0.3)
    # A shell ignores the signal within milliseconds: Python would still be starting on a busy node.
    command = replace(python_command(""), argv=["sh", "-c", "trap '' TERM; exec sleep 600"])
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None, timeout_seconds=1.0)
    assert outcome.exit_code == -signal.SIGKILL
    assert not processes_of(command.run_id)


class LockOfAnInterruptedPoll:
    """`Popen`'s lock as a signal leaves it that arrives between its acquisition by `poll` and the `try` after it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        assert blocking, "Popen.poll and Popen.wait with a timeout: a signal here locks it for good"
        return self.lock.acquire()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_an_interrupt_at_any_point_leaves_the_last_wait_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*given: Any) -> Any:
        made = start_process(*given)
        made._waitpid_lock = LockOfAnInterruptedPoll()  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr("toolkit.launch.process.start_process", started)
    program = "import time; time.sleep(5)"
    outcome = run_command(python_command(program), tmp_path / "log", on_line=print, timeout_seconds=0.5)
    assert (outcome.timed_out, outcome.exit_code) == (True, -signal.SIGTERM)


def test_a_grandchild_in_its_own_session_is_ended_after_a_normal_exit(tmp_path: Path, grandchild: Path) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "0")
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None)
    assert (outcome.exit_code, outcome.timed_out, is_running(grandchild)) == (0, False, False)


def test_processes_of_another_run_are_not_touched(tmp_path: Path) -> None:
    other = python_command("input()")
    environment = os.environ | other.environment
    with subprocess.Popen(other.argv, env=environment, stdin=subprocess.PIPE) as running:
        run_command(python_command("pass"), tmp_path / "log", on_line=lambda _: None)
        assert running.poll() is None
        assert [process.pid for process in processes_of(other.run_id)] == [running.pid]
        running.communicate(b"\n")


def run_and_exit(command: ProcessCommand, log: Path) -> None:
    """The program that a user would stop: it runs one command, and its exit code says how that ended."""
    outcome = run_command(command, log, on_line=lambda _: None)
    sys.exit(10 + outcome.interrupted + 2 * outcome.timed_out)


INTERRUPTED = 11


@contextlib.contextmanager
def parent_of(command: ProcessCommand, folder: Path) -> Iterator[Any]:
    parent = multiprocessing.get_context("spawn").Process(target=run_and_exit, args=(command, folder / "log"))
    parent.start()
    try:
        yield parent
    finally:
        parent.join(120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_program_ends_the_run_and_its_grandchild(
    number: signal.Signals, tmp_path: Path, grandchild: Path
) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "600")
    with parent_of(command, tmp_path) as parent:
        wait_until(lambda: grandchild.exists() and grandchild.read_text())
        os.kill(parent.pid, number)
    assert (parent.exitcode, is_running(grandchild)) == (INTERRUPTED, False)
    assert not processes_of(command.run_id)


def test_a_second_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    command = python_command(IGNORES_SIGTERM, str(tmp_path))
    with parent_of(command, tmp_path) as parent:
        wait_until((tmp_path / "ready").exists)
        os.kill(parent.pid, signal.SIGINT)
        wait_until((tmp_path / "told").exists)  # now it waits for a launcher that ignores SIGTERM
        os.kill(parent.pid, signal.SIGINT)
        parent.join(120)
        assert parent.exitcode == INTERRUPTED
    assert not processes_of(command.run_id)


def test_the_launcher_gets_sigterm_when_this_program_is_killed(tmp_path: Path) -> None:
    command = python_command(IGNORES_SIGTERM, str(tmp_path))
    with parent_of(command, tmp_path) as parent:
        wait_until((tmp_path / "ready").exists)
        parent.kill()
    try:
        wait_until((tmp_path / "told").exists)
    finally:
        for process in processes_of(command.run_id):
            process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose launcher has just ended."""
    folder = RunFolder(tmp_path)
    start_attempt(folder)
    folder.update_run(status="running", launcher_pid=os.getpid())
    folder.log.write_text("loading\n\n=====\nfirst\nsecond\nthird\n")
    return folder


def ended(folder: RunFolder, *, exit_code: int = 1, memory: bool = False, **how: Any) -> tuple[str, int, Any]:
    result = record_result(folder, ProcessResult(exit_code=exit_code, seconds=12.3456, **how), oom_killed=memory)
    run = folder.read_run()
    assert run is not None
    assert (run["status"], run["exit_code"]) == (result.status, result.exit_code)
    assert (run["wall_seconds"], run["launcher_pid"]) == (12.346, None)
    return result.status, result.exit_code, result.failure


@pytest.mark.parametrize(
    ("kind", "how", "status", "code"),
    [
        ("out_of_memory", {"memory": True}, "out_of_memory", 3),
        ("host_out_of_memory", {}, "host_out_of_memory", 3),
        ("attestation_failed", {"memory": True}, "attestation_failed", 1),
        ("diverged", {}, "diverged", 1),
        ("failed", {"memory": True}, "failed", 1),
        ("failed by invalid input", {}, "failed", 2),
        ("failed", {"interrupted": True}, "interrupted", 1),  # whatever a rank reported meanwhile
    ],
)
def test_the_failing_ranks_report_decides_the_status(
    kind: str, how: dict[str, bool], status: str, code: int, folder: RunFolder
) -> None:
    kind, _, invalid_input = kind.partition(" by ")
    written = {"kind": kind, "message": "reported by rank 1", "rank": 1, "invalid_input": bool(invalid_input)}
    write_json(folder.failure_json, written)
    assert ended(folder, **how) == (status, code, written)


@pytest.mark.parametrize(
    ("exit_code", "how", "status", "code", "message"),
    [
        (-11, {}, "failed", 1, "the launcher ended with code -11: first | second | third"),
        (0, {}, "failed", 1, "the launcher ended with code 0: "),  # without a completed run
        (1, {"interrupted": True}, "interrupted", 1, "ended by a signal, without a checkpoint"),
        (-9, {"memory": True}, "host_out_of_memory", 3, "a process was killed by the kernel"),
    ],
)
def test_without_a_report_the_way_it_ended_decides_and_the_log_is_quoted(
    exit_code: int, how: dict[str, bool], status: str, code: int, message: str, folder: RunFolder
) -> None:
    *decided, failure = ended(folder, exit_code=exit_code, **how)
    assert decided == [status, code]
    assert failure["message"].startswith(message)
    assert (failure["kind"], failure["rank"], failure["hint"]) == (status, None, f"see {folder.log}")
    assert json.loads(folder.failure_json.read_text()) == failure


def test_a_disk_that_is_full_for_the_log_and_every_report_is_named_with_the_next_step(folder: RunFolder) -> None:
    lines: list[str] = []
    cut = run_command(python_command("print('step 1')"), Path("/dev/full"), on_line=lines.append)
    *decided, failure = ended(folder, log_error=cut.log_error)
    assert (lines, decided) == (["step 1"], ["failed", 1])
    assert failure["message"].startswith(f"the run found the disk of {folder.path} full in phase start, step 0")
    assert "free some space" in failure["hint"]


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
def test_a_rank_that_refused_its_input_before_it_had_a_folder_is_quoted(code: int, folder: RunFolder) -> None:
    folder.log.write_text(REFUSED_BY_A_RANK.format(code=code))
    status, exit_code, failure = ended(folder)
    assert (status, exit_code, failure["invalid_input"]) == ("failed", code, code == 2)
    if code == 2:
        assert failure["message"] == "the job asked for 2 ranks (TOOLKIT_WORLD_SIZE), and 1 were started"
        assert failure["hint"] == "ask for 2 GPUs"


TWO_ENDED = (
    "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {} \nRoot Cause (first observed failure):\n"
    "[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : {} \n"
)
KILLED, FAILED = "-9 (pid: 8)  (SIGKILL)", "1 (pid: 7)"


@pytest.mark.parametrize(  # the launcher ends the others
    ("kind", "message"), [("failed", "Connection reset"), ("interrupted", "SIGTERM ended the run in step 1")]
)
def test_a_killed_rank_is_the_cause_and_not_the_rank_that_lost_its_connection(
    kind: str, message: str, folder: RunFolder
) -> None:
    write_json(folder.failure_json, {"kind": kind, "message": message, "rank": 1})
    folder.log.write_text(TWO_ENDED.format(FAILED, KILLED))
    *decided, failure = ended(folder)
    assert decided == ["failed", 1]
    assert (failure["rank"], failure["message"]) == (0, "rank 0 exited in step 1: killed by SIGKILL")
    assert failure["hint"].startswith("there is no complete checkpoint: a restart begins at step 0; `--max-restarts N`")
    assert failure["hint"].endswith("OOM killer: `dmesg -T | grep -i 'killed process'`")
    assert failure["seen_by_peer"]["message"] == message
    assert ended(folder, memory=True)[:2] == ("host_out_of_memory", 3)


def test_a_rank_killed_after_another_failed_is_not_the_cause() -> None:
    assert find_killed_rank(TWO_ENDED.format(KILLED, FAILED)) is None

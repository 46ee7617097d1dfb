"""A run's processes: logged while they run, and all gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from toolkit.launch.command import RUN_ID_VARIABLE, ProcessCommand
from toolkit.launch.process import processes_of, run_command

ROOT = Path(__file__).parents[2]


def python_command(program: str, *words: str) -> ProcessCommand:
    run_id = uuid.uuid4().hex
    argv = [sys.executable, "-c", program, *words]
    return ProcessCommand(argv=argv, environment={RUN_ID_VARIABLE: run_id}, shown="", run_id=run_id)


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# Writes its pid, then starts a process in a session of its own, which a process group does not reach.
WITH_GRANDCHILD = """
import pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".part").write_text(str(grandchild.pid))
path.with_suffix(".part").rename(path)
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def grandchild(tmp_path: Path) -> Iterator[Path]:
    """The file into which WITH_GRANDCHILD writes its grandchild's pid; a test that fails leaves none behind."""
    path = tmp_path / "grandchild"
    yield path
    if path.exists() and is_running(int(path.read_text())):
        os.kill(int(path.read_text()), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
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
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    command = python_command(program)
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None, timeout_seconds=0.7)
    assert outcome.exit_code == -signal.SIGKILL
    assert not processes_of(command.run_id)


def test_a_grandchild_in_its_own_session_is_ended_after_a_normal_exit(tmp_path: Path, grandchild: Path) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "0")
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None)
    assert (outcome.exit_code, outcome.timed_out) == (0, False)
    assert not is_running(int(grandchild.read_text()))


def test_processes_of_another_run_are_not_touched(tmp_path: Path) -> None:
    other = python_command("input()")
    environment = os.environ | other.environment
    with subprocess.Popen(other.argv, env=environment, stdin=subprocess.PIPE) as running:
        run_command(python_command("pass"), tmp_path / "log", on_line=lambda _: None)
        assert running.poll() is None
        assert [process.pid for process in processes_of(other.run_id)] == [running.pid]
        running.communicate(b"\n")


# The program that a user would stop: it runs one command and says how that ended.
PARENT = """
import json, pathlib, sys
from toolkit.launch.command import ProcessCommand
from toolkit.launch.process import run_command
argv, environment, run_id, log = json.loads(sys.argv[1])
command = ProcessCommand(argv=argv, environment=environment, shown="", run_id=run_id)
outcome = run_command(command, pathlib.Path(log), on_line=lambda line: None)
print(json.dumps([outcome.interrupted, outcome.timed_out]))
"""


def start_parent(command: ProcessCommand, log: Path) -> subprocess.Popen[str]:
    handed = json.dumps([command.argv, command.environment, command.run_id, str(log)])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", PARENT, handed], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_program_ends_the_run_and_its_grandchild(
    number: signal.Signals, tmp_path: Path, grandchild: Path
) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "600")
    with start_parent(command, tmp_path / "log") as parent:
        wait_until(grandchild.exists)
        parent.send_signal(number)
        said, _ = parent.communicate(timeout=30)
    assert json.loads(said) == [True, False]
    assert not is_running(int(grandchild.read_text()))
    assert not processes_of(command.run_id)


# A launcher that says what it was told, as torch's elastic agent passes SIGTERM on to its ranks.
TELLS_OF_SIGTERM = """
import pathlib, signal, sys, time
def told(*_):
    pathlib.Path(sys.argv[1]).write_text("SIGTERM")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, told)
pathlib.Path(sys.argv[2]).write_text("ready")
time.sleep(float(sys.argv[3]))
"""


def test_a_second_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text('ready')\ntime.sleep(600)"
    )
    command = python_command(program, str(ready))
    with start_parent(command, tmp_path / "log") as parent:
        wait_until(ready.exists)
        parent.send_signal(signal.SIGINT)
        time.sleep(0.5)  # now it waits for a launcher that ignores SIGTERM
        parent.send_signal(signal.SIGINT)
        said, _ = parent.communicate(timeout=10)
    assert json.loads(said) == [True, False]
    assert not processes_of(command.run_id)


def test_the_launcher_gets_sigterm_when_this_program_is_killed(tmp_path: Path) -> None:
    told, ready = tmp_path / "told", tmp_path / "ready"
    command = python_command(TELLS_OF_SIGTERM, str(told), str(ready), "30")
    with start_parent(command, tmp_path / "log") as parent:
        wait_until(ready.exists)
        parent.kill()
    wait_until(told.exists)
    wait_until(lambda: not processes_of(command.run_id))

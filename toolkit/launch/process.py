"""Run a command in its own process group, both streams to a log, and leave no process behind.

Ranks are started by torch's elastic agent in sessions of their own, so a process group alone does not reach
them: every process of a run carries the run's id in its environment, and is found by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from toolkit.launch.command import RUN_ID_VARIABLE, LaunchCommand

GRACE_SECONDS = 15.0
# A saved checkpoint is worth waiting for; a second signal does not wait.
STOP_MINUTES = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the launcher ended."""

    exit_code: int
    seconds: float
    timed_out: bool = False
    interrupted: bool = False


def run_command(
    command: LaunchCommand,
    log: Path,
    *,
    on_line: Callable[[str], None],
    timeout_seconds: float | None = None,
    ask_to_stop: Callable[[], bool] | None = None,
    stop_seconds: float = STOP_MINUTES * 60,
    inherit: Sequence[int] = (),
) -> Outcome:
    """Start the command and wait. Whatever happens (Ctrl-C too), all its processes are gone afterwards.

    At the first signal `ask_to_stop` asks the ranks to save and end, if there are any to ask, and they have
    `stop_seconds` for it; a second signal ends them at once. `inherit` are descriptors that the command keeps open.
    """
    started = time.monotonic()
    timed_out = interrupted = impatient = False
    with log.open("a", encoding="utf-8", errors="replace") as file, terminate_as_interrupt():
        process = _start(command, inherit)
        lines = _lines_of(process)
        try:
            timed_out = not _follow(
                process, lines, file, on_line, deadline=timeout_seconds and started + timeout_seconds
            )
        except KeyboardInterrupt:
            interrupted = True
            try:
                if ask_to_stop is not None and ask_to_stop():
                    _follow(process, lines, file, on_line, deadline=time.monotonic() + stop_seconds)
            except KeyboardInterrupt:
                impatient = True
        finally:
            _stop(process, command.run_id, graceful=(timed_out or interrupted) and not impatient)
    seconds = time.monotonic() - started
    return Outcome(exit_code=process.returncode, seconds=seconds, timed_out=timed_out, interrupted=interrupted)


def _start(command: LaunchCommand, inherit: Sequence[int]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command.argv,
        env=_environment() | command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=tuple(inherit),
        preexec_fn=_die_with_parent,
    )


def _environment() -> dict[str, str]:
    """Without the strategy that a library has put into this process's environment: the preset says it."""
    left_out = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _die_with_parent() -> None:
    """If this program is killed outright, the kernel tells the launcher to end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _lines_of(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """What the process says, line by line; None at its end."""
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    return lines


def _follow(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    file: IO[str],
    on_line: Callable[[str], None],
    *,
    deadline: float | None,
) -> bool:
    """Copy lines to the log until the process ends; False when the deadline passed first."""
    while True:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            return False
        try:
            line = lines.get(timeout=0.2 if remaining is None else max(0.01, min(0.2, remaining)))
        except queue.Empty:
            if process.poll() is not None:  # a grandchild may keep the pipe open
                return True
            continue
        if line is None:
            process.wait()
            return True
        with contextlib.suppress(OSError):  # a full disk: the ranks tell, and the line is still shown
            file.write(line)
            file.flush()
        on_line(line.rstrip("\n"))


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str], run_id: str, *, graceful: bool) -> None:
    """SIGTERM to the launcher, which ends its ranks; SIGKILL to whatever is still there."""
    if graceful and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C is impatience
            process.wait(GRACE_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while left := processes_of(run_id):  # asked again: one that was killed may have started another just before
        for found in left:
            with contextlib.suppress(psutil.Error):
                found.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    process.wait()


def processes_of(run_id: str) -> list[psutil.Process]:
    """Every process that carries the run's id, wherever it stands in the process tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(process)
    return found


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM to this program ends the run like Ctrl-C, so that its processes are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

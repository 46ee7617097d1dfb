"""Run a command in its own session with both streams in a log, and leave no process behind.

torch's elastic agent starts ranks in sessions of their own, so a process group alone does not reach them: every process
of a run has the run's id in its environment, and is found by it.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from toolkit.files.secrets import hide_secrets
from toolkit.launch.command import ProcessCommand
from toolkit.launch.environment import RUN_ID_VARIABLE, inherited_environment
from toolkit.launch.warm_start import ForkedProcess, RefusedError, fork_process

GRACE_SECONDS = 15.0
STOP_SECONDS = 300.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResult:
    """How the launcher's process ended."""

    exit_code: int
    seconds: float
    timed_out: bool = False
    interrupted: bool = False
    warm_start: bool = False
    """Forked from a process that had imported the libraries (`toolkit.launch.warm_start`)."""


def run_command(
    command: ProcessCommand,
    log: Path,
    *,
    on_line: Callable[[str], None],
    timeout_seconds: float | None = None,
    ask_to_stop: Callable[[], bool] | None = None,
    stop_seconds: float = STOP_SECONDS,
    inherit: Sequence[int] = (),
    fork_server: str | None = None,
) -> ProcessResult:
    """Start the command and wait. However it ends (also by Ctrl-C), all of its processes are gone afterwards.

    At the first signal `ask_to_stop` asks the ranks to save and exit, and returns False where there are none; they have
    `stop_seconds` for it. A second signal ends them at once. `inherit` are descriptors that the command keeps open.

    `fork_server` is a server (`warm_start.fork_server`) to fork the process from. What is refused is started cold, and
    `on_line` gets the reason.
    """
    started = time.monotonic()
    timed_out = interrupted = interrupted_twice = False
    with log.open("a", encoding="utf-8", errors="replace") as file, terminate_as_interrupt():
        process = start_process(command, inherit, fork_server, on_line)
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
                interrupted_twice = True
        finally:
            _stop(process, command.run_id, graceful=(timed_out or interrupted) and not interrupted_twice)
    seconds = time.monotonic() - started
    assert process.returncode is not None
    return ProcessResult(
        exit_code=process.returncode,
        seconds=seconds,
        timed_out=timed_out,
        interrupted=interrupted,
        warm_start=isinstance(process, ForkedProcess),
    )


def start_process(
    command: ProcessCommand, inherit: Sequence[int], fork_server: str | None, on_line: Callable[[str], None]
) -> subprocess.Popen[str]:
    """Start the process of one attempt in a session of its own, forked from a server or cold."""
    environment = inherited_environment() | command.environment
    if fork_server is not None:
        try:
            return fork_process(fork_server, command.argv, environment=environment, inherit=inherit)
        except RefusedError as refusal:
            on_line(f"cold start: {refusal}")
    return subprocess.Popen(
        command.argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        pass_fds=tuple(inherit),
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, even if that is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _lines_of(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """The process's output line by line; None at its end."""
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
    """Copy lines to the log until the process ends; return False if the deadline passes first."""
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
        line = hide_secrets(line)
        with contextlib.suppress(OSError):  # a full disk: the ranks report it, and the line is still printed
            file.write(line)
            file.flush()
        on_line(line.rstrip("\n"))


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str], run_id: str, *, graceful: bool) -> None:
    """Send SIGTERM to the launcher, which ends its ranks, and SIGKILL to the processes that are left."""
    if graceful and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C
            process.wait(GRACE_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while left := processes_of(run_id):  # repeated: a killed process may have started another
        for found in left:
            with contextlib.suppress(psutil.Error):
                found.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    process.wait()


def processes_of(run_id: str) -> list[psutil.Process]:
    """Return every process with the run's id in its environment, wherever it is in the process tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(process)
    return found


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the run's processes are ended too."""
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

"""Run a command in its own session with both streams in a log, leave no process behind, and record how the run ended.

torch's elastic agent starts ranks in sessions of their own, so a process group alone does not reach them: every process
of a run has the run's id in its environment, and is found by it.
"""

import contextlib
import ctypes
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from toolkit.errors import EXIT_INVALID_INPUT, printed_errors
from toolkit.files.secrets import hide_secrets
from toolkit.launch.command import RUN_ID_VARIABLE, ProcessCommand, inherited_environment
from toolkit.record import status
from toolkit.record.checkpoints import describe_full_disk, describe_latest_checkpoint, resume_hint
from toolkit.record.folder import RunFolder, read_json, write_json
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.measurements import last_step
from toolkit.record.status import describe_host_oom, is_disk_full, is_out_of_memory

GRACE_SECONDS = 15.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOG_LINES_IN_A_MESSAGE = 3
OOM_KILLER_HINT = "a SIGKILL that nobody sent is often the kernel's OOM killer: `dmesg -T | grep -i 'killed process'`"
# What a rank reports whose peer is gone: a broken connection, or the launcher's SIGTERM.
CONSEQUENCES = (status.FAILED, status.INTERRUPTED)
# The root cause as torch's elastic agent prints it (torch/distributed/elastic/multiprocessing/errors, torch 2.13).
ROOT_CAUSE = "Root Cause (first observed failure)"
_EXITED_BY_SIGNAL = re.compile(r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: -(?P<number>\d+) ")
_REFUSED = re.compile(r"exitcode\s+: 2 ")
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # the agent itself ends the other ranks with these


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResult:
    """How the launcher's process ended, or that of a lone rank."""

    exit_code: int
    seconds: float
    pid: int | None = None
    timed_out: bool = False
    interrupted: bool = False
    log_error: OSError | None = None  # why a line is missing in the log


def run_command(
    command: ProcessCommand,
    log: Path,
    *,
    on_line: Callable[[str], None],
    timeout_seconds: float | None = None,
    ask_to_stop: Callable[[], bool] | None = None,
    stop_seconds: float = 300.0,
    inherit: Sequence[int] = (),
) -> ProcessResult:
    """Start the command and wait. However it ends (also by Ctrl-C), all of its processes are gone afterwards.

    At the first signal `ask_to_stop` asks the ranks to save and exit, and returns False where there are none; they have
    `stop_seconds` for it. A second signal ends them at once. `inherit` are descriptors that the command keeps open.
    """
    started = time.monotonic()
    timed_out = interrupted = interrupted_twice = False
    errors: list[OSError] = []
    with log.open("ab", buffering=0) as file, terminate_as_interrupt():  # closing it cannot fail on a full disk
        process = start_process(command, inherit)
        lines: queue.Queue[str | None] = queue.Queue()  # None at the end
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            deadline = timeout_seconds and started + timeout_seconds
            timed_out = not _follow(process, lines, file, errors, on_line, deadline=deadline)
        except KeyboardInterrupt:
            interrupted = True
            try:
                if ask_to_stop is not None and ask_to_stop():
                    _follow(process, lines, file, errors, on_line, deadline=time.monotonic() + stop_seconds)
            except KeyboardInterrupt:
                interrupted_twice = True
        finally:
            _stop(process, command.run_id, graceful=(timed_out or interrupted) and not interrupted_twice)
    assert process.returncode is not None
    return ProcessResult(
        exit_code=process.returncode,
        seconds=time.monotonic() - started,
        pid=process.pid,
        timed_out=timed_out,
        interrupted=interrupted,
        log_error=errors[0] if errors else None,
    )


def start_process(command: ProcessCommand, inherit: Sequence[int]) -> subprocess.Popen[str]:
    """Start the process of one attempt in a session of its own."""
    return subprocess.Popen(
        command.argv,
        env=inherited_environment() | command.environment,
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


def _follow(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    file: IO[bytes],
    errors: list[OSError],
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
            if has_ended(process):  # a grandchild may keep the pipe open
                return True
            continue
        if line is None:
            process.wait()
            return True
        line = hide_secrets(line)
        try:
            file.write(line.encode(errors="replace"))
        except OSError as error:  # the line is still printed
            errors.append(error)
        on_line(line.rstrip("\n"))


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str], run_id: str, *, graceful: bool) -> None:
    """Send SIGTERM to the launcher, which ends its ranks, and SIGKILL to the processes that are left."""
    deadline = time.monotonic() + GRACE_SECONDS
    if graceful and not has_ended(process):
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C
            os.kill(process.pid, signal.SIGTERM)
            while not has_ended(process) and time.monotonic() < deadline:
                time.sleep(0.05)
    deadline = time.monotonic() + GRACE_SECONDS
    while left := processes_of(run_id):  # repeated: a killed process may have started another
        for found in left:
            with contextlib.suppress(psutil.Error):
                found.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    process.wait()


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Return True for a process that has ended, and leave its exit code to `Popen.wait` without a timeout.

    `Popen.poll`, and `wait` with a timeout, hold a lock that a signal between its acquisition and their `try` leaves
    locked (CPython 3.11, subprocess.py): the next `wait` then never returns.
    """
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return process.returncode is not None or os.waitid(os.P_PID, process.pid, ended) is not None
    except ChildProcessError:  # of another process, or waited for already
        return process.poll() is not None


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


# -- how the run ended: from the rank that reported a failure, otherwise from how its processes ended


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The final status of a run."""

    folder: RunFolder
    status: str
    exit_code: int  # the toolkit's exit code: 0 done, 1 the run failed, 2 invalid input, 3 out of memory
    seconds: float  # wall time of the launch, including imports and loading
    failure: dict[str, Any] | None


def record_result(folder: RunFolder, ended: ProcessResult, *, oom_killed: bool, log_start: int = 0) -> RunResult:
    """Write to run.json and failure.json how a run ended; `log_start` is where its part of train.log begins."""
    text = folder.log.read_bytes()[log_start:].decode(errors="replace") if folder.log.exists() else ""
    failure = _find_failure(folder, ended, text, oom_killed=oom_killed)
    final_status: str = status.HOST_OUT_OF_MEMORY if oom_killed or is_out_of_memory(text) else status.FAILED
    if ended.exit_code == 0 and (folder.read_run() or {}).get("status") == status.COMPLETED:
        final_status = status.COMPLETED
    elif ended.interrupted:
        final_status = status.INTERRUPTED
    elif failure is not None:
        final_status = str(failure["kind"])
    elif ended.timed_out:
        final_status = status.TIMED_OUT
    if final_status != status.COMPLETED and failure is None:
        failure = _unreported_failure(folder, final_status, ended, text)
    code = status.exit_code_of(final_status, invalid_input=bool(failure and failure.get("invalid_input")))
    by_script = (folder.read_run() or {}).get("exit_code") if final_status == status.FAILED else None
    with contextlib.suppress(OSError):  # a full disk: the caller prints the failure
        if failure is not None:
            write_json(folder.failure_json, failure)
        folder.update_run(
            status=final_status, exit_code=by_script or code, wall_seconds=round(ended.seconds, 3), launcher_pid=None
        )
    return RunResult(folder=folder, status=final_status, exit_code=code, seconds=ended.seconds, failure=failure)


def _find_failure(folder: RunFolder, ended: ProcessResult, log: str, *, oom_killed: bool) -> dict[str, Any] | None:
    """Return failure.json, or a failure made from the log where a signal ended a rank.

    A signal is the cause, and what the other ranks then report is a consequence. A rank that reported a specific cause
    (not merely that it failed, or that the launcher ended it) is believed: the others were ended after it.
    """
    failure = read_json(folder.failure_json)
    heartbeats = read_heartbeats(folder.path / "ranks")
    killed = find_killed_rank(log)
    is_lone_rank = ended.pid in [heartbeat.pid for heartbeat in heartbeats]  # without a launcher that reports it
    if is_lone_rank and ended.exit_code < 0 and -ended.exit_code not in _AGENT_SIGNALS:
        killed = 0, signal.Signals(-ended.exit_code).name
    has_cause = failure is not None and (failure["kind"] not in CONSEQUENCES or bool(failure.get("invalid_input")))
    if killed is None or ended.interrupted or ended.timed_out or has_cause:
        return failure
    rank, signal_name = killed
    aborted_for_memory = signal_name == "SIGABRT" and is_out_of_memory(log)
    heartbeat = next((each for each in heartbeats if each.rank == rank), None)
    phase, peak = (None, None) if heartbeat is None else (heartbeat.phase, heartbeat.peak_host_bytes)
    step = last_step(folder.rank_rows(rank))
    where = f"in step {step + 1}" + (f", phase {phase}" if phase else "")
    if oom_killed or aborted_for_memory:
        cause = "" if aborted_for_memory else "the kernel killed it"
        message, hint = describe_host_oom(f"rank {rank}", phase, step, cause)
        found = _failure(status.HOST_OUT_OF_MEMORY, message, hint)
    else:
        message = f"rank {rank} exited {where}: killed by {signal_name}"
        hint = f"{resume_hint(folder)}; `--max-restarts N` restarts by itself"
        found = _failure(status.FAILED, message, f"{hint}; {OOM_KILLER_HINT}" if signal_name == "SIGKILL" else hint)
    position = {"rank": rank, "step": step, "phase": phase, "peak_bytes": peak}
    return found | position | {"seen_by_peer": failure}


def _unreported_failure(folder: RunFolder, final_status: str, ended: ProcessResult, log: str) -> dict[str, Any]:
    refused = ended.exit_code == EXIT_INVALID_INPUT or _REFUSED.search(log.rpartition(ROOT_CAUSE)[2])
    printed = printed_errors(log) if refused and final_status == status.FAILED else []
    if printed:  # by a rank that refused its input before it had a run folder
        return _failure(status.FAILED, printed[0].message, printed[0].hint) | {"invalid_input": True}
    if final_status == status.FAILED and (is_disk_full(ended.log_error) or is_disk_full(OSError(log))):
        rank = next(iter(read_heartbeats(folder.path / "ranks")), None)  # none of them could write failure.json
        phase, step = (None, 0) if rank is None else (rank.phase, rank.step)
        return _failure(final_status, *describe_full_disk(folder.checkpoints, "the run", phase or "start", step))
    checkpoint = describe_latest_checkpoint(folder.checkpoints)
    causes: dict[str, str] = {
        status.INTERRUPTED: f"ended by a signal, without a checkpoint of its last step; {checkpoint}",
        status.TIMED_OUT: f"still running after {ended.seconds:.0f} s",
        status.HOST_OUT_OF_MEMORY: "a process was killed by the kernel because host memory ran out",
    }
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-\n")]
    last = " | ".join(lines[-LOG_LINES_IN_A_MESSAGE:]) or "no output"
    message = causes.get(final_status) or f"the launcher ended with code {ended.exit_code}: {last}"
    return _failure(final_status, message, f"see {folder.log}")


def _failure(kind: str, message: str, hint: str | None) -> dict[str, Any]:
    position = dict.fromkeys(("phase", "rank", "peak_bytes"))
    return {"kind": kind, "message": message, "hint": hint, "invalid_input": False, **position}


def find_killed_rank(log: str) -> tuple[int, str] | None:
    """Return the rank that failed first and the signal that ended it; None without one, or for the agent's own."""
    found = [
        (int(match["rank"]), signal.Signals(int(match["number"])))
        for match in _EXITED_BY_SIGNAL.finditer(log.rpartition(ROOT_CAUSE)[2])
        if int(match["number"]) not in _AGENT_SIGNALS
    ]
    return (found[-1][0], found[-1][1].name) if found else None

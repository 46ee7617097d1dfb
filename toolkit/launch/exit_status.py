"""How a run ended: from the rank that reported a failure, otherwise from how its processes ended.

>>> find_killed_rank("rank      : 1 (local_rank: 1)\\n  exitcode  : -9 (pid: 7)  (SIGKILL)")
KilledRank(rank=1, signal='SIGKILL')
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import EXIT_INVALID_INPUT, printed_errors
from toolkit.launch.process import ProcessResult
from toolkit.record import status
from toolkit.record.folder import RunFolder, read_json, write_json
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.measurements import last_step
from toolkit.record.resource_exhaustion import describe_host_oom, describe_latest_checkpoint, is_out_of_memory

LOG_LINES_IN_A_MESSAGE = 3
RESUME_HINT = "`--resume_from_checkpoint latest` resumes from the last checkpoint; `--max-restarts N` does so by itself"
# What a rank reports whose peer is gone: a broken connection, or the launcher's SIGTERM.
CONSEQUENCES = (status.FAILED, status.INTERRUPTED)
# The root cause as torch's elastic agent prints it (torch/distributed/elastic/multiprocessing/errors, torch 2.13).
ROOT_CAUSE = "Root Cause (first observed failure)"
_EXITED_BY_SIGNAL = re.compile(r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: -(?P<number>\d+) ")
_REFUSED = re.compile(r"exitcode\s+: 2 ")
# The agent itself ends the other ranks with these.
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The final status of a run."""

    folder: RunFolder
    status: str
    exit_code: int
    """The toolkit's exit code: 0 done, 1 the run failed, 2 invalid input, 3 out of memory."""
    seconds: float
    """Wall time of the launch, including imports and loading."""
    failure: dict[str, Any] | None


def record_result(folder: RunFolder, ended: ProcessResult, *, oom_killed: bool, log_start: int = 0) -> RunResult:
    """Determine how the run ended, and write it to run.json and failure.json.

    `oom_killed` says that the kernel killed a process for lack of memory meanwhile; `log_start` is the offset in
    train.log at which this attempt's begins.
    """
    text = _read_log(folder.log, log_start)
    failure = _find_failure(folder, ended, text, oom_killed=oom_killed)
    final_status = _final_status(folder, ended, failure, text, oom_killed=oom_killed)
    if final_status != status.COMPLETED and failure is None:
        failure = _unreported_failure(folder, final_status, ended, text)
    code = status.exit_code_of(final_status, invalid_input=bool(failure and failure.get("invalid_input")))
    with contextlib.suppress(OSError):  # a full disk: the caller prints the failure
        if failure is not None:
            write_json(folder.failure_json, failure)
        folder.update_run(
            status=final_status,
            exit_code=code,
            wall_seconds=round(ended.seconds, 3),
            warm_start=ended.warm_start,
            launcher_pid=None,
        )
    return RunResult(folder=folder, status=final_status, exit_code=code, seconds=ended.seconds, failure=failure)


def _read_log(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def _find_failure(folder: RunFolder, ended: ProcessResult, log: str, *, oom_killed: bool) -> dict[str, Any] | None:
    """Return failure.json, or a failure made from the log where a signal ended a rank.

    A signal is the cause, and what the other ranks then report is a consequence. A rank that reported a specific cause
    (not merely that it failed, or that the launcher ended it) is believed: the others were ended after it.
    """
    failure = read_json(folder.failure_json)
    killed = find_killed_rank(log)
    has_cause = failure is not None and (failure["kind"] not in CONSEQUENCES or bool(failure.get("invalid_input")))
    if killed is None or ended.interrupted or ended.timed_out or has_cause:
        return failure
    aborted_for_memory = killed.signal == "SIGABRT" and is_out_of_memory(log)
    step, phase, peak = _last_position(folder, killed.rank)
    where = f"in step {step + 1}" + (f", phase {phase}" if phase else "")
    if oom_killed or aborted_for_memory:
        cause = "" if aborted_for_memory else "the kernel killed it"
        message, hint = describe_host_oom(f"rank {killed.rank}", phase, step, cause)
        found = _failure(status.HOST_OUT_OF_MEMORY, message, hint)
    else:
        message = f"rank {killed.rank} exited {where}: killed by {killed.signal}"
        found = _failure(status.FAILED, message, RESUME_HINT)
    position = {"rank": killed.rank, "step": step, "phase": phase, "peak_bytes": peak}
    return found | position | {"seen_by_peer": failure}


def _last_position(folder: RunFolder, rank: int) -> tuple[int, str | None, int | None]:
    """A rank's completed optimizer steps, by its rows; the phase and host memory peak of its last heartbeat."""
    heartbeat = next((found for found in read_heartbeats(folder.path / "ranks") if found.rank == rank), None)
    step = last_step(folder.rank_rows(rank))
    return (step, None, None) if heartbeat is None else (step, heartbeat.phase, heartbeat.peak_host_bytes)


def _final_status(
    folder: RunFolder, ended: ProcessResult, failure: dict[str, Any] | None, log: str, *, oom_killed: bool
) -> str:
    run = folder.read_run() or {}
    if ended.exit_code == 0 and run.get("status") == status.COMPLETED:
        return status.COMPLETED
    if ended.interrupted:
        return status.INTERRUPTED
    if failure is not None:
        return str(failure["kind"])
    if ended.timed_out:
        return status.TIMED_OUT
    return status.HOST_OUT_OF_MEMORY if oom_killed or is_out_of_memory(log) else status.FAILED


def _unreported_failure(folder: RunFolder, final_status: str, ended: ProcessResult, log: str) -> dict[str, Any]:
    """No rank could report: say what is known, and where to look."""
    if final_status == status.FAILED and (refusal := _find_refusal(ended, log)):
        return refusal
    checkpoint = describe_latest_checkpoint(folder.path)
    causes = {
        status.INTERRUPTED: f"ended by a signal, without a checkpoint of its last step; {checkpoint}",
        status.TIMED_OUT: f"still running after {ended.seconds:.0f} s",
        status.HOST_OUT_OF_MEMORY: "a process was killed by the kernel because host memory ran out",
    }
    message = causes.get(final_status) or f"the launcher ended with code {ended.exit_code}: {_last_lines(log)}"
    return _failure(final_status, message, f"see {folder.log}")


def _find_refusal(ended: ProcessResult, log: str) -> dict[str, Any] | None:
    """Return the failure of a rank that refused its input before it had a run folder, from what it printed."""
    refused = ended.exit_code == EXIT_INVALID_INPUT or _REFUSED.search(log.rpartition(ROOT_CAUSE)[2])
    printed = printed_errors(log) if refused else []
    return _failure(status.FAILED, printed[0].message, printed[0].hint) | {"invalid_input": True} if printed else None


def _failure(kind: str, message: str, hint: str | None) -> dict[str, Any]:
    return {
        "kind": kind,
        "phase": None,
        "rank": None,
        "message": message,
        "hint": hint,
        "invalid_input": False,
        "peak_bytes": None,
    }


def _last_lines(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-\n")]
    return " | ".join(lines[-LOG_LINES_IN_A_MESSAGE:]) or "no output"


class KilledRank(NamedTuple):
    """A rank, and the signal that ended it."""

    rank: int
    signal: str


def find_killed_rank(log: str) -> KilledRank | None:
    """Return the rank that failed first, if a signal ended it; signals of the elastic agent itself do not count."""
    found = [
        (int(match["rank"]), int(match["number"]))
        for match in _EXITED_BY_SIGNAL.finditer(log.rpartition(ROOT_CAUSE)[2])
        if int(match["number"]) not in _AGENT_SIGNALS
    ]
    return KilledRank(found[-1][0], signal.Signals(found[-1][1]).name) if found else None

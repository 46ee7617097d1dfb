"""How a run ended: from the rank that spoke or, where none could, from how its processes ended.

conclude(folder, Outcome(exit_code=0, seconds=9.0), killed_for_memory=False).status
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.launch.killed import killed_rank
from toolkit.launch.process import Outcome
from toolkit.runs import status
from toolkit.runs.endings import failure_of_memory, is_out_of_memory, kept
from toolkit.runs.folder import RunFolder, read_json, write_json
from toolkit.runs.pulses import read_pulses
from toolkit.runs.steps import read_rows

LOG_LINES_IN_A_MESSAGE = 3
RESUME = "`--resume_from_checkpoint latest` goes on from the last checkpoint; `--max-restarts N` does so by itself"

# What a rank says whose peer is gone: a connection broke, or the launcher's SIGTERM came.
CONSEQUENCES = (status.FAILED, status.INTERRUPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended."""

    folder: RunFolder
    status: str
    exit_code: int
    """Of the toolkit: 0 done, 1 the run failed, 2 wrong input, 3 out of memory."""
    seconds: float
    """Wall time of the launch, imports and loading included."""
    failure: dict[str, Any] | None


def conclude(folder: RunFolder, outcome: Outcome, *, killed_for_memory: bool, log_start: int = 0) -> RunResult:
    """The final status. `log_start` is where this attempt's log begins."""
    log = _read_log(folder.log, log_start)
    failure = _said_or_seen(folder, outcome, log, killed_for_memory=killed_for_memory)
    ended = _ending(folder, outcome, failure, log, killed_for_memory=killed_for_memory)
    if ended != status.COMPLETED and failure is None:
        failure = _silent_failure(folder, ended, outcome, log)
    code = status.exit_code_of(ended, wrong_input=bool(failure and failure.get("wrong_input")))
    with contextlib.suppress(OSError):  # a full disk: the caller says it on the screen
        if failure is not None:
            write_json(folder.failure_json, failure)
        folder.update_run(status=ended, exit_code=code, wall_seconds=round(outcome.seconds, 3), launcher_pid=None)
    return RunResult(folder=folder, status=ended, exit_code=code, seconds=outcome.seconds, failure=failure)


def _read_log(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def _said_or_seen(folder: RunFolder, outcome: Outcome, log: str, *, killed_for_memory: bool) -> dict[str, Any] | None:
    """failure.json; but where a signal ended a rank, that is the cause, and what its peers say a consequence.

    A rank that gave its own cause (not merely that it failed, or that the launcher ended it) is believed: its peers
    were ended after it.
    """
    failure = read_json(folder.failure_json)
    killed = killed_rank(log)
    spoke = failure is not None and (failure["kind"] not in CONSEQUENCES or bool(failure.get("wrong_input")))
    if killed is None or outcome.interrupted or outcome.timed_out or spoke:
        return failure
    aborted_for_memory = killed.signal == "SIGABRT" and is_out_of_memory(log)
    step, phase, peak = where_rank_was(folder, killed.rank)
    where = f"in step {step + 1}" + (f", phase {phase}" if phase else "")
    if killed_for_memory or aborted_for_memory:
        how = "" if aborted_for_memory else "the kernel ended it"
        message, hint = failure_of_memory(f"rank {killed.rank}", phase, step, how)
        seen = _failure(status.HOST_OUT_OF_MEMORY, message, hint)
    else:
        seen = _failure(status.FAILED, f"rank {killed.rank} is gone {where}: {killed.signal} ended it", RESUME)
    where_it_was = {"rank": killed.rank, "step": step, "phase": phase, "peak_bytes": peak}
    return seen | where_it_was | {"seen_by_peer": failure}


def where_rank_was(folder: RunFolder, rank: int) -> tuple[int, str | None, int | None]:
    """Optimizer steps that a rank finished, by its rows; the phase and the resident peak that it last told."""
    rows = folder.rank_rows(rank)
    steps = [row["step"] for row in read_rows(rows)] if rows.exists() else []
    pulse = next((pulse for pulse in read_pulses(rows.parent) if pulse.rank == rank), None)
    last_step = steps[-1] if steps else 0
    return (last_step, None, None) if pulse is None else (last_step, pulse.phase, pulse.peak_host_bytes)


def _ending(
    folder: RunFolder, outcome: Outcome, failure: dict[str, Any] | None, log: str, *, killed_for_memory: bool
) -> str:
    run = folder.read_run() or {}
    if outcome.exit_code == 0 and run.get("status") == status.COMPLETED:
        return status.COMPLETED
    if outcome.interrupted:
        return status.INTERRUPTED
    if failure is not None:
        return str(failure["kind"])
    if outcome.timed_out:
        return status.TIMED_OUT
    return status.HOST_OUT_OF_MEMORY if killed_for_memory or is_out_of_memory(log) else status.FAILED


def _silent_failure(folder: RunFolder, ended: str, outcome: Outcome, log: str) -> dict[str, Any]:
    """No rank could write: say what is known, and where to look."""
    causes = {
        status.INTERRUPTED: f"ended by a signal, without a checkpoint of its last step; {kept(folder.path)}",
        status.TIMED_OUT: f"still running after {outcome.seconds:.0f} s",
        status.HOST_OUT_OF_MEMORY: "a process was killed by the kernel because host memory ran out",
    }
    message = causes.get(ended) or f"the launcher ended with code {outcome.exit_code}: {_last_words(log)}"
    return _failure(ended, message, f"see {folder.log}")


def _failure(kind: str, message: str, hint: str) -> dict[str, Any]:
    """failure.json where no rank wrote it."""
    return {
        "kind": kind,
        "phase": None,
        "rank": None,
        "message": message,
        "hint": hint,
        "wrong_input": False,
        "peak_bytes": None,
    }


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-\n")]
    return " | ".join(lines[-LOG_LINES_IN_A_MESSAGE:]) or "no output"

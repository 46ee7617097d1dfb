"""One run from its command to its final status: the run folder says how it ended.

The rank that fails writes failure.json itself; only where no rank could speak is the ending read from outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.launch.command import LaunchCommand, launch_command
from toolkit.launch.killed import killed_rank
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.process import Outcome, run_command
from toolkit.presets import Preset
from toolkit.runs import status
from toolkit.runs.argv import read_arguments, resumes
from toolkit.runs.folder import RunFolder, read_json, start_facts, write_json
from toolkit.runs.nvme import swap_folder

LOG_LINES_IN_A_MESSAGE = 3


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


def run_training(
    preset: Preset,
    *,
    num_processes: int,
    training_argv: Sequence[str],
    output_dir: Path,
    cpu: bool,
    on_line: Callable[[str], None],
    timeout_seconds: float | None = None,
    nvme: NvmeDisk | None = None,
) -> RunResult:
    """Train in `output_dir`, which must hold no finished run.

    Raises ToolkitError for a folder that cannot be used; every other ending is in the result.
    """
    disk = None if nvme is None else nvme.path
    command = launch_command(preset, num_processes=num_processes, training_argv=training_argv, cpu=cpu, nvme_path=disk)
    folder = RunFolder(output_dir)
    folder.prepare(resume=resumes(read_arguments(training_argv)))
    facts = {} if nvme is None else {"nvme": nvme.facts()}
    folder.update_run(**_planned(preset, num_processes, training_argv, command), **facts)
    kills_before = host_memory_kills()

    def relay(line: str) -> None:
        if not folder.failure_json.exists():  # what follows is the launcher's own traceback
            on_line(line)

    outcome = run_command(command, folder.log, on_line=relay, timeout_seconds=timeout_seconds)
    if disk is not None:  # ranks that were killed leave their swap files
        shutil.rmtree(swap_folder(disk, command.run_id), ignore_errors=True)
    return conclude(folder, outcome, killed_for_memory=host_memory_kills() > kills_before)


def _planned(
    preset: Preset, num_processes: int, training_argv: Sequence[str], command: LaunchCommand
) -> dict[str, Any]:
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "launcher_pid": os.getpid(),
        **start_facts(),
        "preset": preset.name,
        "preset_files": preset.texts(),
        "world_size": num_processes,
        "training_arguments": list(training_argv),
        "command": command.shown,
    }


def conclude(folder: RunFolder, outcome: Outcome, *, killed_for_memory: bool) -> RunResult:
    """The final status, from the rank that spoke or, where none could, from how the processes ended."""
    failure = _said_or_seen(folder, outcome, killed_for_memory=killed_for_memory)
    ended = _ending(folder, outcome, failure, killed_for_memory=killed_for_memory)
    if ended != status.COMPLETED and failure is None:
        failure = _silent_failure(folder, ended, outcome)
        write_json(folder.failure_json, failure)
    wrong_input = bool(failure and failure.get("wrong_input"))
    code = status.exit_code_of(ended, wrong_input=wrong_input)
    folder.update_run(status=ended, exit_code=code, wall_seconds=round(outcome.seconds, 3), launcher_pid=None)
    return RunResult(folder=folder, status=ended, exit_code=code, seconds=outcome.seconds, failure=failure)


def _said_or_seen(folder: RunFolder, outcome: Outcome, *, killed_for_memory: bool) -> dict[str, Any] | None:
    """failure.json; but where a signal ended a rank, that is the cause, and what its peers say a consequence."""
    failure = read_json(folder.failure_json)
    killed = killed_rank(folder.log.read_text(errors="replace")) if folder.log.exists() else None
    if killed is None or outcome.interrupted or outcome.timed_out:
        return failure
    kind = status.HOST_OUT_OF_MEMORY if killed_for_memory else status.FAILED
    why = "the kernel ended it, because host memory ran out" if killed_for_memory else f"{killed.signal} ended it"
    seen = _failure(kind, f"rank {killed.rank} is gone: {why}", folder) | {"rank": killed.rank, "seen_by_peer": failure}
    write_json(folder.failure_json, seen)
    return seen


def _ending(folder: RunFolder, outcome: Outcome, failure: dict[str, Any] | None, *, killed_for_memory: bool) -> str:
    if outcome.interrupted:
        return status.INTERRUPTED
    if failure is not None:
        return str(failure["kind"])
    if outcome.timed_out:
        return status.TIMED_OUT
    run = folder.read_run() or {}
    if outcome.exit_code == 0 and run.get("status") == status.COMPLETED:
        return status.COMPLETED
    return status.HOST_OUT_OF_MEMORY if killed_for_memory else status.FAILED


def _silent_failure(folder: RunFolder, ended: str, outcome: Outcome) -> dict[str, Any]:
    """No rank could write: say what is known, and where to look."""
    causes = {
        status.INTERRUPTED: "stopped by a signal",
        status.TIMED_OUT: f"still running after {outcome.seconds:.0f} s",
        status.HOST_OUT_OF_MEMORY: "a process was killed by the kernel because host memory ran out",
    }
    message = causes.get(ended) or f"the launcher ended with code {outcome.exit_code}: {_last_words(folder.log)}"
    return _failure(ended, message, folder)


def _failure(kind: str, message: str, folder: RunFolder) -> dict[str, Any]:
    """failure.json where no rank wrote it."""
    return {
        "kind": kind,
        "phase": None,
        "rank": None,
        "message": message,
        "hint": f"see {folder.log}",
        "wrong_input": False,
        "peak_bytes": None,
    }


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip(" =-\n")]
    return " | ".join(lines[-LOG_LINES_IN_A_MESSAGE:]) or "no output"


def host_memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory since boot."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))

"""One run from its command to its final status: the run folder says how it ended.

The rank that fails writes failure.json itself; only where no rank could speak is the ending read from outside.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.launch.command import LaunchCommand, launch_command
from toolkit.launch.conclude import RunResult, conclude
from toolkit.launch.memory import host_memory_kills
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.process import Outcome, run_command
from toolkit.launch.restarts import Limits, Restarts, ask_ranks_to_stop
from toolkit.presets import Preset
from toolkit.runs import status
from toolkit.runs.argv import read_arguments, resumes
from toolkit.runs.folder import RunFolder, start_facts
from toolkit.runs.nvme import swap_folder


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
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    plan: dict[str, Any] | None = None,
) -> RunResult:
    """Train in `output_dir`, which must hold no finished run, and start again as often as `limits` say.

    `plan` is what was planned for it, for its run.json.

    Raises ToolkitError for a folder that cannot be used; every other ending is in the result.
    """
    folder = RunFolder(output_dir)
    lock = folder.hold()
    try:
        started, restarts = time.monotonic(), Restarts(folder, limits.max_restarts)
        while True:
            left = None if timeout_seconds is None else timeout_seconds - (time.monotonic() - started)
            start = _Start(preset, num_processes, [*training_argv, *restarts.arguments()], cpu, nvme, limits, plan)
            result, outcome = _run_once(
                folder, start, on_line, lock=lock, timeout_seconds=left, first=not restarts.done
            )
            if not restarts.again(result, outcome):
                return result
            on_line(restarts.line())
    finally:
        if lock is not None:
            os.close(lock)


class _Start(NamedTuple):
    """What one attempt is started with."""

    preset: Preset
    num_processes: int
    argv: list[str]
    cpu: bool
    nvme: NvmeDisk | None
    limits: Limits
    plan: dict[str, Any] | None


def _run_once(
    folder: RunFolder,
    start: _Start,
    on_line: Callable[[str], None],
    *,
    lock: int | None,
    timeout_seconds: float | None,
    first: bool,
) -> tuple[RunResult, Outcome]:
    disk = None if start.nvme is None else start.nvme.path
    command = launch_command(
        start.preset,
        num_processes=start.num_processes,
        training_argv=start.argv,
        cpu=start.cpu,
        nvme_path=disk,
        hang_timeout_minutes=start.limits.hang_timeout_minutes,
    )
    if first:
        folder.prepare(resume=resumes(read_arguments(start.argv)))
        facts = {} if start.nvme is None else {"nvme": start.nvme.facts()}
        folder.update_run(**_planned(start, command), **facts)
    else:
        folder.update_run(status=status.RUNNING, exit_code=None, launcher_pid=os.getpid(), command=command.shown)
    kills_before = host_memory_kills()
    log_start = folder.log.stat().st_size if folder.log.exists() else 0

    def relay(line: str) -> None:
        if not folder.failure_json.exists():  # what follows is the launcher's own traceback
            on_line(line)

    outcome = run_command(
        command,
        folder.log,
        on_line=relay,
        timeout_seconds=timeout_seconds,
        ask_to_stop=lambda: ask_ranks_to_stop(folder, on_line) if start.limits.stop_minutes else False,
        stop_seconds=start.limits.stop_minutes * 60,
        inherit=[] if lock is None else [lock],
    )
    if disk is not None:  # ranks that were killed leave their swap files
        shutil.rmtree(swap_folder(disk, command.run_id), ignore_errors=True)
    killed = host_memory_kills() > kills_before
    return conclude(folder, outcome, killed_for_memory=killed, log_start=log_start), outcome


def _planned(start: _Start, command: LaunchCommand) -> dict[str, Any]:
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "launcher_pid": os.getpid(),
        **start_facts(),
        "preset": start.preset.name,
        "preset_files": start.preset.texts(),
        "world_size": start.num_processes,
        "training_arguments": start.argv,
        "plan": start.plan,
        "command": command.shown,
    }

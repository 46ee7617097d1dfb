"""`toolkit train`: every check that needs no rank, the command said, and the run.

ready = check_training(load_preset("zero2"), num_processes=2, training_argv=argv, cpu=True, ...)
result = train(ready, plan=None, timeout_minutes=None, say=print)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launch.command import launch_command
from toolkit.launch.conclude import RunResult
from toolkit.launch.elsewhere import Fitting, fitting_checkpoint
from toolkit.launch.nvme import NvmeDisk, check_nvme
from toolkit.launch.preflight import check_job, check_limits, check_output, check_resume
from toolkit.launch.restarts import Limits
from toolkit.launch.run import run_training
from toolkit.presets import Preset


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A run that passed every check that needs no torch."""

    preset: Preset
    num_processes: int
    argv: list[str]
    arguments: dict[str, Any]
    output_dir: Path
    cpu: bool
    nvme: NvmeDisk | None
    limits: Limits
    fitting: Fitting


def check_training(
    preset: Preset,
    *,
    num_processes: int,
    training_argv: Sequence[str],
    cpu: bool,
    nvme_path: str | None,
    limits: Limits,
    say: Callable[[str], None],
) -> Ready:
    """Raises ToolkitError for the first thing that is wrong.

    A checkpoint of another preset or number of processes is converted beside the run, until `train` removes it.
    """
    check_limits(limits)
    job = check_job(preset, num_processes=num_processes, training_argv=training_argv, cpu=cpu)
    output_dir = check_output(job.arguments, engine=preset.engine)
    nvme = check_nvme(preset, nvme_path=nvme_path, arguments=job.arguments, cpu=cpu)
    fitting = fitting_checkpoint(preset, num_processes=num_processes, job=job, say=say)
    try:
        check_resume(preset, num_processes=num_processes, arguments=job.arguments | fitting.arguments)
    except ToolkitError:
        fitting.remove()
        raise
    return Ready(
        preset=preset,
        num_processes=num_processes,
        argv=[*training_argv, *fitting.words],
        arguments=job.arguments,
        output_dir=output_dir,
        cpu=cpu,
        nvme=nvme,
        limits=limits,
        fitting=fitting,
    )


def train(
    ready: Ready, *, plan: dict[str, Any] | None, timeout_minutes: float | None, say: Callable[[str], None]
) -> RunResult:
    """Say the command and run it."""
    disk = None if ready.nvme is None else ready.nvme.path
    command = launch_command(
        ready.preset, num_processes=ready.num_processes, training_argv=ready.argv, cpu=ready.cpu, nvme_path=disk
    )
    say(command.shown)
    try:
        return run_training(
            ready.preset,
            num_processes=ready.num_processes,
            training_argv=ready.argv,
            output_dir=ready.output_dir,
            cpu=ready.cpu,
            on_line=say,
            timeout_seconds=timeout_minutes and timeout_minutes * 60,
            nvme=ready.nvme,
            limits=ready.limits,
            plan=plan,
        )
    finally:
        ready.fitting.remove()

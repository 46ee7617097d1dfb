"""`toolkit rehearse`: check the world and the job, start one process that is rank r of N, and read its results.

    rehearsal = plan_rehearsal(load_preset("zero3"), world_size=64, rank=0, training_argv=[...], cpu=True)
    result, run = rehearse_once(rehearsal, on_line=print)

This module is light: torch is imported by the process that it starts, `python -m toolkit.rehearse`.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.secrets import hide_words, separate_secrets
from toolkit.hardware.node import count_oom_kills
from toolkit.job.argument_values import Range, check_range
from toolkit.job.job import Job
from toolkit.launch.command import ProcessCommand, new_run_id, process_environment
from toolkit.launch.preflight import check_dataset, check_required
from toolkit.launch.process import RunResult, record_result, run_command
from toolkit.launch.warm_start import SERVER_VARIABLE
from toolkit.models.read_model import config_path
from toolkit.presets import Preset
from toolkit.presets.compatibility import Purpose
from toolkit.presets.preset_checks import check_arguments
from toolkit.presets.support import check_supported
from toolkit.record import status
from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder, read_json, start_facts
from toolkit.rehearse.rehearsed_rank import SYNTHETIC, RehearsedRank, has_local_weights

DEFAULT_STEPS = 3
# Nothing of a rehearsal is worth saving, evaluating or reporting.
FORCED_ARGUMENTS = {"save_model": "false", "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}

LARGEST_WORLD_SIZE = 2**17  # more ranks than any GPU cluster has


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """A process to start: the rank it stands for, and its training arguments."""

    preset: Preset
    rehearsed: RehearsedRank
    training_argv: list[str]
    cpu: bool

    @property
    def fake_tensors(self) -> bool:
        return self.rehearsed.fake_tensors


def check_rehearsal(preset: Preset, *, world_size: int, rank: int) -> None:
    """Raise ToolkitError for a world size that the preset does not support, a rank outside it, or no rehearsal."""
    check_range("--num-processes", world_size, Range(lowest=1, highest=LARGEST_WORLD_SIZE))
    check_supported(preset, world_size=world_size, purpose="rehearse")
    if not 0 <= rank < world_size:
        raise ToolkitError(
            f"--rank is {rank}, and a world of {world_size} has ranks 0 to {world_size - 1}", hint="`--rank 0`"
        )


def plan_rehearsal(
    preset: Preset,
    *,
    world_size: int,
    rank: int,
    training_argv: Sequence[str],
    cpu: bool,
    fake_tensors: bool = False,
) -> Rehearsal:
    """Check the job without torch, and add the training arguments that a rehearsal decides.

    Raises ToolkitError for the first thing that is invalid, and for what cannot be rehearsed.
    """
    check_rehearsal(preset, world_size=world_size, rank=rank)
    job = Job.from_argv(training_argv)
    purpose: Purpose = "trace" if fake_tensors else "rehearse"
    _check_job(job, preset, world_size=world_size, on_cpu=cpu, purpose=purpose)
    defaults = {"dataset": SYNTHETIC, "max_steps": str(DEFAULT_STEPS)}
    if fake_tensors:
        defaults |= _gpu_precision(preset, job)
    added = {name: value for name, value in defaults.items() if name not in job.given} | FORCED_ARGUMENTS
    return Rehearsal(
        preset=preset,
        rehearsed=RehearsedRank(world_size=world_size, rank=rank, fake_tensors=fake_tensors),
        training_argv=[*training_argv, *(word for name, value in added.items() for word in (f"--{name}", value))],
        cpu=cpu or fake_tensors,
    )


def _check_job(job: Job, preset: Preset, *, world_size: int, on_cpu: bool, purpose: Purpose) -> None:
    check_required(job, ("model_name_or_path",))
    if job.resumes:
        raise ToolkitError("--resume_from_checkpoint: a rehearsal trains nothing to resume", hint="leave it out")
    if job.load_best_model_at_end:
        raise ToolkitError("--load_best_model_at_end: a rehearsal saves and evaluates nothing", hint="leave it out")
    check_arguments(job, preset, num_processes=world_size, on_cpu=on_cpu, purpose=purpose)
    check_configuration(str(job.model_name_or_path))
    if job.load_in_4bit and not has_local_weights(str(job.model_name_or_path)):
        raise ToolkitError(
            "--load_in_4bit is rehearsed with the model's own weights, and there are none here to quantize",
            hint="name a local folder with weights; `toolkit plan --load-in-4bit` needs config.json alone",
        )
    is_synthetic = job.dataset in ((), (SYNTHETIC,))
    if not is_synthetic and purpose == "trace":
        raise ToolkitError(
            "--dataset is not traced: fake tensors have shapes and no values",
            hint="leave --dataset out, or leave --fake-tensors out",
        )
    if not is_synthetic:
        check_dataset(job)


def _gpu_precision(preset: Preset, job: Job) -> dict[str, str]:
    """Return the preset's precision unless one is given: fake tensors are traced as on a GPU, not in a CPU's fp32."""
    given = "bf16" in job.given or "fp16" in job.given or preset.mixed_precision == "no"
    return {} if given else {preset.mixed_precision: "true"}


def check_configuration(name: str) -> None:
    """Check that a model's configuration can be read: a folder with config.json, the file itself, or a hub id."""
    path = config_path(name)
    if read_json(path) is None:
        raise ToolkitError(f"{path} is not a JSON object", hint="download the model's config.json again")


def rehearsal_command(rehearsal: Rehearsal) -> ProcessCommand:
    """Return the command that starts the rehearsed rank, with its secrets in the environment."""
    training_argv, secrets = separate_secrets(rehearsal.training_argv)
    run_id = new_run_id()
    rehearsed = rehearsal.rehearsed
    world = ["--world-size", str(rehearsed.world_size), "--rank", str(rehearsed.rank)]
    world += ["--fake-tensors"] if rehearsed.fake_tensors else []
    process = [sys.executable, "-m", "toolkit.rehearse", "--preset", str(rehearsal.preset.accelerate_config_path)]
    shown = ["toolkit", "rehearse", "--preset", rehearsal.preset.name]
    return ProcessCommand(
        argv=[*process, *world, "--", *training_argv],
        environment=process_environment(cpu=rehearsal.cpu, run_id=run_id) | secrets,
        shown=shlex.join([*shown, *world, "--", *training_argv]),
        run_id=run_id,
    )


def run_rehearsal(rehearsal: Rehearsal, *, output_dir: Path, on_line: Callable[[str], None]) -> RunResult:
    """Rehearse in `output_dir`, which must hold no finished run. The results are in run.json, under `rehearsal`."""
    folder = RunFolder(output_dir)
    lock = folder.hold()
    try:
        start_attempt(folder, "resume_if_possible")  # an unfinished rehearsal is repeated
        command = rehearsal_command(rehearsal)
        folder.update_run(**_planned(rehearsal, command))
        kills_before = count_oom_kills()
        outcome = run_command(
            command,
            folder.log,
            on_line=on_line,
            inherit=[] if lock is None else [lock],
            fork_server=os.environ.get(SERVER_VARIABLE),
        )
        return record_result(folder, outcome, oom_killed=count_oom_kills() > kills_before)
    finally:
        if lock is not None:
            os.close(lock)


def rehearse_once(rehearsal: Rehearsal, *, on_line: Callable[[str], None]) -> tuple[RunResult, dict[str, Any]]:
    """Rehearse, and return run.json too; in a temporary folder unless `--output_dir` names one."""
    output_dir = Job.from_argv(rehearsal.training_argv).output_dir
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = Path(temporary if output_dir is None else output_dir)
        if output_dir is None:
            rehearsal = replace(rehearsal, training_argv=[*rehearsal.training_argv, "--output_dir", temporary])
        result = run_rehearsal(rehearsal, output_dir=folder, on_line=on_line)
        return result, result.folder.read_run() or {}


def _planned(rehearsal: Rehearsal, command: ProcessCommand) -> dict[str, Any]:
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "launcher_pid": os.getpid(),
        **start_facts(),
        "preset": rehearsal.preset.name,
        "preset_files": rehearsal.preset.texts(),
        "world_size": rehearsal.rehearsed.world_size,
        "rehearsal": asdict(rehearsal.rehearsed),
        "training_arguments": hide_words(rehearsal.training_argv),
        "plan": None,
        "command": command.shown,
    }

"""Resume under another preset or world size: the checkpoint is converted first, in a process of its own.

resumed = ResumingRun.of(job, load_preset("zero3"), num_processes=4, global_batch_size=8)
checkpoint = checkpoint_to_convert(checkpoint_to_resume(job), resumed)
copy = convert_checkpoint(checkpoint, resumed, on_message=print)         # out/.resume/checkpoint-8

`toolkit train` does so before it starts the ranks; started otherwise, rank 0 does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from toolkit.errors import ToolkitError, printed_errors
from toolkit.job.job import Job
from toolkit.presets.spec import PresetSpec
from toolkit.record.checkpoints import LATEST_WORDS, Checkpoint, latest_complete, read_checkpoint
from toolkit.record.resume_checks import TargetLayout, check_same_batch

RESUME_FOLDER = ".resume"
# What a launcher gives its ranks: a conversion is a process of its own.
RANK_VARIABLES = ("ACCELERATE_", "FSDP_", "GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumingRun:
    """The run in which a checkpoint is resumed."""

    preset: PresetSpec
    num_processes: int
    output_dir: Path
    global_batch_size: int
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Degrees of parallelism that are given."""
    trust_pickle: bool = False

    @classmethod
    def of(cls, job: Job, preset: PresetSpec, *, num_processes: int, global_batch_size: int) -> Self:
        """Return the run of a job."""
        return cls(
            preset=preset,
            num_processes=num_processes,
            output_dir=Path(str(job.output_dir)),
            global_batch_size=global_batch_size,
            degrees=job.degrees,
            trust_pickle=job.trust_pickle,
        )

    @property
    def layout(self) -> TargetLayout:
        """How this run holds model and optimizer states."""
        return TargetLayout.of(self.preset, num_processes=self.num_processes, degrees=self.degrees)


def remove_converted(output_dir: Path) -> None:
    """Remove the converted copy that a run has loaded, if there is one."""
    shutil.rmtree(output_dir / RESUME_FOLDER, ignore_errors=True)


def checkpoint_to_resume(job: Job) -> Checkpoint | None:
    """Return the checkpoint of `--resume_from_checkpoint`: a folder, or the newest complete one of the run folder."""
    if not job.resumes:
        return None
    named = str(job.resume_from_checkpoint)
    if named.lower() not in LATEST_WORDS:
        return read_checkpoint(Path(named))
    return latest_complete(Path(str(job.output_dir)))


def checkpoint_to_convert(checkpoint: Checkpoint | None, run: ResumingRun) -> Checkpoint | None:
    """Return the checkpoint if another preset or number of processes wrote it, such that its shards do not fit the run.

    Raises ToolkitError for another global batch size.
    """
    if checkpoint is None or checkpoint.manifest is None or not run.layout.differences(checkpoint.manifest):
        return None
    check_same_batch(checkpoint, run.global_batch_size)
    return checkpoint


def convert_checkpoint(checkpoint: Checkpoint, run: ResumingRun, *, on_message: Callable[[str], None]) -> Path:
    """Convert what `checkpoint_to_convert` returned, and return the copy; the last value of a flag wins.

    `toolkit checkpoint convert` runs as a child process: the launcher does not import torch, and a rank has its own.
    Raises ToolkitError for a conversion that is not supported.
    """
    manifest = checkpoint.manifest
    assert manifest is not None, "a checkpoint without one is not converted"
    remove_converted(run.output_dir)
    out = run.output_dir / RESUME_FOLDER / f"checkpoint-{checkpoint.step}"
    on_message(
        f"{checkpoint.path} was written by {manifest.preset} on {manifest.world_size} processes:"
        f" converting it for {run.preset.name} on {run.num_processes}"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ["--preset", str(run.preset.accelerate_config_path), "--num-processes", str(run.num_processes)]
    options += [f"--{name.replace('_', '-')}={degree}" for name, degree in run.degrees.items()]
    options += ["--trust-pickle"] if run.trust_pickle else []
    words = [sys.executable, "-P", "-m", "toolkit", "checkpoint", "convert", str(checkpoint.path), str(out), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        ended = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode != 0:
            unexplained = ToolkitError(f"the conversion ended with code {ended.returncode}")
            reason = (printed_errors(ended.stderr.decode(errors="replace")) or [unexplained])[-1]
            raise ToolkitError(f"{checkpoint.path} cannot be resumed here: {reason.message}", hint=reason.hint)
    except BaseException:
        remove_converted(run.output_dir)
        raise
    return out

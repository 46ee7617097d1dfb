"""Resume under another preset or world size: the checkpoint is converted first, in a process of its own.

checkpoint = checkpoint_to_convert(load_preset("zero3"), num_processes=4, job=job)
converted = convert_checkpoint(checkpoint, load_preset("zero3"), num_processes=4, job=job, on_message=print)
converted.argv                # ('--resume_from_checkpoint', 'out/.resume/checkpoint-8')
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets import Preset
from toolkit.run.checkpoints import LATEST_WORDS, Checkpoint, latest_complete, read_checkpoint
from toolkit.run.manifest_file import Manifest
from toolkit.run.preflight import CheckedJob
from toolkit.run.script_arguments import degrees_given, flag, resumes

RESUME_FOLDER = ".resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedCheckpoint:
    """The converted copy of a checkpoint, for one run."""

    path: Path | None = None
    """None where the run loads the checkpoint as it is, or does not resume."""

    @property
    def argv(self) -> tuple[str, ...]:
        """Arguments that follow the training arguments: the last value of a flag wins."""
        return () if self.path is None else ("--resume_from_checkpoint", str(self.path))

    @property
    def arguments(self) -> dict[str, Any]:
        """The same by name."""
        return {} if self.path is None else {"resume_from_checkpoint": str(self.path)}

    def remove(self) -> None:
        """Remove the copy after the run: the next resume starts from a checkpoint of the run again."""
        if self.path is not None:
            shutil.rmtree(self.path.parent, ignore_errors=True)


def checkpoint_to_convert(preset: Preset, *, num_processes: int, job: CheckedJob) -> Checkpoint | None:
    """Return the checkpoint that the run resumes from, if another preset or number of processes wrote it.

    Raises ToolkitError for another global batch size.
    """
    checkpoint = _checkpoint_to_resume(job.arguments)
    manifest = None if checkpoint is None else checkpoint.manifest
    layout = preset.layout(num_processes, degrees_given(job.arguments))
    if checkpoint is None or manifest is None or not _needs_conversion(manifest, preset, num_processes, layout):
        return None
    _check_same_batch(checkpoint, job.global_batch_size)
    return checkpoint


def convert_checkpoint(
    checkpoint: Checkpoint | None,
    preset: Preset,
    *,
    num_processes: int,
    job: CheckedJob,
    on_message: Callable[[str], None],
) -> ConvertedCheckpoint:
    """Convert what `checkpoint_to_convert` returned. Raises ToolkitError for a conversion that is not supported."""
    if checkpoint is None:
        return ConvertedCheckpoint()
    manifest = checkpoint.manifest
    assert manifest is not None, "a checkpoint without one is not converted"
    folder = Path(str(job.arguments["output_dir"])) / RESUME_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / f"checkpoint-{checkpoint.step}"
    converted = ConvertedCheckpoint(path=path)
    degrees = degrees_given(job.arguments)
    on_message(
        f"{checkpoint.path} was written by {manifest.preset} on {manifest.world_size} processes:"
        f" converting it for {preset.name} on {num_processes}"
    )
    try:
        trusted = flag(job.arguments.get("trust_pickle", False))
        _run_conversion(checkpoint.path, path, preset, num_processes, degrees, trust_pickle=trusted)
    except BaseException:
        converted.remove()
        raise
    return converted


def _checkpoint_to_resume(arguments: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint of `--resume_from_checkpoint`: a folder, or the newest complete one of the output folder."""
    if not resumes(arguments):
        return None
    named = str(arguments["resume_from_checkpoint"])
    if named.lower() not in LATEST_WORDS:
        return read_checkpoint(Path(named))
    return latest_complete(Path(str(arguments["output_dir"])))


def _needs_conversion(manifest: Manifest, preset: Preset, num_processes: int, layout: ParallelLayout | None) -> bool:
    if manifest.sharded_at_load or preset.sharded_at_load:  # its checkpoints fit every layout, and no other preset
        return manifest.sharded_at_load != preset.sharded_at_load
    if manifest.layout != (None if layout is None else layout.degrees()):
        return True
    alone = preset.engine in ("none", "ddp") and num_processes == 1 and manifest.engine in ("none", "ddp")
    engine = manifest.engine if alone else preset.engine
    return (engine, preset.sharding, num_processes) != (manifest.engine, manifest.sharding, manifest.world_size)


def _check_same_batch(checkpoint: Checkpoint, global_batch_size: int) -> None:
    """The data resume at the same row only if a step has the same number of sequences."""
    manifest = checkpoint.manifest
    assert manifest is not None, "a checkpoint without one is not converted"
    parts = [manifest.per_device_train_batch_size, manifest.gradient_accumulation_steps]
    known = [part for part in (*parts, manifest.data_parallel_size or manifest.world_size) if part is not None]
    then = math.prod(known)
    if len(known) == 3 and then != global_batch_size:
        raise ToolkitError(
            f"{checkpoint.path} was trained with {then} sequences per step over all ranks, now it is"
            f" {global_batch_size}: the data would not resume where they stopped",
            hint="change `--per_device_train_batch_size` or `--gradient_accumulation_steps` so that it is the same",
        )


def _run_conversion(
    checkpoint: Path,
    out: Path,
    preset: Preset,
    num_processes: int,
    degrees: Mapping[str, int],
    *,
    trust_pickle: bool,
) -> None:
    """Run `toolkit checkpoint convert` as a child process, so that this one does not import torch."""
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ["--preset", str(preset.accelerate_config_path), "--num-processes", str(num_processes)]
    options += [f"--{name.replace('_', '-')}={degree}" for name, degree in degrees.items()]
    options += ["--trust-pickle"] if trust_pickle else []
    command = [sys.executable, "-P", "-m", "toolkit.checkpoint", "convert", str(checkpoint), str(out), *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        message, _, hint = ended.stderr[ended.stderr.rfind("error: ") :].partition("\n  hint: ")
        reason = message.removeprefix("error: ").strip() or f"the conversion ended with code {ended.returncode}"
        raise ToolkitError(f"{checkpoint} cannot be resumed here: {reason}", hint=hint.strip() or None)

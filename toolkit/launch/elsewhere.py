"""Resume under another preset or world size: the checkpoint is converted first, in a process of its own.

>>> fitting = fitting_checkpoint(load_preset("zero3"), num_processes=4, job=job, say=print)
>>> fitting.words
['--resume_from_checkpoint', 'out/.resume/checkpoint-8']
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launch.preflight import Job
from toolkit.presets import Preset
from toolkit.runs.argv import resumes
from toolkit.runs.checkpoints import LATEST_WORDS, Checkpoint, Manifest, latest_complete, read_checkpoint

RESUME_FOLDER = ".resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """The checkpoint that the run can load; nothing where the one that was named is."""

    path: Path | None = None

    @property
    def words(self) -> list[str]:
        """Added to the training arguments: the last value of a flag wins."""
        return [] if self.path is None else ["--resume_from_checkpoint", str(self.path)]

    @property
    def arguments(self) -> dict[str, Any]:
        return {} if self.path is None else {"resume_from_checkpoint": str(self.path)}

    def remove(self) -> None:
        """After the run, however it ended: the next resume starts from a checkpoint of the run again."""
        if self.path is not None:
            shutil.rmtree(self.path.parent, ignore_errors=True)


def fitting_checkpoint(preset: Preset, *, num_processes: int, job: Job, say: Callable[[str], None]) -> Fitting:
    """Convert the checkpoint that the run resumes from, if another preset or number of processes wrote it.

    Raises ToolkitError for a pair that is impossible, and for another global batch.
    """
    checkpoint = named_checkpoint(job.arguments)
    manifest = None if checkpoint is None else checkpoint.manifest
    if checkpoint is None or manifest is None or not differs(manifest, preset, num_processes):
        return Fitting()
    check_same_batch(checkpoint, job.global_batch_size)
    folder = Path(str(job.arguments["output_dir"])) / RESUME_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    fitting = Fitting(path=folder / f"checkpoint-{checkpoint.step}")
    assert fitting.path is not None
    say(
        f"{checkpoint.path} is of {manifest.get('preset')} on {manifest.get('world_size')} processes:"
        f" converting it for {preset.name} on {num_processes}"
    )
    try:
        convert(checkpoint.path, fitting.path, preset, num_processes)
    except BaseException:
        fitting.remove()
        raise
    return fitting


def named_checkpoint(arguments: dict[str, Any]) -> Checkpoint | None:
    """What `--resume_from_checkpoint` means: a folder, or the newest complete one of the output folder."""
    if not resumes(arguments):
        return None
    named = str(arguments["resume_from_checkpoint"])
    if named.lower() not in LATEST_WORDS:
        return read_checkpoint(Path(named))
    return latest_complete(Path(str(arguments["output_dir"])))


def differs(manifest: Manifest, preset: Preset, num_processes: int) -> bool:
    """Whether the run that is asked for cannot load the checkpoint as it lies."""
    alone = preset.engine in ("none", "ddp") and num_processes == 1 and manifest.get("engine") in ("none", "ddp")
    engine = manifest.get("engine") if alone else preset.engine
    asked = (engine, preset.sharding, num_processes)
    return asked != (manifest.get("engine"), manifest.get("sharding"), manifest.get("world_size"))


def check_same_batch(checkpoint: Checkpoint, global_batch_size: int) -> None:
    """The data go on where they stopped only if a step still has as many sequences."""
    manifest = checkpoint.manifest or {}
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    parts = [int(manifest[name]) for name in names if manifest.get(name) is not None]
    then = math.prod(parts)
    if len(parts) < len(names):
        return
    if then != global_batch_size:
        raise ToolkitError(
            f"{checkpoint.path} was trained with {then} sequences a step over all ranks, now it is {global_batch_size}:"
            " the data would not go on where they stopped",
            hint="change `--per_device_train_batch_size` or `--gradient_accumulation_steps` so that it is the same",
        )


def convert(checkpoint: Path, out: Path, preset: Preset, num_processes: int) -> None:
    """`toolkit checkpoint convert` as a child: the command line imports no torch."""
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ["--preset", str(preset.accelerate_config_path), "--num-processes", str(num_processes)]
    command = [sys.executable, "-m", "toolkit.checkpoint", "convert", str(checkpoint), str(out), *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        message, _, hint = ended.stderr[ended.stderr.rfind("error: ") :].partition("\n  hint: ")
        said = message.removeprefix("error: ").strip() or f"the conversion ended with code {ended.returncode}"
        raise ToolkitError(f"{checkpoint} cannot be resumed here: {said}", hint=hint.strip() or None)

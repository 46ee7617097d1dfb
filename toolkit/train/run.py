"""What a run writes into its folder before its first step and after its last; between them the meter writes.

run = Run(argv=argv, promise=promise, arguments=parse(argv, promise), ...)
open_folder(run)
close_folder(run, trainer.saves)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.hardware.machine import describe_machine, git_commit, library_versions
from toolkit.runs import status
from toolkit.runs.arguments import DataArguments, ModelArguments
from toolkit.runs.checkpoints import Checkpoint, remove_unfinished
from toolkit.runs.folder import MEASUREMENT_VERSION, RunFolder, start_facts
from toolkit.runs.rehearsals import Rehearsed
from toolkit.runs.steps import PER_STEP, Measured, measure, read_steps
from toolkit.train.arguments import Arguments
from toolkit.train.failure import Progress
from toolkit.train.nvme import swap_bytes
from toolkit.train.promise import Promise
from toolkit.units import number

PREPARED_VARIABLE = "TOOLKIT_RUN_PREPARED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as it was asked for, before any of its data is read."""

    argv: Sequence[str]
    promise: Promise
    arguments: Arguments
    folder: RunFolder
    progress: Progress
    resumed: Checkpoint | None
    rehearsed: Rehearsed | None

    @property
    def model(self) -> ModelArguments:
        return self.arguments[0]

    @property
    def data(self) -> DataArguments:
        return self.arguments[1]

    @property
    def training(self) -> Any:
        return self.arguments[2]

    @property
    def rank(self) -> int:
        return int(self.training.process_index)

    @property
    def writes(self) -> bool:
        """Whether this process writes what is said once; in a rehearsal there is one process, whatever its rank."""
        return self.rank == 0 or self.rehearsed is not None


def open_folder(run: Run) -> None:
    """Refuse a finished run's folder on every rank before any rank writes, then let one write run.json."""
    prepared, folder, resume = PREPARED_VARIABLE in os.environ, run.folder, run.resumed is not None
    if not prepared:
        folder.check_unused(resume=resume)
        barrier()
        if run.writes:
            folder.hold()
            folder.prepare(resume=resume)
            write_log(folder.log)
    barrier()
    if run.writes:
        started = {} if prepared else start_facts() | {"plan": None}
        folder.update_run(**started, **first_facts(run))
        remove_unfinished(folder.path)


def first_facts(run: Run) -> dict[str, Any]:
    """What run.json says of a run before its first step."""
    preset, resumed = run.promise.preset, run.resumed
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "preset": None if preset is None else preset.name,
        "preset_files": {} if preset is None else preset.texts(),
        "world_size": run.training.world_size,
        "training_arguments": list(run.argv),
        "spec": spec(run),
        "seed": run.training.seed,
        "argv": sys.argv,
        "versions": library_versions(),
        "hardware": describe_machine(),
        "git_commit": git_commit(Path(__file__).parent),
        "measurement_version": MEASUREMENT_VERSION,
        "resumed_from": None if resumed is None else {"path": str(resumed.path), "step": resumed.step},
        **({} if run.rehearsed is None else {"rehearsal": asdict(run.rehearsed)}),
    }


def spec(run: Run) -> dict[str, Any]:
    """The arguments in force, with what the preset and the machine decided."""
    training = run.training
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    return {
        "model": asdict(run.model),
        "data": asdict(run.data),
        "seed": training.seed,
        "max_steps": training.max_steps,
        "num_train_epochs": training.num_train_epochs,
        "learning_rate": training.learning_rate,
        "lr_scaling": None if training.scaled_rate is None else asdict(training.scaled_rate),
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": batch * accumulation * training.world_size,
        "device": training.device.type,
        "mixed_precision": training.mixed_precision,
    }


def write_nvme_facts(run: Run, nvme: dict[str, Any]) -> None:
    """Beside what the launcher measured of the disk: the buffers in force, and what lay on the disk at the end."""
    barrier()
    if run.writes:
        measured = (run.folder.read_run() or {}).get("nvme") or {}
        run.folder.update_run(nvme=measured | nvme | {"swap_bytes": swap_bytes(nvme)})


def close_folder(run: Run, saves: list[dict[str, Any]]) -> None:
    """After every rank has written its rows: the summary, rank 0's phases, and the status."""
    barrier()
    if not run.writes:
        return
    untimed_steps = run.model.untimed_steps
    measured = measure(read_steps(run.folder), untimed_steps=untimed_steps)
    summary = {name: value for name, value in asdict(measured).items() if name not in PER_STEP}
    summary |= {"first_loss": measured.losses[0], "last_loss": measured.losses[-1]} if measured.losses else {}
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    run.progress.enter("end")
    run.folder.update_run(
        status=status.COMPLETED,
        exit_code=0,
        finished=finished,
        measured=summary,
        saves=saves,
        phases=run.progress.phases,
    )
    print(_last_line(run, measured, untimed_steps=untimed_steps), flush=True)


def _last_line(run: Run, measured: Measured, *, untimed_steps: int) -> str:
    speed = f"{number(measured.tokens_per_second, 0)} tokens/s over {measured.timed_steps} timed"
    if measured.tokens_per_second is None:
        speed = f"none timed: untimed_steps is {untimed_steps}"
    loss = f"loss {measured.losses[0]:.4f} to {measured.losses[-1]:.4f}; " if measured.losses else ""
    return f"done: {measured.steps} steps, {loss}{speed}; {run.folder.path}"


def remove_swap_files(run: Run) -> None:
    """They are of no use after a run. Called after the last barrier of a run that went well."""
    barrier()
    if run.progress.swap_folder is not None and run.training.local_process_index == 0:
        shutil.rmtree(run.progress.swap_folder, ignore_errors=True)


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def write_log(path: Path) -> None:
    """Copy this process's stdout and stderr into train.log, when no launcher does it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        copy = subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, stdout=stream.fileno(), start_new_session=True
        )
        assert copy.stdin is not None
        os.dup2(copy.stdin.fileno(), stream.fileno())

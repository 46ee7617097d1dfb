"""The run in progress: its arguments, its folder, the checkpoint it resumes from, and how it is opened and completed.

with open_run(args, launch, progress) as run:
    ...
    run.complete(trainer)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.files.secrets import hide_words
from toolkit.hardware.node import describe_node, git_commit, library_versions
from toolkit.job.argument_fields import DataArguments, ModelArguments
from toolkit.job.job import Job
from toolkit.launch.resume_conversion import RESUME_FOLDER, remove_converted
from toolkit.parallel.layout import ParallelLayout
from toolkit.record import status
from toolkit.record.attempts import begin_training, start_attempt
from toolkit.record.checkpoints import Checkpoint, remove_unfinished
from toolkit.record.folder import MEASUREMENT_VERSION, RunFolder, start_facts
from toolkit.record.goodput import measure_goodput
from toolkit.record.measurements import Measurements, drop_rows_after, measure, read_steps
from toolkit.record.restarts import record_restart
from toolkit.record.timeline import Moment, read_timeline
from toolkit.train.arguments import Arguments
from toolkit.train.checkpointing.resume import find_checkpoint
from toolkit.train.checkpointing.signals import StopOnSignal
from toolkit.train.health.progress import Progress
from toolkit.train.launch_context import LaunchContext
from toolkit.train.shared_folder import check_visible, claim_folder
from toolkit.units import number

# An elastic agent starts the next attempt while the lock of a node that was lost is still in effect: file servers
# release it after a lease, of 90 s under Linux's NFSv4.
RELEASE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveRun:
    """One rank's part of the run in progress."""

    arguments: Arguments
    launch: LaunchContext
    progress: Progress
    folder: RunFolder
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes from."""
    stop_on_signal: StopOnSignal
    single_process: bool = False
    """True where this process is the only one, whatever its rank and world size."""
    facts: dict[str, Any] = field(default_factory=dict)
    """More for run.json."""

    @property
    def rank(self) -> int:
        return int(self.arguments.training.process_index)

    @property
    def writes(self) -> bool:
        """True in the process that writes run.json and prints what is printed once."""
        return self.rank == 0 or self.single_process

    @property
    def resume_path(self) -> str | None:
        return None if self.checkpoint is None else str(self.checkpoint.path)

    @property
    def layout_at_load(self) -> ParallelLayout | None:
        """The layout in which transformers shards the model while it loads it; None for any other model."""
        preset = self.launch.preset
        return self.arguments.layout if preset is not None and preset.sharded_at_load else None

    @property
    def resumed_step(self) -> int:
        """The step of the checkpoint that the run resumes from; 0 without one."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def timeline(self) -> Path:
        """Return the file of the phases; it moves with the files of the attempt, once that has trained."""
        return (self.folder if self.checkpoint is not None else self.folder.current()).timeline

    def barrier(self) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank. Collective."""
        return gather_from_ranks(value, single_process=self.single_process)

    def begin_training(self) -> None:
        """Let this attempt take the place of an earlier run in the folder: it has trained a step. Collective."""
        if self.writes:
            remove_unfinished(self.folder.path)
            begin_training(self.folder, continues=self.checkpoint is not None)
            remove_converted(self.folder.path)  # every rank has loaded it
        self.barrier()

    def begin_rows(self) -> None:
        """Begin training, and drop the rows of steps that are trained again by fewer ranks. Collective.

        Each of this attempt's ranks drops its own.
        """
        if self.writes and self.checkpoint is not None:
            own = {self.folder.rank_rows(rank) for rank in range(self.arguments.training.world_size)}
            for rows in sorted({*self.folder.path.glob("ranks/rank*.jsonl")} - own):
                drop_rows_after(rows, self.resumed_step)
        self.begin_training()

    def raise_if_stopped(self) -> None:
        """Raise Interrupted where a signal ended training."""
        self.stop_on_signal.raise_if_stopped()

    def complete(self, trainer: Any) -> None:
        """Write the summary of all ranks' rows, rank 0's phases and the status. Collective."""
        self.begin_training()  # a run without steps; and every rank has written its rows
        if not self.writes:
            return
        untimed_steps = self.arguments.job.untimed_steps
        steps = read_steps(self.folder)
        measured = measure(steps, untimed_steps=untimed_steps)
        goodput = measure_goodput([*read_timeline(self.folder.timeline), Moment(unix=time.time(), phase="end")], steps)
        facts = {"goodput": goodput.facts(), "saves": [asdict(save) for save in trainer.saves]}
        self.write_completion(measured=measured.summary(), **facts)
        print(goodput.describe(), flush=True)
        print(_last_line(measured, untimed_steps=untimed_steps, folder=self.folder.path), flush=True)

    def write_completion(self, **facts: Any) -> None:
        """Write run.json's status, times and `facts`."""
        self.progress.enter("end")
        self.folder.update_run(
            status=status.COMPLETED,
            exit_code=0,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            phases=self.progress.phases,
            **facts,
        )


def gather_from_ranks(value: Any, *, single_process: bool = False) -> list[Any]:
    """Return every rank's value, on every rank. Collective."""
    if single_process or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def open_run(
    arguments: Arguments,
    launch: LaunchContext,
    progress: Progress,
    *,
    single_process: bool = False,
    facts: dict[str, Any] | None = None,
) -> Iterator[ActiveRun]:
    """Find the checkpoint to resume from and open the run folder; close the process group after a run that ended well.

    `single_process` is true where no other rank has a process; `facts` is more for run.json. Raises ToolkitError for a
    folder that holds a finished or a running run, and for a checkpoint that the run cannot resume from.
    """
    training = arguments.training
    world_size = 1 if single_process else training.world_size
    folder = RunFolder(Path(training.output_dir))
    writes = single_process or training.process_index == 0
    if not launch.folder_prepared:
        _hold_folder(folder, writes=writes, resume=arguments.job.resumes)
    gather = partial(gather_from_ranks, single_process=single_process)
    progress.attempt_id, nodes = claim_folder(folder.path, writes=writes, gather=gather)
    checkpoint = find_checkpoint(arguments, launch, progress)
    if checkpoint is not None:
        check_visible(checkpoint.path, gather=gather)
    run = ActiveRun(
        arguments=arguments,
        launch=launch,
        progress=progress,
        folder=folder,
        checkpoint=checkpoint,
        stop_on_signal=StopOnSignal(progress, rank=training.process_index, world_size=world_size),
        single_process=single_process,
        facts={"nodes": nodes, **(facts or {})},
    )
    _open_folder(run)
    progress.step = run.resumed_step
    if run.writes and not single_process:
        progress.open_timeline(run.timeline, restarted=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)
    progress.output_dir, progress.datasets = run.folder.path, arguments.job.dataset
    if run.writes:
        print("".join(f"{line}\n" for line in arguments.notes), end="", flush=True)  # train.log is open now
    yield run
    # Not after an error: another rank may be waiting in a collective, and its swap files may still be read.
    run.barrier()
    if progress.swap_folder is not None and training.local_process_index == 0:
        shutil.rmtree(progress.swap_folder, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads abort a process that just exits


def _hold_folder(folder: RunFolder, *, writes: bool, resume: bool) -> None:
    """Refuse a folder that is in use, and let one rank lock it for as long as it runs."""
    folder.check_unused(resume=resume)
    restarts = resume and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if writes:
        folder.hold(wait_seconds=RELEASE_SECONDS if restarts else 0)


def _open_folder(run: ActiveRun) -> None:
    """Refuse a finished run's folder on every rank before any rank writes, then let one write run.json."""
    folder, resume = run.folder, run.checkpoint is not None
    if not run.launch.folder_prepared:
        folder.check_unused(resume=resume)
        run.barrier()
        if run.writes:
            run.facts.update(_restarts(run))
            start_attempt(folder, resume=resume)
            _copy_output_to(folder.log if resume else folder.current().log)
    run.barrier()
    if run.writes:
        started = {} if run.launch.folder_prepared else start_facts() | {"plan": None}
        folder.update_run(**started, **_run_facts(run))


def _restarts(run: ActiveRun) -> dict[str, Any]:
    """Return `restarts` for run.json, where the run resumes in the folder of its earlier attempts."""
    checkpoint = run.checkpoint
    elsewhere = checkpoint is not None and run.folder.path.absolute() not in checkpoint.path.absolute().parents
    if elsewhere or not run.arguments.job.resumes:
        return {}
    restarts = record_restart(run.folder, resumed_step=run.resumed_step)
    return {"restarts": restarts} if restarts else {}


def _resumed_from(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Name the checkpoint of the run itself, not the converted copy, which is removed."""
    if checkpoint is None:
        return None
    source = None if checkpoint.manifest is None else checkpoint.manifest.converted_from
    copied = checkpoint.path.parent.name == RESUME_FOLDER and source is not None and source.path is not None
    return {"path": str(source.path if copied and source else checkpoint.path), "step": checkpoint.step}


def _run_facts(run: ActiveRun) -> dict[str, Any]:
    """Return what run.json records before the first step."""
    preset, training = run.launch.preset, run.arguments.training
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "preset": None if preset is None else preset.name,
        "preset_files": {} if preset is None else preset.texts(),
        "world_size": training.world_size,
        "training_arguments": list(run.arguments.argv),
        "spec": _spec(run.arguments),
        "seed": training.seed,
        "argv": hide_words(sys.argv),
        "versions": library_versions(),
        "hardware": describe_node(),
        "git_commit": git_commit(Path(__file__).parent),
        "measurement_version": MEASUREMENT_VERSION,
        "resumed_from": _resumed_from(run.checkpoint),
        **run.facts,
    }


def _spec(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments in effect, with what the preset and the node decided."""
    training, rate = arguments.training, arguments.scaled_rate
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    return {
        "model": _values_of(ModelArguments, arguments.job),
        "data": _values_of(DataArguments, arguments.job),
        "seed": training.seed,
        "max_steps": training.max_steps,
        "num_train_epochs": training.num_train_epochs,
        "learning_rate": training.learning_rate,
        "lr_scaling": None if rate is None else asdict(rate),
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": arguments.global_batch_size,
        "layout": None if arguments.layout is None else arguments.layout.degrees(),
        "device": training.device.type,
        "mixed_precision": training.mixed_precision,
    }


def _values_of(part: type[ModelArguments | DataArguments], job: Job) -> dict[str, Any]:
    values = {name: job.value(name) for name in part.__dataclass_fields__}
    return {name: None if value == () else value for name, value in values.items()}


def _last_line(measured: Measurements, *, untimed_steps: int, folder: Path) -> str:
    speed = f"{number(measured.tokens_per_second, 0)} tokens/s over {measured.timed_steps} timed"
    if measured.tokens_per_second is None:
        speed = f"none timed: untimed_steps is {untimed_steps}"
    loss = f"loss {number(measured.first_loss, 4)} to {number(measured.last_loss, 4)}; " if measured.losses else ""
    return f"done: {len(measured.step_seconds)} steps, {loss}{speed}; {folder}"


def _copy_output_to(log: Path) -> None:
    """Copy this process's stdout and stderr into train.log, where no launcher does it.

    SLURM sends SIGTERM to every process of a job step: the copies ignore it, and end with the rank, which saves first.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        copy = subprocess.Popen(
            ["sh", "-c", "trap '' TERM INT HUP; exec tee -a \"$0\"", str(log)],
            stdin=subprocess.PIPE,
            stdout=stream.fileno(),
            start_new_session=True,
        )
        assert copy.stdin is not None
        os.dup2(copy.stdin.fileno(), stream.fileno())

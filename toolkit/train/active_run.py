"""The run of the training script: its arguments and launch, beside its record, and the checkpoint it resumes from.

with open_run(args, launch, progress) as run:
    ...
    run.complete(untimed_steps=2)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.job.argument_fields import DataArguments, ModelArguments
from toolkit.job.job import Job
from toolkit.launch.resume_conversion import RESUME_FOLDER, remove_converted
from toolkit.observe.hang_detection import Watchdog
from toolkit.observe.observed_run import ObservedRun, check_visible, claim_folder, gather_from_ranks
from toolkit.observe.progress import Progress
from toolkit.observe.signals import StopOnSignal
from toolkit.parallel.layout import ParallelLayout
from toolkit.record.attempts import check_start, record_restart, reuse_of
from toolkit.record.checkpoints import Checkpoint
from toolkit.record.folder import RunFolder
from toolkit.train.arguments import Arguments
from toolkit.train.data.dataset import row_places
from toolkit.train.launch_context import LaunchContext
from toolkit.train.resume import find_checkpoint

# An elastic agent starts the next attempt while the lock of a node that was lost is still in effect: file servers
# release it after a lease, of 90 s under Linux's NFSv4.
RELEASE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class ActiveRun(ObservedRun):
    """One rank's part of the run in progress."""

    arguments: Arguments
    launch: LaunchContext
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes from."""
    stop_on_signal: StopOnSignal

    @property
    def resume_path(self) -> str | None:
        return None if self.checkpoint is None else str(self.checkpoint.path)

    @property
    def layout_at_load(self) -> ParallelLayout | None:
        """The layout in which transformers shards the model while it loads it; None for any other model."""
        preset = self.launch.preset
        return self.arguments.layout if preset is not None and preset.sharded_at_load else None

    def begin_training(self) -> None:
        if self.writes:
            remove_converted(self.folder.path)  # every rank has loaded it
        super().begin_training()

    def start_health_checks(self) -> None:
        """Start this rank's heartbeat and hang detection, and handle signals; both last until the process ends."""
        Watchdog(self.progress, ranks=self.folder.rank_rows(self.rank).parent, rank=self.rank).start()
        self.stop_on_signal.listen()

    def raise_if_stopped(self) -> None:
        """Raise Interrupted where a signal ended training."""
        self.stop_on_signal.raise_if_stopped()


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
    folder = RunFolder(Path(training.output_dir))
    writes = single_process or training.process_index == 0
    if not launch.folder_prepared:
        _hold_folder(folder, writes=writes, job=arguments.job)
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
        rank=training.process_index,
        world_size=training.world_size,
        checkpoint=checkpoint,
        resumed_step=0 if checkpoint is None else checkpoint.step,
        continues=checkpoint is not None,
        stop_on_signal=StopOnSignal(
            progress, rank=training.process_index, world_size=1 if single_process else training.world_size
        ),
        single_process=single_process,
    )
    restarts = _restarts(run) if writes and not launch.folder_prepared else {}
    job = arguments.job
    reuse = reuse_of(continues=run.continues, resumes=job.resumes, overwrite=job.overwrite_output_dir)
    run.open(prepared=launch.folder_prepared, reuse=reuse, **_run_facts(run), nodes=nodes, **(facts or {}), **restarts)
    progress.describe_rows = partial(row_places, names=arguments.job.dataset)
    if writes:
        print("".join(f"{line}\n" for line in arguments.notes), end="", flush=True)  # train.log is open now
    yield run
    # Not after an error: another rank may be waiting in a collective, and its swap files may still be read.
    run.barrier()
    if progress.swap_folder is not None and training.local_process_index == 0:
        shutil.rmtree(progress.swap_folder, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads abort a process that just exits


def _hold_folder(folder: RunFolder, *, writes: bool, job: Job) -> None:
    """Refuse a folder that is in use before anything in it changes, and let one rank lock it for as long as it runs."""
    if writes:
        folder.check_free()
    check_start(folder, reuse_of(continues=job.resumes, resumes=job.resumes, overwrite=job.overwrite_output_dir))
    restarts = job.resumes and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if writes:
        folder.hold(wait_seconds=RELEASE_SECONDS if restarts else 0)


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
    """Return what run.json records of the script's arguments before the first step."""
    preset, training = run.launch.preset, run.arguments.training
    return {
        "preset": None if preset is None else preset.name,
        "preset_files": {} if preset is None else preset.texts(),
        "training_arguments": list(run.arguments.argv),
        "spec": _spec(run.arguments),
        "seed": training.seed,
        "resumed_from": _resumed_from(run.checkpoint),
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

"""The run of the training script: its arguments and launch, its record, and the checkpoint that it resumes from."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.engines.safe_loading import check_checkpoint, load_only_known_classes
from toolkit.job.argument_fields import DataArguments, ModelArguments
from toolkit.launch import resume
from toolkit.observe.hang_detection import Watchdog
from toolkit.observe.observed_run import ObservedRun, barrier, check_visible, claim_folder, gather_from_ranks
from toolkit.observe.progress import Progress
from toolkit.observe.signals import StopOnSignal, join_store
from toolkit.parallel.layout import ParallelLayout
from toolkit.record import checkpoints
from toolkit.record.attempts import check_start, record_restart, reuse_of
from toolkit.record.checkpoints import Checkpoint
from toolkit.record.folder import RunFolder
from toolkit.train.arguments import Arguments, LaunchContext
from toolkit.train.data.dataset import row_places

# An elastic agent starts the next attempt while the lock of a node that was lost is still in effect: file servers
# release it after a lease, of 90 s under Linux's NFSv4.
RELEASE_SECONDS = 120.0
# A conversion reads and writes the whole checkpoint; no collective may wait for it.
CONVERSION_LIMIT = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class ActiveRun(ObservedRun):
    """One rank's part of the run in progress."""

    arguments: Arguments
    launch: LaunchContext
    checkpoint: Checkpoint | None  # the checkpoint that the run resumes from
    stop_on_signal: StopOnSignal

    @property
    def layout_at_load(self) -> ParallelLayout | None:
        """The layout in which transformers shards the model while it loads it; None for any other model."""
        preset = self.launch.preset
        return self.arguments.layout if preset is not None and preset.sharded_at_load else None

    def begin_training(self) -> None:
        if self.writes:
            resume.remove_converted(self.folder.path)  # every rank has loaded it
        super().begin_training()

    def start_health_checks(self) -> None:
        """Start this rank's heartbeat and hang detection, and stop with other ranks that get a signal."""
        Watchdog(self.progress, ranks=self.folder.rank_rows(self.rank).parent, rank=self.rank).start()
        self.stop_on_signal.follow(self.progress)


@contextmanager
def open_run(
    arguments: Arguments, launch: LaunchContext, progress: Progress, *, single_process: bool = False, **facts: Any
) -> Iterator[ActiveRun]:
    """Find the checkpoint to resume from and open the run folder; close the process group after a run that ended well.

    `single_process` is true where no other rank has a process; `facts` are more for run.json. Raises ToolkitError for a
    folder that holds a finished or a running run, and for a checkpoint that the run cannot resume from.
    """
    training, job = arguments.training, arguments.job
    folder = RunFolder(Path(training.output_dir))
    rank, world_size = training.process_index, training.world_size
    writes = single_process or rank == 0
    stop_on_signal = StopOnSignal(progress, folder, rank=rank, world_size=1 if single_process else world_size)
    stop_on_signal.listen()
    if not launch.folder_prepared:
        restarts = job.resumes and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
        if writes and not restarts:
            folder.check_free()
        # A folder that is in use is refused before anything in it changes; one rank locks it for as long as it runs.
        check_start(folder, reuse_of(continues=job.resumes, resumes=job.resumes, overwrite=job.overwrite_output_dir))
        if writes:
            folder.hold(wait_seconds=RELEASE_SECONDS if restarts else 0)
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
        rank=rank,
        world_size=world_size,
        preset=None if launch.preset is None else launch.preset.name,
        checkpoint=checkpoint,
        resumed_step=0 if checkpoint is None else checkpoint.step,
        continues=checkpoint is not None,
        stop_on_signal=stop_on_signal,
        single_process=single_process,
    )
    reuse = reuse_of(continues=run.continues, resumes=job.resumes, overwrite=job.overwrite_output_dir)
    run.open(prepared=launch.folder_prepared, reuse=reuse, nodes=nodes, **_run_facts(run), **facts)
    progress.describe_rows = partial(row_places, names=job.dataset)
    if writes:
        print("".join(f"{line}\n" for line in arguments.notes), end="", flush=True)  # train.log is open now
    yield run
    barrier()  # not after an error: another rank may be waiting in a collective, and its swap files may still be read
    if progress.swap_folder is not None and training.local_process_index == 0:
        shutil.rmtree(progress.swap_folder, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads abort a process that just exits


def find_checkpoint(arguments: Arguments, launch: LaunchContext, progress: Progress) -> Checkpoint | None:
    """Return the checkpoint that `--resume_from_checkpoint` names; None for a run that starts at step 0.

    Rank 0 reads all bytes, and converts a checkpoint whose shards do not fit; the others wait, in no collective. Raises
    ToolkitError for one that is damaged, would run something, cannot be converted, or whose data would not continue.
    """
    training, job = arguments.training, arguments.job
    if not job.resumes:
        return None
    if not job.trust_pickle:
        load_only_known_classes(training)
    target = None
    if launch.preset is not None:
        target = resume.TrainingRun(preset=launch.preset, job=job, num_processes=training.world_size)
    store = join_store(CONVERSION_LIMIT, progress) if dist.is_initialized() else None
    found: list[Checkpoint | None] = [None]
    if store is None or training.process_index == 0:
        found = [_prepared_checkpoint(arguments, target)]
    if store is not None:
        if training.process_index == 0:
            store.set("checkpoint", "ready")
        store.wait(["checkpoint"])
        dist.broadcast_object_list(found)
    checkpoint = found[0]
    if checkpoint is None:
        return None
    if target is not None:
        resume.check_same_layout(checkpoint, target)
    groups, batch = arguments.data_parallel_size, arguments.global_batch_size
    resume.check_resume_settings(checkpoint, job, global_batch_size=batch, data_parallel_size=groups)
    if training.process_index == 0:
        print(f"resume: from {checkpoint.path}, after step {checkpoint.step}", flush=True)
    return checkpoint


def _prepared_checkpoint(arguments: Arguments, target: resume.TrainingRun | None) -> Checkpoint | None:
    job, output_dir = arguments.job, Path(arguments.training.output_dir)
    if str(job.resume_from_checkpoint).lower() in checkpoints.LATEST_WORDS:
        checkpoints.remove_unfinished(output_dir)
    checkpoint = resume.checkpoint_to_resume(job)
    if checkpoint is None:
        print(f"resume: no complete checkpoint is in {output_dir}; training starts from step 0", flush=True)
        return None
    if target is not None and resume.converts(checkpoint, target):
        converted = resume.convert_checkpoint(checkpoint, target, on_message=partial(print, flush=True))
        checkpoint = checkpoints.read_checkpoint(converted)
    if not job.trust_pickle:
        check_checkpoint(checkpoint.path)
    return checkpoint


def _run_facts(run: ActiveRun) -> dict[str, Any]:
    preset, args, training = run.launch.preset, run.arguments, run.arguments.training
    names = ["seed", "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size"]
    names += ["gradient_accumulation_steps", "mixed_precision", "optim", "lr_scheduler_type"]
    spec = {name: getattr(training, name) for name in names}
    for part, declared in (("model", ModelArguments), ("data", DataArguments)):
        values = {name: args.job.value(name) for name in declared.__dataclass_fields__}
        spec[part] = {name: None if value == () else value for name, value in values.items()}
    facts = {
        "preset": None if preset is None else preset.name,
        "preset_files": {} if preset is None else preset.texts(),
        "training_arguments": list(args.argv),
        "spec": {
            **spec,
            "lr_scaling": None if args.scaled_rate is None else asdict(args.scaled_rate),
            "global_batch_size": args.global_batch_size,
            "layout": None if args.layout is None else args.layout.degrees(),
            "device": training.device.type,
        },
        "seed": training.seed,
        "resumed_from": None,
    }
    checkpoint, resumes_here = run.checkpoint, args.job.resumes
    if checkpoint is not None:
        # Of a converted copy, which is removed, the checkpoint that it was made from.
        source = None if checkpoint.manifest is None else checkpoint.manifest.converted_from
        copied = checkpoint.path.parent.name == resume.RESUME_FOLDER
        path = (source and copied and source.path) or checkpoint.path
        saved_by = (source and copied and source) or checkpoint.manifest
        preset_name = None if saved_by is None else saved_by.preset
        facts["resumed_from"] = {"path": str(path), "step": checkpoint.step, "preset": preset_name}
        resumes_here = run.folder.path.absolute() in checkpoint.path.absolute().parents
    if run.writes and not run.launch.folder_prepared and resumes_here:
        restarts = record_restart(run.folder, resumed_step=run.resumed_step)
        facts |= {"restarts": restarts} if restarts else {}
    return facts

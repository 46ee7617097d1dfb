"""Resume a run: the checkpoint, whether the job continues it, and its conversion where its shards do not fit.

`toolkit train` does so before it starts the ranks; started otherwise, rank 0 does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from toolkit.engines.engine import Engine
from toolkit.engines.registry import ENGINES
from toolkit.errors import ToolkitError, printed_errors
from toolkit.job.argument_values import as_list
from toolkit.job.global_batch import global_batch_size, with_accumulation
from toolkit.job.job import Job
from toolkit.models.optimizers import OPTIMIZERS, same_states
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import DEFAULT_SCHEDULE, INTERLEAVED
from toolkit.presets.compatibility import CPU, Device
from toolkit.presets.spec import PresetSpec
from toolkit.record.checkpoints import LATEST_WORDS, Checkpoint, Manifest, latest_complete, read_complete_checkpoint

RESUME_FOLDER = ".resume"
# What a launcher gives its ranks: a conversion is a process of its own.
RANK_VARIABLES = ("ACCELERATE_", "FSDP_", "GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A job under a preset on a number of processes."""

    preset: PresetSpec
    job: Job
    num_processes: int
    device: Device = CPU
    nodes: int = 1
    is_here: bool = True  # True if this node runs it; on another, a package that is missing here is a warning
    starts: bool = True  # False for a plan of a run alone: a model that is known by name is then not asked for
    nvme_path: str | None = None  # the disk to offload to, for a preset that does
    warnings: tuple[str, ...] = ()
    """One line for each argument that has no effect, and for each package that the job needs on another node."""

    @property
    def layout(self) -> ParallelLayout | None:
        """How the ranks are divided; None for data parallelism alone."""
        return self.preset.layout(self.num_processes, self.job.degrees)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that train on different rows."""
        return self.num_processes if self.layout is None else self.layout.data_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return global_batch_size(self.job, self.data_parallel_size)

    @property
    def output_dir(self) -> Path:
        """The run folder."""
        return Path(str(self.job.output_dir))

    def accumulated(self) -> Self:
        """Return the run with the steps that keep `--global_batch_size`. Raises ToolkitError where none do."""
        groups = self.data_parallel_size
        shared_by = self.num_processes // groups
        return replace(self, job=with_accumulation(self.job, data_parallel_size=groups, ranks_per_batch=shared_by))

    def differences(self, found: Manifest) -> dict[str, tuple[Any, Any]]:
        """Return what makes a checkpoint not fit, with the values then and now; empty where it is loaded as it is."""
        preset, here = self.preset, self.layout
        if found.sharded_at_load and preset.sharded_at_load:
            return {}
        holds = {True: "sharded at load", False: "sharded by its engine"}
        then, now = found.layout, None if here is None else here.degrees()
        values: dict[str, tuple[Any, Any]] = {
            "engine": (found.engine, preset.engine),
            "sharding": (found.sharding, preset.sharding),
            "world_size": (found.world_size, self.num_processes),
            "model": (holds[found.sharded_at_load], holds[preset.sharded_at_load]),
            "layout": (_degrees(then), _degrees(now)),
        }
        every_rank_loads_the_same = preset.traits.is_loaded_whole and _engine(found).is_loaded_whole
        if every_rank_loads_the_same:
            del values["engine"]
        if then == now and (every_rank_loads_the_same or _fits_any_world_size(found)):
            del values["world_size"]
        return {name: both for name, both in values.items() if both[0] != both[1]}


def _fits_any_world_size(found: Manifest) -> bool:
    """True where each rank finds its shard by itself: in DeepSpeed's universal layout, or in a distributed checkpoint
    of states that have one fp32 number per element of a parameter."""
    optimizer = OPTIMIZERS.get(found.optim or "")
    one_number_each = optimizer is not None and optimizer.is_fp32_adamw
    return _engine(found).fits_any_world_size(
        universal=found.universal, sharding=found.sharding, one_number_each=one_number_each
    )


def _engine(found: Manifest) -> Engine:
    """The engine that wrote a checkpoint; one that is not known loads shards."""
    return ENGINES.get(found.engine or "", ENGINES["fsdp2"])


def _degrees(degrees: Mapping[str, int] | None) -> str:
    return "data parallelism" if degrees is None else str(ParallelLayout(**degrees))


def check_same_layout(checkpoint: Checkpoint, run: TrainingRun) -> None:
    """Raise ToolkitError for a checkpoint whose shards do not fit the run."""
    found = _manifest(checkpoint)
    differing = [f"{name} {then}, not {now}" for name, (then, now) in run.differences(found).items()]
    if differing:
        raise ToolkitError(
            f"{checkpoint.path} was written with {'; '.join(differing)}: its shards do not fit this run",
            hint=f"resume with `--preset {found.preset}` and `--num-processes {found.world_size}`; or convert it:"
            " `toolkit checkpoint convert`",
        )


def check_resume_settings(checkpoint: Checkpoint, job: Job, *, global_batch_size: int, data_parallel_size: int) -> None:
    """Raise ToolkitError for a job that would not resume with the same data or optimizer, or has no steps left."""
    pipeline_chunks = None if job.pipeline is None else job.pipeline.chunks
    found = _manifest(checkpoint)
    # GPipe and 1F1B give each rank the same stages
    if None not in (found.pipeline_chunks, pipeline_chunks) and found.pipeline_chunks != pipeline_chunks:
        stages = found.pipeline_chunks
        same = DEFAULT_SCHEDULE if stages == 1 else f"{INTERLEAVED} --pipeline_chunks {stages}"
        raise ToolkitError(
            f"{checkpoint.path} has the optimizer states of {stages} stage{'s' * (stages != 1)} per GPU, not of"
            f" {pipeline_chunks}: each GPU would hold other layers",
            hint=f"`--pipeline_schedule {same}`, or start from its weights: `--model_name_or_path {checkpoint.path}`",
        )
    check_same_batch(checkpoint, global_batch_size)
    groups = found.data_parallel_size or found.world_size
    if job.order_of_ranks is not None and groups not in (None, data_parallel_size):
        raise ToolkitError(
            f"{checkpoint.path} was trained on {groups} data-parallel ranks, now it is {data_parallel_size}, and with"
            f" {job.order_of_ranks} the rows of a step depend on them: the data would not resume where they stopped",
            hint=f"resume on {groups}, or leave `{job.order_of_ranks}` out",
        )
    for name, then, now in (
        ("seed", found.seed, job.seed),
        ("streaming_buffer_size", found.streaming_buffer_size, job.shuffle_buffer_size),
        ("dataset_weights", found.dataset_weights, job.dataset_weights),
    ):
        if then not in (None, now):
            words, words_now = (" ".join(map(str, as_list(value))) or "none" for value in (then, now))
            flag, same = f"--{name}", f"--{name} {words}"
            if name == "streaming_buffer_size":
                flag, same = "--streaming", f"--streaming true {same}"
            raise ToolkitError(
                f"{checkpoint.path} was trained with --{name} {words}, now it is {words_now}: the data would not resume"
                " where they stopped",
                hint=f"leave `{flag}` out" if then in ((), 0) and name != "seed" else f"`{same}`",
            )
    if found.optim is not None and not same_states(found.optim, job.optim):
        raise ToolkitError(
            f"{checkpoint.path} has the states of --optim {found.optim}, with which --optim {job.optim} cannot"
            " continue",
            hint=f"`--optim {found.optim}`",
        )
    if 0 < job.max_steps <= checkpoint.step:
        raise ToolkitError(
            f"{checkpoint.path} has {checkpoint.step} steps already, --max_steps is {job.max_steps}",
            hint=f"`--max_steps {2 * checkpoint.step}`, or another number above {checkpoint.step}, continues; or write"
            f" its model: `toolkit checkpoint export {checkpoint.path} FOLDER`",
        )


def check_same_batch(checkpoint: Checkpoint, global_batch_size: int) -> None:
    """Raise ToolkitError for another number of sequences per step: the data resume at the same row only if it stays."""
    then = _manifest(checkpoint).sequences_per_step
    if then not in (None, global_batch_size):
        raise ToolkitError(
            f"{checkpoint.path} was trained with {then} sequences per step over all ranks, now it is"
            f" {global_batch_size}: the data would not resume where they stopped",
            hint=f"`--global_batch_size {then}`, without `--gradient_accumulation_steps`",
        )


def _manifest(checkpoint: Checkpoint) -> Manifest:
    assert checkpoint.manifest is not None, "only complete checkpoints are resumed"
    return checkpoint.manifest


# -- its conversion


def remove_converted(output_dir: Path) -> None:
    """Remove the converted copy that a run has loaded, if there is one."""
    shutil.rmtree(output_dir / RESUME_FOLDER, ignore_errors=True)


def checkpoint_to_resume(job: Job) -> Checkpoint | None:
    """Return the checkpoint to resume: as named, or the newest. Raises ToolkitError for an incomplete one."""
    if not job.resumes:
        return None
    named = str(job.resume_from_checkpoint)
    if named.lower() in LATEST_WORDS:
        return latest_complete(Path(str(job.output_dir)))
    return read_complete_checkpoint(Path(named))


def converts(checkpoint: Checkpoint, run: TrainingRun) -> bool:
    """Return True if a checkpoint's shards do not fit. Raises ToolkitError for another global batch size."""
    if checkpoint.manifest is None or not run.differences(checkpoint.manifest):
        return False
    check_same_batch(checkpoint, run.global_batch_size)
    return True


def convert_checkpoint(checkpoint: Checkpoint, run: TrainingRun, *, on_message: Callable[[str], None]) -> Path:
    """Convert a checkpoint in a child process with torch, and return the copy. Raises ToolkitError if it fails."""
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
    options += [f"--{name.replace('_', '-')}={degree}" for name, degree in run.job.degrees.items()]
    options += ["--trust-pickle"] if run.job.trust_pickle else []
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

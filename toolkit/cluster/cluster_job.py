"""One job for several nodes, checked as `toolkit train --dry-run` checks it before anything is written.

Every engine turns the same `ClusterJob` into its own file.
"""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.options import MAX_NAME, JobOptions
from toolkit.demo.assets import DEMO, DEMO_ARGUMENTS
from toolkit.errors import ToolkitError
from toolkit.files.paths import user_path
from toolkit.files.secrets import HIDDEN, hide_words
from toolkit.job.argument_reading import without_flags
from toolkit.job.argument_values import as_list
from toolkit.job.job import Job
from toolkit.launch import command
from toolkit.launch.preflight import check_arguments_of, check_output, check_required, check_run, device_of
from toolkit.launch.resume import TrainingRun
from toolkit.presets.compatibility import CPU, Device
from toolkit.presets.preset import load_preset, preset_names
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_supported
from toolkit.record.checkpoints import LATEST_WORDS
from toolkit.record.folder import WORLD_SIZE_VARIABLE, RunFolder
from toolkit.record.heartbeat import HANG_TIMEOUT_VARIABLE
from toolkit.record.run_files import RecordedRun, read_run

# Assumed where nothing was measured: 96 GB (8B parameters and Adam's states, in fp32) at 0.8 GB/s.
ASSUMED_SAVE_SECONDS = 120.0
MARGIN_SECONDS = 30  # ranks agree on the last step through a store, and close files and process groups after the save
# Connecting the ranks takes a minute on many nodes; compiling, in the first step, several.
MIN_HANG_MINUTES, MIN_COMPILED_HANG_MINUTES = 2, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTime:
    """How long a checkpoint takes, and how that is known."""

    seconds: float  # from the end of a step until the checkpoint is complete
    step_seconds: float = 0.0  # a signal waits for the step in progress; 0 where steps were not measured
    earlier_write_seconds: float = 0.0
    """With `--async_save`, a save first waits for the checkpoint before, whose writing may just have begun."""
    source: str

    @property
    def grace_seconds(self) -> int:
        """Seconds to wait for the ranks after SIGTERM: twice the step in progress and the save, and a margin."""
        return math.ceil(2 * (self.seconds + self.earlier_write_seconds + self.step_seconds)) + MARGIN_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A checked job: what every engine writes into its file."""

    options: JobOptions
    preset: PresetSpec
    name: str
    job: Job
    training_argv: tuple[str, ...]
    """Training arguments as they are written: they resume, and keep the global batch of an elastic run."""
    output_dir: Path
    save_time: SaveTime
    warnings: tuple[str, ...]

    @property
    def signal_seconds(self) -> int:
        """Seconds before the end at which an engine sends SIGTERM: the ranks' time, and torchrun's own end."""
        return self.save_time.grace_seconds + 30

    @property
    def hang_timeout_minutes(self) -> int:
        """Minutes without progress of any rank after which an elastic run restarts without a lost node."""
        lowest = MIN_COMPILED_HANG_MINUTES if self.job.torch_compile else MIN_HANG_MINUTES
        return max(lowest, math.ceil(self.save_time.grace_seconds / 60))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks with a value that is written into the job file; those of the user replace others."""
        found = {command.PRESET_VARIABLE: preset_word(self.preset)}
        found |= command.process_environment(cpu=self.options.cpu, run_id="")
        found.pop(command.RUN_ID_VARIABLE)  # an attempt is known by its rendezvous id
        if self.options.cpu:
            found["OMP_NUM_THREADS"] = "1"
        if not self.options.elastic:
            # The ranks refuse a smaller allocation before they load a model.
            found[WORLD_SIZE_VARIABLE] = str(self.options.world_sizes[-1])
        else:
            # Otherwise the head's store holds the old attempt's keys when a node joins.
            found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            found[HANG_TIMEOUT_VARIABLE] = str(self.hang_timeout_minutes)
        passed = self.options.passed_variables
        return {name: value for name, value in found.items() if name not in passed} | self.options.variables


def preset_word(preset: PresetSpec) -> str:
    """Return what `TOOLKIT_PRESET` names: a shipped preset by its name, any other by the path of its file."""
    return preset.name if preset.name in preset_names() else str(preset.accelerate_config_path)


def prepare_job(options: JobOptions, *, shares_files: bool) -> ClusterJob:
    """Check the job for each number of nodes, and the output folder if it `shares_files`. Raises ToolkitError."""
    if len(options.preset) > 1:
        raise ToolkitError(
            f"several presets ({', '.join(options.preset)}) are a comparison, which needs SLURM to start its trials",
            hint="`toolkit cluster slurm`, or one `--preset`",
        )
    preset, argv = load_preset(options.preset[0]), [*options.training_arguments]
    check_secrets(argv)
    if preset.uses_nvme and command.NVME_PATH_VARIABLE not in options.variables:
        hint = f"`--env {command.NVME_PATH_VARIABLE}=/path/on/each/node`"
        raise ToolkitError(f"preset {preset.name!r} offloads to a disk of each node, and none is named", hint=hint)
    job = Job.from_argv(argv)
    check_required(job, ("model_name_or_path", "dataset", "output_dir"))
    check_named_inputs(job)
    checkpoint = job.resume_from_checkpoint
    if checkpoint is None:
        argv += command.RESUME_LATEST
    elif checkpoint.lower() not in LATEST_WORDS:
        raise ToolkitError(
            f"--resume_from_checkpoint {checkpoint}: a job that is started again would begin there again",
            hint="leave it out: each attempt resumes from the newest checkpoint in --output_dir",
        )
    check_world_sizes(options, preset, job)
    argv, job = _with_global_batch(options, preset, argv, job)
    warnings = check_job_arguments(options, preset, argv)
    output_dir = user_path(str(job.output_dir))
    if options.check_files and shares_files:
        check_output(job, preset.traits)
    return ClusterJob(
        options=options,
        preset=preset,
        name=options.name or re.sub("[^a-z0-9]+", "-", preset.name.lower())[:MAX_NAME].strip("-") or "train",
        job=job,
        training_argv=tuple(argv),
        output_dir=output_dir,
        save_time=save_time(options, output_dir, async_save=job.async_save),
        warnings=warnings,
    )


def check_secrets(argv: Sequence[str]) -> None:
    """Raise ToolkitError for a training argument that nobody may read in a file."""
    for word, hidden in zip(argv, hide_words(argv), strict=True):
        if word != hidden:
            raise ToolkitError(
                f"a training argument is a secret, which would be written into the job file: {hidden}",
                hint=f"leave {HIDDEN} out, and pass it in the environment: `--env HF_TOKEN`",
            )


def check_named_inputs(job: Job) -> None:
    """Refuse `demo`, which `toolkit train` prepares on one node: the nodes need folders that all of them see."""
    for name in DEMO_ARGUMENTS[:2]:
        if getattr(job, name) in (DEMO, [DEMO]) and not Path(DEMO).exists():
            part = "--model" if name == "model_name_or_path" else "--data"
            hint = f'`--{name} "$(python -m toolkit.demo {part})"`, if the nodes see this home folder'
            raise ToolkitError(f"--{name} {DEMO}: prepared on one node, which the others do not have", hint=hint)


def check_world_sizes(options: JobOptions, preset: PresetSpec, job: Job) -> None:
    """Raise ToolkitError for a number of ranks with which the preset cannot train."""
    device = CPU if options.cpu else Device()
    for world_size in options.world_sizes:
        check_supported(preset, job, world_size=world_size, device=device, purpose="cluster")


def _with_global_batch(options: JobOptions, preset: PresetSpec, argv: list[str], job: Job) -> tuple[list[str], Job]:
    if not options.elastic:
        return argv, job
    if job.global_batch_size is None:
        largest = options.world_sizes[-1]
        batch = TrainingRun(preset=preset, job=job, num_processes=largest).global_batch_size
        argv = [*without_flags(argv, ["gradient_accumulation_steps"]), "--global_batch_size", str(batch)]
        job = Job.from_argv(argv)
    for world_size in options.world_sizes:
        TrainingRun(preset=preset, job=job, num_processes=world_size).accumulated()
    return argv, job


def check_job_arguments(options: JobOptions, preset: PresetSpec, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings of `toolkit train`'s checks on the most nodes; the GPUs need not be here."""
    largest, job = options.world_sizes[-1], Job.from_argv(argv)
    run = TrainingRun(
        preset=preset,
        job=job,
        num_processes=largest,
        device=device_of(on_cpu=options.cpu, gpus=largest),
        nodes=options.max_nodes,
        is_here=options.check_files and options.cpu and options.max_nodes == 1,
        starts=False,
    )
    if not options.check_files:
        return tuple(check_arguments_of(run))
    try:
        return check_run(run).warnings
    except ToolkitError as error:
        named = [str(each) for name in DEMO_ARGUMENTS[:3] for each in as_list(job.value(name))]
        if any(each in error.message and not Path(each).exists() for each in named):
            error.hint = "; ".join(filter(None, (error.hint, "`--no-check-files` if only the nodes have it")))
        raise


# -- the time of a save


def save_time(options: JobOptions, output_dir: Path, *, async_save: bool) -> SaveTime:
    """Return the time of a save: given, the slowest in run.json, or assumed. Raises ToolkitError without `saves`."""
    seconds, source = options.save_seconds, "--save-seconds"
    if seconds is None:
        path = options.saves_of or output_dir
        run = RecordedRun()
        with contextlib.suppress(ToolkitError):  # a damaged run.json has measured nothing
            run = read_run(RunFolder(path))
        saves = [save for save in run.saves or () if save.seconds]
        if saves:
            writes = (save.write_seconds or save.seconds or 0.0 for save in saves)
            return SaveTime(
                seconds=max(save.seconds_after_step for save in saves),
                step_seconds=(run.measured and run.measured.step_seconds_median) or 0.0,
                earlier_write_seconds=max(writes) if async_save else 0.0,
                source=f"the slowest of {len(saves)} in {path}",
            )
        if options.saves_of is not None:
            raise ToolkitError(
                f"--saves-of {options.saves_of} has no measured save: no run.json with `saves`",
                hint="name the folder of a completed run that saved checkpoints, or give `--save-seconds 60`",
            )
        seconds, source = ASSUMED_SAVE_SECONDS, "assumed; `--saves-of RUN` measures it"
    return SaveTime(seconds=seconds, earlier_write_seconds=seconds if async_save else 0.0, source=source)

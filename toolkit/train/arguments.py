"""How this rank was launched, and its arguments: argv, read once into a job, and `TrainingArguments` made of it.

`toolkit train` passes preset and world size in the environment. Under a plain `accelerate launch --config_file F` they
are read from the launcher's own command line, among this process's parents. Under torchrun alone the user names the
preset, and each rank gives itself what `accelerate launch` would: after an elastic restart for another world size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
from accelerate.commands.launch import launch_command_parser
from transformers import TrainingArguments
from transformers.utils import logging

from toolkit.engines import fsdp2, zero_process
from toolkit.engines.compiled_ops import check_extensions_folder
from toolkit.engines.fsdp2 import uses_fsdp
from toolkit.engines.tensors import compute_dtype
from toolkit.engines.zero import NVME_VARIABLES
from toolkit.errors import ToolkitError
from toolkit.files.paths import is_file, user_path
from toolkit.files.secrets import UnwrittenText, hide_secrets, hide_words, is_secret_name, restore_secrets
from toolkit.job.accumulation import SHARDED, with_accumulate
from toolkit.job.global_batch import WARMUP_SHARE, ScaledRate, global_batch_size, scaled_rate, with_accumulation
from toolkit.job.job import Job
from toolkit.launch import command
from toolkit.launch.nvme import swap_folder
from toolkit.models.attention import needs_no_mask
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, MUON
from toolkit.observe.progress import Progress
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import PipelineSettings
from toolkit.presets import training_arguments
from toolkit.presets.preset import load_preset, read_preset
from toolkit.presets.spec import PresetSpec, default_accumulate
from toolkit.presets.support import check_arguments
from toolkit.record.folder import PREPARED_VARIABLE, WORLD_SIZE_VARIABLE
from toolkit.train.model.loading import choose_attention

ACCELERATE_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # `accelerate launch` sets it for every preset


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """The preset and sizes that the live objects are verified against; None where the launcher gives none."""

    preset: PresetSpec | None
    world_size: int | None
    dp_shard_size: int | None = None  # ranks that share one copy of the model in a hybrid mesh
    folder_prepared: bool = False  # true if the launcher has locked and cleared the run folder

    @classmethod
    def from_env(cls) -> LaunchContext:
        """Read it from the environment, or from the command line of the `accelerate launch` above this process.

        Completes the environment: by the preset's under torchrun alone, and by its settings of DeepSpeed. Raises
        ToolkitError for several nodes without a preset, a preset without its launcher, and other ranks than asked for.
        """
        started_by_torchrun = ACCELERATE_VARIABLE not in os.environ
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        if command.PRESET_VARIABLE in os.environ:
            preset, started = load_preset(os.environ[command.PRESET_VARIABLE]), os.environ.get("WORLD_SIZE")
            requested = os.environ.get(WORLD_SIZE_VARIABLE)
            if requested and started and requested != started:
                raise ToolkitError(
                    f"the job asked for {requested} ranks ({WORLD_SIZE_VARIABLE}), and {started} were started:"
                    f" {os.environ.get('LOCAL_WORLD_SIZE', '1')} on each of {nodes} node{'s' * (nodes != '1')}",
                    hint=f"ask for {requested} GPUs, and start torchrun on every node;"
                    f" or change `{WORLD_SIZE_VARIABLE}`",
                )
            if started_by_torchrun and started is None and preset.traits.needs_launcher:
                what = f"{command.PRESET_VARIABLE}={preset.name} needs a launcher, and this process has none"
                raise ToolkitError(what, hint=f"`toolkit train --preset {preset.name} -- ...`, or `torchrun` in front")
            if started_by_torchrun:
                os.environ.update(command.strategy_environment(preset, world_size=int(started or 1)))
            context = cls.of_preset(preset, int(requested or started or 0) or None)
        elif started_by_torchrun and nodes != "1":
            raise ToolkitError(
                f"{command.PRESET_VARIABLE} is not set, and torchrun has started this job on {nodes} nodes:"
                " no rank knows how to shard the model",
                hint=f"on every node: `export {command.PRESET_VARIABLE}=zero2`; `toolkit presets` lists the presets",
            )
        else:
            context = _from_parent_processes()
        if context.preset is not None and context.preset.settings_argument is not None:
            variable = context.preset.traits.settings_variable
            if not is_file(Path(os.environ.get(variable, ""))):
                os.environ[variable] = context.preset.settings_argument
        return replace(context, folder_prepared=PREPARED_VARIABLE in os.environ)

    @classmethod
    def of_preset(cls, preset: PresetSpec, world_size: int | None) -> LaunchContext:
        """Return the context of a run under a preset, its hybrid mesh divided as the preset says."""
        shard_size = preset.dp_shard_size(world_size) if world_size else None
        return cls(preset=preset, world_size=world_size, dp_shard_size=shard_size)


def _from_parent_processes() -> LaunchContext:
    for parent in psutil.Process().parents():
        try:
            argv, folder = parent.cmdline(), Path(parent.cwd())
        except psutil.Error:
            continue
        if (options := accelerate_launch_arguments(argv)) is not None:
            return context_of_command(options, folder)
    return LaunchContext(preset=None, world_size=None)


def accelerate_launch_arguments(argv: list[str]) -> list[str] | None:
    """Return what follows accelerate's launcher in an argv; None where the argv is another program's."""
    for position, word in enumerate(argv[:4]):
        name = Path(word).name
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return argv[position + 1 :]
        if name == "accelerate" and argv[position + 1 : position + 2] == ["launch"]:
            return argv[position + 2 :]
    return None


def context_of_command(options: list[str], folder: Path) -> LaunchContext:
    """Read the options of an `accelerate launch` that was started in `folder`; its flags override its file."""
    parser = launch_command_parser()
    parser.set_defaults(parallelism_config_dp_shard_size=None)  # 1 otherwise
    given = parser.parse_args(options)
    if given.config_file is None:
        return LaunchContext(preset=None, world_size=given.num_processes)
    preset = read_preset(folder / given.config_file)
    return LaunchContext(
        preset=preset,
        world_size=given.num_processes or preset.accelerate_config().get("num_processes"),
        dp_shard_size=given.parallelism_config_dp_shard_size,
    )


def set_up_libraries(progress: Progress) -> None:
    """Set what accelerate and DeepSpeed read before the arguments are parsed, and switch progress bars off."""
    check_extensions_folder()
    datasets.disable_progress_bars()  # a log file holds lines
    logging.disable_progress_bar()
    fsdp2.enable_fsdp_on_cpu()
    # As DeepSpeed's own launcher does: otherwise it runs `numactl` each time that it counts the devices of a CPU node.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    candidates = [os.environ.get(name) for name in (command.NVME_PATH_VARIABLE, *NVME_VARIABLES.values())]
    if (disk := next(filter(None, candidates), None)) is not None:
        # The ranks of a node agree on the run's own folder: they share the launcher's id, or the launcher itself.
        run_id = os.environ.get(command.RUN_ID_VARIABLE) or f"pid{os.getppid()}"
        progress.swap_folder = swap_folder(user_path(disk).absolute(), run_id)
        os.environ.update(dict.fromkeys(NVME_VARIABLES.values(), str(progress.swap_folder)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments in effect, with what the preset and the node decide filled in."""

    job: Job
    training: TrainingArguments
    argv: Sequence[str]  # the training arguments as they were given, with `***` for each secret
    scaled_rate: ScaledRate | None = None  # scaled with the global batch size; None where `--lr_scaling` is off
    layout: ParallelLayout | None = None  # how the ranks are divided; None for data parallelism alone
    notes: list[str] = field(default_factory=list)  # warnings and explanations for the log

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that train on different rows."""
        return int(self.training.world_size) if self.layout is None else self.layout.data_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Sequences of an optimizer step."""
        return global_batch_size(self.job, self.data_parallel_size)

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The stages and their schedule; None without a pipeline."""
        return None if self.layout is None or self.layout.pp == 1 else self.job.pipeline


def parse_args(argv: Sequence[str], launch: LaunchContext) -> Arguments:
    """Read the training script's arguments and set the environment that accelerate reads.

    Raises ToolkitError for an unknown or missing argument, and for a value that transformers refuses.
    """
    argv = restore_secrets(argv)
    job = Job.from_argv(argv)
    for name in ("model_name_or_path", "dataset", "output_dir"):
        if not job.value(name):
            raise ToolkitError(f"--{name} is missing", hint=f"add `--{name} ...`, or `{name}: ...` in a YAML file")
    if not torch.cuda.is_available():
        # With ACCELERATE_USE_CPU, accelerate turns a DeepSpeed run into DDP.
        os.environ["ACCELERATE_USE_CPU"] = "false" if zero_process.is_launched() else "true"
    on_cpu = job.use_cpu or not torch.cuda.is_available()
    warnings = check_arguments(job, launch.preset, num_processes=launch.world_size, on_cpu=on_cpu, purpose="launched")
    if job.async_save and launch.preset is None and not uses_fsdp():
        what = "--async_save needs a preset whose ranks write their own shards, and this launch names no preset"
        raise ToolkitError(what, hint=f"leave it out, or `export {command.PRESET_VARIABLE}=fsdp2`")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = None if launch.preset is None else launch.preset.layout(world_size, job.degrees)
    groups, ranks_per_batch = (world_size, 1) if layout is None else (layout.data_parallel_size, layout.ranks_per_batch)
    job = with_accumulation(job, data_parallel_size=groups, ranks_per_batch=ranks_per_batch)
    job, values = _resolved(job, launch, layout, on_cpu=on_cpu)
    rate, reference = None, job.lr_reference_batch_size
    if job.lr_scaling is not None and reference is not None:
        batch = {"global_batch_size": global_batch_size(job, groups), "reference_batch_size": reference}
        rate = scaled_rate(job.learning_rate, rule=job.lr_scaling, **batch)
        values["learning_rate"] = rate.learning_rate
        if rate.learning_rate > rate.base_learning_rate and "warmup_steps" not in job.given:
            values["warmup_steps"] = WARMUP_SHARE
    training = _training_arguments(job.trainer_values | values)
    if zero_process.is_used(training):
        zero_process.import_muon_uncompiled()
    if launch.preset is not None and not launch.preset.traits.needs_launcher:
        training._n_gpu = min(training._n_gpu, 1)  # with several visible GPUs the Trainer would run DataParallel
    attention = choose_attention(job, compute_dtype=compute_dtype(training), on_cpu=bool(training.use_cpu))
    notes = [f"warning: {line}" for line in warnings]
    if rate is not None:
        warmup = training.warmup_steps
        steps = f"{warmup:.0%} of the" if warmup < 1 else f"{warmup:.0f}"
        explained = f"after a warm-up of {steps} steps (`--warmup_steps` changes it)" if warmup else "without warm-up"
        notes.append(f"{rate.sentence}, {explained}")
    if job.packing:  # the user may not have chosen it
        mask = "no mask" if needs_no_mask(attention) else "a mask of all pairs of positions"
        notes.append(f"packed rows: attention {attention or 'as the model defines it'}, {mask}")
    return Arguments(
        job=replace(job, attn_implementation=attention),
        training=training,
        argv=hide_words(argv),
        scaled_rate=rate,
        layout=layout,
        notes=notes,
    )


def _resolved(
    job: Job, launch: LaunchContext, layout: ParallelLayout | None, *, on_cpu: bool
) -> tuple[Job, dict[str, Any]]:
    """Put the libraries right for the preset, and return the job with its choices, and `TrainingArguments` of them."""
    preset = launch.preset
    specified = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if preset is None else preset.mixed_precision
    given: dict[str, Any] = {name: job.value(name) for name in ("bf16", "fp16") if name in job.given}
    precision = training_arguments.resolve_precision(given, specified, on_cpu=on_cpu)
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    values: dict[str, Any] = {"use_cpu": on_cpu, "bf16": precision == "bf16", "fp16": precision == "fp16"}
    values["remove_unused_columns"] = False  # the collator reads columns that no model takes
    # The step timer prints lines, which a log file can hold; the Trainer's default for DDP walks the graph every step.
    values |= {n: v for n, v in (("disable_tqdm", True), ("ddp_find_unused_parameters", False)) if n not in job.given}
    chosen = job.chosen_accumulate
    if uses_fsdp() or (preset is not None and preset.sharded_at_load):
        chosen = chosen or SHARDED
        values["accelerator_config"] = with_accumulate(job.accelerator_config or {}, chosen)
    elif preset is not None:
        chosen = chosen or default_accumulate(preset)
    job = replace(job, accumulate=chosen)
    if layout is not None and preset is not None:
        if layout.splits_head and job.loss == "auto":
            job = replace(job, loss="full")
        attention = job.attn_implementation or training_arguments.SDPA
        if parallelism := training_arguments.parallelism_arguments(preset, layout, on_cpu=on_cpu, attention=attention):
            values, job = values | parallelism, replace(job, attn_implementation=attention)
    offload = job.activation_checkpointing_offload  # one switch means the same under every engine
    if job.uses_activation_checkpointing and preset is not None and preset.traits.uses_fsdp_plugin:
        # accelerate's plugin reads these; the Trainer's own would gather each layer's weights once more in backward
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
        os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = str(offload).lower()
        values |= {"activation_checkpointing": False, "gradient_checkpointing": None}
    elif job.uses_activation_checkpointing and offload:
        values["activation_checkpointing_kwargs"] = {"use_reentrant": False, "offload": True}
    return job, values


def _training_arguments(values: dict[str, Any]) -> TrainingArguments:
    uses_muon = values.get("optim") == MUON  # transformers takes its own names only
    try:
        training = TrainingArguments(**values | ({"optim": DEFAULT_OPTIMIZER} if uses_muon else {}))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ToolkitError(" ".join(str(error).split())) from None
    if uses_muon:
        training.optim = MUON
    for name, value in list(vars(training).items()):
        if isinstance(value, str) and (is_secret_name(name) or hide_secrets(value) != value):
            setattr(training, name, UnwrittenText(value))
    # the decoder layers are compiled one by one (`engine.layers`); the Trainer would compile the model
    training.torch_compile, training.torch_compile_backend, training.torch_compile_mode = False, None, None
    return training

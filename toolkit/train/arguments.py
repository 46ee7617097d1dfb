"""The arguments of one rank: argv, read once into a job, and `TrainingArguments` made of it.

accelerate launch ... -m toolkit.train config.yaml --max_steps 8
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import TrainingArguments

from toolkit.errors import ToolkitError
from toolkit.files.secrets import UnwrittenText, hide_secrets, hide_words, is_secret_name, restore_secrets
from toolkit.job.accumulation import SHARDED, with_accumulate
from toolkit.job.global_batch import WARMUP_SHARE, ScaledRate, global_batch_size, scaled_rate, with_accumulation
from toolkit.job.job import Job
from toolkit.models.attention import needs_no_mask
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, MUON
from toolkit.observe.attest.tensors import compute_dtype
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import PipelineSettings
from toolkit.presets.preset_checks import check_arguments
from toolkit.presets.spec import default_accumulate
from toolkit.presets.training_arguments import SDPA, parallelism_arguments, resolve_precision, uses_fsdp
from toolkit.train.launch_context import LaunchContext
from toolkit.train.model.loading import choose_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments in effect, with what the preset and the node decide filled in."""

    job: Job
    training: TrainingArguments
    argv: Sequence[str]
    """The training arguments as they were given, with `***` for each secret."""
    scaled_rate: ScaledRate | None = None
    """The learning rate scaled with the global batch size; None where `--lr_scaling` is off."""
    layout: ParallelLayout | None = None
    """How the ranks are divided; None for data parallelism alone."""
    notes: list[str] = field(default_factory=list)
    """Warnings and explanations for the log."""

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
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        os.environ["ACCELERATE_USE_CPU"] = "false" if deepspeed else "true"
    on_cpu = job.use_cpu or not torch.cuda.is_available()
    warnings = check_arguments(job, launch.preset, num_processes=launch.world_size, on_cpu=on_cpu, purpose="launched")
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
    if launch.preset is not None and launch.preset.engine == "none":
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
    precision = resolve_precision(given, specified, on_cpu=on_cpu)
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
        if layout.ranks_per_batch > 1 and job.loss == "auto":
            job = replace(job, loss="full")  # the head is split, or sees a part of each sequence, or of the layers
        attention = job.attn_implementation or SDPA
        if parallelism := parallelism_arguments(preset, layout, on_cpu=on_cpu, attention=attention):
            values, job = values | parallelism, replace(job, attn_implementation=attention)
    # One switch means the same under every engine.
    offload = job.activation_checkpointing_offload
    if job.uses_activation_checkpointing and preset is not None and preset.uses_fsdp_plugin:
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
    # the decoder layers are compiled one by one (`engine.compiled_layers`); the Trainer would compile the model
    training.torch_compile, training.torch_compile_backend, training.torch_compile_mode = False, None, None
    return training

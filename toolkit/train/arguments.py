"""Flags, a YAML file, or both, parsed into the three dataclasses of the training script.

accelerate launch ... -m toolkit.train config.yaml --max_steps 8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import HfArgumentParser, TrainingArguments

from toolkit.errors import ToolkitError
from toolkit.files.secrets import UnwrittenText, hide_secrets, hide_words, is_secret_name, restore_secrets
from toolkit.job.argument_aliases import canonical_flags
from toolkit.job.argument_checks import check_arguments
from toolkit.job.compilation import Compilation
from toolkit.job.global_batch import order_of_ranks, with_accumulation
from toolkit.job.learning_rate import WARMUP_SHARE, ScaledRate, scaled_rate
from toolkit.job.script_arguments import (
    DataArguments,
    ModelArguments,
    accumulate_argument,
    argument_words,
    degrees_given,
    expand_paths,
    flag,
    has_config_file,
    read_arguments,
    read_config_file,
    uses_activation_checkpointing,
)
from toolkit.job.trainer_arguments import json_object
from toolkit.models.attention import needs_no_mask
from toolkit.observe.attest.tensors import compute_dtype
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import PipelineSettings
from toolkit.presets.accumulation import SHARDED, default_accumulate, with_accumulate
from toolkit.presets.optimizers import DEFAULT_OPTIMIZER, MUON
from toolkit.presets.training_arguments import SDPA, parallelism_arguments, resolve_precision, uses_fsdp
from toolkit.train.launch_context import LaunchContext
from toolkit.train.model.loading import choose_attention

REQUIRED = ("model_name_or_path", "dataset", "output_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments in effect, with what the preset and the node decide filled in."""

    model: ModelArguments
    data: DataArguments
    training: TrainingArguments
    argv: Sequence[str]
    """The training arguments as they were given, with `***` for each secret."""
    scaled_rate: ScaledRate | None = None
    """The learning rate scaled with the global batch size; None where `--lr_scaling` is off."""
    activation_checkpointing: bool = False
    """Switched on by the user, whichever library carries it out: under FSDP2 `training` does not have it."""
    layout: ParallelLayout | None = None
    """How the ranks are divided; None for data parallelism alone."""
    compilation: Compilation | None = None
    """The decoder layers are compiled so; `training` does not have it, since the Trainer would compile the model."""
    order_of_ranks: str | None = None
    """The argument by which the rows of a step depend on the number of ranks; None where they do not."""
    notes: list[str] = field(default_factory=list)
    """Warnings and explanations for the log."""

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that train on different rows."""
        return int(self.training.world_size) if self.layout is None else self.layout.data_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Sequences of an optimizer step."""
        training = self.training
        per_rank = int(training.per_device_train_batch_size) * int(training.gradient_accumulation_steps)
        return per_rank * self.data_parallel_size

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The stages and their schedule; None without a pipeline."""
        if self.layout is None or self.layout.pp == 1:
            return None
        model = self.model
        return PipelineSettings.of(ranks=self.layout.pp, schedule=model.pipeline_schedule, chunks=model.pipeline_chunks)


class _Parser(HfArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise ToolkitError(message, hint="see `python -m toolkit.train --help`")


def parse_args(argv: Sequence[str], launch: LaunchContext) -> Arguments:
    """Parse the training script's arguments and set the environment that accelerate reads.

    Raises ToolkitError for an unknown or missing argument, and for a value that transformers refuses.
    """
    argv = restore_secrets(argv)
    given = read_arguments(argv) if "--help" not in argv else {}
    values = expand_paths(vars(_parse_flags(list(argv))))
    for name in REQUIRED:
        if given.get(name) is None:
            raise ToolkitError(f"--{name} is missing", hint=f"add `--{name} ...`, or `{name}: ...` in a YAML file")
    values |= _device_and_precision(given, launch) | _defaults_unless_given(given)
    warnings = check_arguments(
        given,
        launch.preset,
        num_processes=launch.world_size,
        on_cpu=bool(values.get("use_cpu")),
        purpose="launched",
    )
    layout = _layout(given, launch)
    values |= _accumulation_steps(given, layout)
    values |= _accumulation(given, launch) | _parallelism(values, launch, layout)
    rate, checkpointing = _scaled_learning_rate(values, layout), uses_activation_checkpointing(values)
    if checkpointing:
        values |= _activation_checkpointing(launch, offload=bool(values["activation_checkpointing_offload"]))
    if rate is not None:
        values |= _rate_and_warmup(rate, given)
    uses_muon = values["optim"] == MUON  # transformers takes its own names only
    try:
        model, data, training = _parser().parse_dict(values | ({"optim": DEFAULT_OPTIMIZER} if uses_muon else {}))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ToolkitError(" ".join(str(error).split())) from None
    if uses_muon:
        training.optim = MUON
    for name, value in list(vars(training).items()):
        if isinstance(value, str) and (is_secret_name(name) or hide_secrets(value) != value):
            setattr(training, name, UnwrittenText(value))
    if launch.preset is not None and launch.preset.engine == "none":
        training._n_gpu = min(training._n_gpu, 1)  # with several visible GPUs the Trainer would run DataParallel
    model.attn_implementation = choose_attention(
        model,
        packing=data.packing,
        compute_dtype=compute_dtype(training),
        on_cpu=bool(training.use_cpu),
    )
    training.torch_compile, training.torch_compile_backend, training.torch_compile_mode = False, None, None
    return Arguments(
        model=model,
        data=data,
        training=training,
        argv=hide_words(argv),
        scaled_rate=rate,
        activation_checkpointing=checkpointing,
        layout=layout,
        compilation=Compilation.of(given),
        order_of_ranks=order_of_ranks(given),
        notes=[
            *(f"warning: {line}" for line in warnings),
            *_rate_lines(rate, training),
            *_attention_lines(model, packing=data.packing),
        ],
    )


def _attention_lines(model: ModelArguments, *, packing: bool) -> list[str]:
    """Name the attention function of packed rows, which the user may not have chosen."""
    if not packing:
        return []
    name = model.attn_implementation
    mask = "no mask" if needs_no_mask(name) else "a mask of all pairs of positions"
    return [f"packed rows: attention {name or 'as the model defines it'}, {mask}"]


def _parser() -> _Parser:
    parser = _Parser((ModelArguments, DataArguments, TrainingArguments), prog="python -m toolkit.train")
    optim = next(action for action in parser._actions if action.dest == "optim")
    optim.choices, optim.type = argument_words()["optim"], str
    return parser


def _parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    if has_config_file(argv):
        parser.set_defaults(**read_config_file(Path(argv.pop(0))))
    namespace: argparse.Namespace = parser.parse_args(canonical_flags(argv))
    return namespace


def _device_and_precision(given: dict[str, Any], launch: LaunchContext) -> dict[str, Any]:
    """Choose the CPU where there is no GPU; the preset's precision on a GPU and fp32 on a CPU, unless given."""
    values: dict[str, Any] = {}
    if not torch.cuda.is_available():
        values["use_cpu"] = True
        # With ACCELERATE_USE_CPU, accelerate turns a DeepSpeed run into DDP.
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        os.environ["ACCELERATE_USE_CPU"] = "false" if deepspeed else "true"
    on_cpu = bool(values.get("use_cpu") or given.get("use_cpu"))
    specified = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # by the launcher
    if launch.preset is not None:
        specified = launch.preset.mixed_precision
    flags: dict[str, Any] = {name: flag(given[name]) for name in ("bf16", "fp16") if name in given}
    precision = resolve_precision(flags, specified, on_cpu=on_cpu)
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    return values | {"bf16": precision == "bf16", "fp16": precision == "fp16"}


def _defaults_unless_given(given: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "disable_tqdm": True,  # the step timer prints lines, which a log file can hold
        "ddp_find_unused_parameters": False,  # the Trainer's default walks the graph once more every step
    }
    # The collator reads columns that no model takes.
    return {"remove_unused_columns": False} | {n: value for n, value in defaults.items() if n not in given}


def _accumulation(given: dict[str, Any], launch: LaunchContext) -> dict[str, Any]:
    """Return how gradients wait for the last accumulation step, and under FSDP the setting that the Trainer reads."""
    chosen, preset = accumulate_argument(given), launch.preset
    if uses_fsdp() or (preset is not None and preset.sharded_at_load):
        accumulate = chosen or SHARDED
        configured = json_object(given, "accelerator_config")
        return {"accumulate": accumulate, "accelerator_config": with_accumulate(configured, accumulate)}
    return {"accumulate": chosen if chosen is not None or preset is None else default_accumulate(preset)}


def _accumulation_steps(given: dict[str, Any], layout: ParallelLayout | None) -> dict[str, Any]:
    """Return the accumulation steps that follow from `--global_batch_size` and the number of ranks."""
    ranks_per_batch = 1 if layout is None else layout.ranks_per_batch
    kept = with_accumulation(given, data_parallel_size=_groups(layout), ranks_per_batch=ranks_per_batch)
    return {name: value for name, value in kept.items() if name not in given or value != given[name]}


def _groups(layout: ParallelLayout | None) -> int:
    """Return how many ranks, or groups of ranks, train on different rows."""
    return int(os.environ.get("WORLD_SIZE", "1")) if layout is None else layout.data_parallel_size


def _layout(given: dict[str, Any], launch: LaunchContext) -> ParallelLayout | None:
    if launch.preset is None:
        return None
    return launch.preset.layout(int(os.environ.get("WORLD_SIZE", "1")), degrees_given(given))


def _parallelism(values: dict[str, Any], launch: LaunchContext, layout: ParallelLayout | None) -> dict[str, Any]:
    """Put the libraries right for a layout, and return the arguments that it determines."""
    if layout is None or launch.preset is None:
        return {}
    on_cpu = bool(values.get("use_cpu"))
    splits_head = layout.ranks_per_batch > 1  # or each sequence, of which the head then sees a part; or the layers
    loss = {"loss": "full"} if splits_head and values["loss"] == "auto" else {}
    attention = values["attn_implementation"] or SDPA
    arguments = parallelism_arguments(launch.preset, layout, on_cpu=on_cpu, attention=attention)
    return {**loss, **arguments, **({"attn_implementation": attention} if arguments else {})}


def _activation_checkpointing(launch: LaunchContext, *, offload: bool) -> dict[str, Any]:
    """Return the Trainer's arguments that make one switch mean the same under every engine."""
    if launch.preset is not None and launch.preset.uses_fsdp_plugin:
        # accelerate's plugin reads these; the Trainer's own would gather each layer's weights once more in backward
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
        os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = str(offload).lower()
        return {"activation_checkpointing": False, "gradient_checkpointing": None}
    return {"activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True}} if offload else {}


def _scaled_learning_rate(values: dict[str, Any], layout: ParallelLayout | None) -> ScaledRate | None:
    if values["lr_scaling"] is None:
        return None
    sequences_per_rank = int(values["per_device_train_batch_size"]) * int(values["gradient_accumulation_steps"])
    return scaled_rate(
        float(values["learning_rate"]),
        rule=values["lr_scaling"],
        global_batch_size=sequences_per_rank * _groups(layout),
        reference_batch_size=int(values["lr_reference_batch_size"]),
    )


def _rate_and_warmup(rate: ScaledRate, given: dict[str, Any]) -> dict[str, Any]:
    """Warm up to a rate that is higher than the base, unless the user gives the warm-up."""
    warms_up = rate.learning_rate > rate.base_learning_rate and "warmup_steps" not in given
    return {"learning_rate": rate.learning_rate} | ({"warmup_steps": WARMUP_SHARE} if warms_up else {})


def _rate_lines(rate: ScaledRate | None, training: TrainingArguments) -> list[str]:
    if rate is None:
        return []
    if not training.warmup_steps:
        return [f"{rate.sentence}, without warm-up"]
    warmup = f"{training.warmup_steps:.0%} of the" if training.warmup_steps < 1 else f"{training.warmup_steps:.0f}"
    return [f"{rate.sentence}, after a warm-up of {warmup} steps (`--warmup_steps` changes it)"]

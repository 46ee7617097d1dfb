"""Checks of the training arguments against each other, the preset and the installed packages. No torch.

    warnings = check_arguments(arguments, preset, num_processes=2, on_cpu=True)

`toolkit train` checks before the launch, and the training script checks again, so that a plain `accelerate launch`
gives the same errors. Which preset supports which method is decided by `toolkit.presets.support`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.secrets import refuse_hidden
from toolkit.files.value_limits import shown
from toolkit.job.argument_values import check_ranges, check_words
from toolkit.job.compilation import check_compilation, missing_compiler
from toolkit.job.dataset_checks import check_evaluation, check_streaming, check_weights, streaming_warnings
from toolkit.job.global_batch import check_global_batch
from toolkit.job.learning_rate import check_scaling
from toolkit.job.lora_config import lora_fields
from toolkit.job.model_arguments import check_attention
from toolkit.job.script_arguments import (
    accumulation_steps,
    argument_words,
    flag,
    is_given,
    read_method,
    uses_activation_checkpointing,
)
from toolkit.job.trainer_arguments import check_trainer_arguments
from toolkit.models.attention import missing_attention_package
from toolkit.presets.compatibility import CPU, Device, Method, Purpose
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_degrees_given, check_supported
from toolkit.presets.training_arguments import STRATEGY_ARGUMENTS
from toolkit.versions import INSTALL_GPU_PACKAGES, is_importable, optimizer_module, tracker_names

Arguments = dict[str, Any]
# Training arguments that a comparison sets, the same for every trial, and the options that stand for them.
ARGUMENTS_OF_COMPARISON = {
    "output_dir": "--output-dir",
    "save_model": None,
    "save_strategy": None,
    "untimed_steps": "--untimed-steps",
    "resume_from_checkpoint": "--resume",
    "stop_when_steps_within": "--target-interval",
    "stop_after_minutes": "--trial-minutes",
}

# `allreduce` compresses nothing: it counts the bytes of plain DDP, for comparison with the others.
COMM_HOOKS = ("allreduce", "bf16", "fp16", "power_sgd", "int8", "top_k")
# option -> the hook that reads it
COMM_HOOK_OPTIONS = {
    "ddp_comm_hook_top_k_fraction": "top_k",
    "ddp_comm_hook_power_sgd_rank": "power_sgd",
    "ddp_comm_hook_power_sgd_start": "power_sgd",
}
# tracker -> a module that its callback needs, and the package that installs it
TRACKER_MODULES = {
    "azure_ml": ("azureml", "azureml-sdk"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "dagshub": ("dagshub", "dagshub"),
    "flyte": ("flytekit", "flytekit"),
}
DDP_ARGUMENTS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
# argument -> the argument without which it has no effect
PREREQUISITES = {
    "lora_alpha": "lora_r",
    "lora_dropout": "lora_r",
    "lora_target_modules": "lora_r",
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "eval_dataset_config": "eval_dataset",
    "liger_kernel_config": "use_liger_kernel",
    **dict.fromkeys(COMM_HOOK_OPTIONS, "ddp_comm_hook"),
}


def check_arguments(
    arguments: Arguments,
    preset: PresetSpec | None,
    *,
    num_processes: int | None,
    on_cpu: bool,
    purpose: Purpose = "train",
    here: bool = True,
) -> list[str]:
    """Check training arguments, and return one warning for each that has no effect.

    `preset` and `num_processes` are None where a plain launch does not give them. With `here` false, the job runs on
    another node, and a package that is missing on this one is a warning.

    Raises ToolkitError for what does not work: a value, a combination, or a method that the preset does not support.
    """
    refuse_hidden(arguments)
    check_values(arguments, on_cpu=on_cpu)
    if arguments.get("profile_steps") is not None:
        profiled_steps(str(arguments["profile_steps"]))
    if preset is not None:
        _check_strategy_arguments(arguments, preset)
        check_degrees_given(preset, [name for name in preset.degrees if is_given(arguments, name)])
    _check_lora_config(arguments)
    _check_comm_hook(arguments)
    device = CPU if on_cpu else Device()
    method = read_method(arguments)
    check_supported(preset, method, world_size=num_processes, device=device, purpose=purpose)
    _check_best_of_sharded(arguments, preset)
    missing = _missing_packages(arguments, method, on_cpu=on_cpu)
    if missing and here:
        raise missing[0]
    check_trackers(arguments.get("report_to"))
    needed = [f"{error.message}, which is not installed here ({error.hint})" for error in missing]
    return [*needed, *_ineffective_arguments(arguments, preset)]


def check_values(arguments: Arguments, *, on_cpu: bool) -> None:
    """Raise ToolkitError for a value that works under no preset, as far as that is known without torch."""
    check_words(arguments, argument_words())
    check_ranges(arguments)
    check_trainer_arguments(arguments, on_cpu=on_cpu)
    check_scaling(arguments)
    check_global_batch(arguments)
    _check_jit_checkpoint(arguments)
    check_weights(arguments)
    check_streaming(arguments)
    check_evaluation(arguments)
    check_attention(arguments.get("attn_implementation"))
    check_compilation(arguments, on_cpu=on_cpu)


def refuse_arguments_of_comparison(arguments: Mapping[str, Any]) -> None:
    """Raise ToolkitError for a training argument that a comparison sets for all of its trials."""
    for name, option in ARGUMENTS_OF_COMPARISON.items():
        if name in arguments:
            instead = "" if option is None else f"; `toolkit compare` has `{option}`"
            raise ToolkitError(f"--{name} is set by the comparison itself", hint=f"remove it{instead}")


def _check_jit_checkpoint(arguments: Arguments) -> None:
    """transformers 5.23 sets a flag per rank when SIGTERM arrives, and saves at the next event of that rank."""
    if flag(arguments.get("enable_jit_checkpoint", False)):
        raise ToolkitError(
            "--enable_jit_checkpoint lets each rank save as soon as its own signal arrives: ranks that are a step apart"
            " wait for each other for ever",
            hint="leave it out: on SIGTERM all ranks agree on a step, save after it and exit",
        )


def _check_best_of_sharded(arguments: Arguments, preset: PresetSpec | None) -> None:
    """The Trainer cannot load the best model where a sharded checkpoint holds only the model."""
    both = all(flag(arguments.get(name, False)) for name in ("save_only_model", "load_best_model_at_end"))
    if both and preset is not None and preset.engine in ("deepspeed", "fsdp2"):
        raise ToolkitError(
            f"--load_best_model_at_end does not work with --save_only_model under preset {preset.name!r}",
            hint="leave `--save_only_model` out",
        )


def _missing_packages(arguments: Arguments, method: Method, *, on_cpu: bool) -> list[ToolkitError]:
    """One error for each package that the arguments need and that is not installed."""
    needed = {
        "bitsandbytes": ("--load_in_4bit needs bitsandbytes", method.load_in_4bit),
        "liger_kernel": ("--use_liger_kernel needs liger-kernel", method.use_liger_kernel),
    }
    hint = f"in the clone: {INSTALL_GPU_PACKAGES}"
    found = [
        ToolkitError(message, hint=hint)
        for module, (message, is_used) in needed.items()
        if is_used and not is_importable(module)
    ]
    optimizer = optimizer_module(method.optim)
    if optimizer is not None and not is_importable(optimizer[0]):
        module, command = optimizer
        install = hint if module == "bitsandbytes" else command
        found.append(ToolkitError(f"--optim {method.optim} needs {module}", hint=install))
    attention = arguments.get("attn_implementation")
    package = missing_attention_package(attention)
    if package is not None:
        install = f"pip install {package}, or `--attn_implementation sdpa`"
        found.append(ToolkitError(f"--attn_implementation {attention} needs {package}", hint=install))
    compiler = missing_compiler(method, arguments, on_cpu=on_cpu)
    return found if compiler is None else [*found, compiler]


def profiled_steps(text: str) -> tuple[int, int]:
    """Return the first and last profiled optimizer step of `A:B`.

    >>> profiled_steps("3:5")
    (3, 5)
    """
    found = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ToolkitError(
            f"--profile_steps is {shown(text)}, expected A:B with 1 <= A <= B", hint="`--profile_steps 3:5`"
        )
    return first, last


def check_trackers(value: Any) -> None:
    """Raise ToolkitError for a tracker that transformers does not know, or whose package is not installed."""
    for name in value if isinstance(value, list) else [value]:
        if name in (None, "none", "all"):
            continue
        known = tracker_names()
        if known and name not in known:
            hint = did_you_mean(str(name), known, otherwise=f"one of {', '.join(known)}")
            raise ToolkitError(f"--report_to has no tracker {shown(name)}", hint=hint)
        module, package = TRACKER_MODULES.get(str(name), (str(name), str(name)))
        alternative = name == "tensorboard" and is_importable("tensorboardX")
        if name != "kubeflow" and not alternative and not is_importable(module):
            raise ToolkitError(
                f"--report_to {name} needs a package that is not installed", hint=f"pip install {package}"
            )


def _check_strategy_arguments(arguments: Arguments, preset: PresetSpec) -> None:
    for name in STRATEGY_ARGUMENTS:
        if is_given(arguments, name):
            raise ToolkitError(
                f"--{name} would override the sharding of preset {preset.name!r}",
                hint="put it into an accelerate YAML of your own: `--preset FILE`",
            )


def _check_lora_config(arguments: Arguments) -> None:
    lora_fields(arguments.get("lora_config"))
    if is_given(arguments, "lora_config") and arguments.get("lora_r") is None:
        raise ToolkitError("--lora_config needs --lora_r", hint="add `--lora_r 16`")


def _check_comm_hook(arguments: Arguments) -> None:
    """Check the range of the hook's options."""
    name = arguments.get("ddp_comm_hook")
    if name is None:
        return
    fraction = float(arguments.get("ddp_comm_hook_top_k_fraction", 0.01))
    if not 0 < fraction <= 1:
        raise ToolkitError(f"--ddp_comm_hook_top_k_fraction is {fraction}, expected more than 0 and at most 1")
    for option, lowest in (("ddp_comm_hook_power_sgd_rank", 1), ("ddp_comm_hook_power_sgd_start", 2)):
        if int(arguments.get(option, lowest)) < lowest:
            raise ToolkitError(f"--{option} is {arguments[option]}, expected {lowest} or more")


def _ineffective_arguments(arguments: Arguments, preset: PresetSpec | None) -> list[str]:
    lines = streaming_warnings(arguments)
    if preset is not None and preset.engine != "ddp":
        lines += [
            f"--{name} has no effect: preset {preset.name!r} does not train with DDP"
            for name in DDP_ARGUMENTS
            if name in arguments
        ]
    for name, needed in PREREQUISITES.items():
        if name in arguments and not is_given(arguments, needed):
            lines.append(f"--{name} has no effect without --{needed}")
    alone = accumulation_steps(arguments) == 1 and not is_given(arguments, "global_batch_size")
    if is_given(arguments, "accumulate") and alone:
        lines.append("--accumulate has no effect without --gradient_accumulation_steps above 1")
    if flag(arguments.get("async_save", False)) and str(arguments.get("save_strategy")) == "no":
        lines.append("--async_save has no effect with --save_strategy no")
    hook = arguments.get("ddp_comm_hook")
    lines += [
        f"--{name} has no effect: the hook is {hook}"
        for name, reader in COMM_HOOK_OPTIONS.items()
        if name in arguments and hook is not None and hook != reader
    ]
    fsdp_checkpointing = preset is not None and preset.uses_fsdp_plugin and uses_activation_checkpointing(arguments)
    if fsdp_checkpointing and is_given(arguments, "activation_checkpointing_kwargs"):
        lines.append("--activation_checkpointing_kwargs has no effect: FSDP2 checkpoints each layer itself")
    lines += [
        f"--{name} is an old name: write --{name.replace('gradient', 'activation')}"
        for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs")
        if name in arguments
    ]
    return lines

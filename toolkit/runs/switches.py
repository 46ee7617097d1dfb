"""What the arguments switch on, held against the preset before anything starts. No torch.

    warnings = check_switches(arguments, preset, num_processes=2, on_cpu=True)

What cannot work is refused with the reason; what has no effect gives one line. `toolkit train` asks before the
launch, and the training script asks again, so that a plain `accelerate launch` says the same.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.installed import is_importable, tracker_names
from toolkit.runs.argv import flag
from toolkit.runs.comm_hooks import OPTIONS, check_comm_hook
from toolkit.runs.learning_rate import check_scaling
from toolkit.runs.lora import lora_fields
from toolkit.runs.rows import check_streaming, without_streaming


class PresetFacts(Protocol):
    """What is asked of a preset here."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def sharding(self) -> str: ...
    @property
    def offload_optimizer(self) -> str | None: ...
    @property
    def offload_param(self) -> str | None: ...


Arguments = dict[str, Any]

# Tracker -> a module that its callback cannot do without, and what installs it.
TRACKER_MODULES = {
    "azure_ml": ("azureml", "azureml-sdk"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "dagshub": ("dagshub", "dagshub"),
    "flyte": ("flytekit", "flytekit"),
}
STRATEGY_ARGUMENTS = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
DDP_ARGUMENTS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
# argument -> the one without which it does nothing
NEEDS = {
    "lora_alpha": "lora_r",
    "lora_dropout": "lora_r",
    "lora_target_modules": "lora_r",
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "liger_kernel_config": "use_liger_kernel",
}


def check_switches(
    arguments: Arguments, preset: PresetFacts | None, *, num_processes: int | None, on_cpu: bool
) -> list[str]:
    """One line for each argument without effect.

    Raises ToolkitError for what does not work, alone, with another argument, or under this preset.
    """
    _check_own(arguments)
    _check_adapters(arguments, preset)
    _check_kernels(arguments, on_cpu=on_cpu)
    check_trackers(arguments.get("report_to"))
    engine, name = (None, "") if preset is None else (preset.engine, preset.name)
    check_comm_hook(arguments, engine=engine, preset=name, num_processes=num_processes)
    if preset is not None:
        _check_strategy(arguments, preset)
    return without_effect(arguments, engine, name)


def _on(arguments: Arguments, name: str) -> bool:
    return flag(arguments.get(name, False))


def _given(arguments: Arguments, name: str) -> bool:
    return str(arguments.get(name)).lower() not in ("none", "false", "", "[]", "{}")


def _check_own(arguments: Arguments) -> None:
    check_scaling(arguments)
    check_streaming(arguments)
    if arguments.get("profile_steps") is not None:
        profiled_steps(str(arguments["profile_steps"]))
    if arguments.get("freeze") and arguments.get("train_only"):
        raise ToolkitError("--freeze and --train_only together", hint="say it with one of them")
    if _on(arguments, "activation_checkpointing_offload") and not recomputes(arguments):
        raise ToolkitError(
            "--activation_checkpointing_offload without --activation_checkpointing: nothing is saved that could move",
            hint="add `--activation_checkpointing true`",
        )


def recomputes(arguments: Arguments) -> bool:
    """Whether activation checkpointing is asked for, by its name or its old one."""
    return _on(arguments, "activation_checkpointing") or _on(arguments, "gradient_checkpointing")


def profiled_steps(text: str) -> tuple[int, int]:
    """First and last profiled optimizer step of `A:B`.

    >>> profiled_steps("3:5")
    (3, 5)
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ToolkitError(f"--profile_steps is {text!r}, expected A:B with 1 <= A <= B", hint="`--profile_steps 3:5`")
    return first, last


def _check_adapters(arguments: Arguments, preset: PresetFacts | None) -> None:
    lora = arguments.get("lora_r") is not None
    lora_fields(arguments.get("lora_config"))
    for name in ("lora_config", "load_in_4bit"):
        if _given(arguments, name) and not lora:
            raise ToolkitError(f"--{name} needs --lora_r", hint="add `--lora_r 16`")
    for name in ("freeze", "train_only"):
        if arguments.get(name) and lora:
            raise ToolkitError(
                f"--{name} with --lora_r: only the adapters are trained already",
                hint="`--lora_config layers_to_transform=[0,1]`, or `--lora_target_modules q_proj v_proj`",
            )
    if _on(arguments, "load_in_4bit"):
        _check_4bit(preset)


def _check_4bit(preset: PresetFacts | None) -> None:
    reasons = {
        ("deepspeed", "full_shard"): "every GPU would load the whole model (peft#2016)",
        ("deepspeed", "hybrid_shard"): "every GPU would load the whole model (peft#2016)",
        ("fsdp2", ""): "FSDP2 does not shard 4-bit weights (accelerate#3983, bitsandbytes#1945)",
    }
    if preset is not None:
        sharding = "" if preset.engine == "fsdp2" else preset.sharding
        reason = reasons.get((preset.engine, sharding))
        if reason is None and (preset.offload_optimizer or preset.offload_param):
            reason = "it is for models that fit on the GPU; the adapters' optimizer states are too small to offload"
        if reason is not None:
            raise ToolkitError(
                f"--load_in_4bit does not work under preset {preset.name!r}: {reason}",
                hint="`--preset ddp`, `zero1` or `zero2`",
            )
    if not is_importable("bitsandbytes"):
        raise ToolkitError("--load_in_4bit needs bitsandbytes", hint='pip install "finetune-toolkit[gpu]"')


def _check_kernels(arguments: Arguments, *, on_cpu: bool) -> None:
    if _on(arguments, "use_liger_kernel") and on_cpu:
        raise ToolkitError("--use_liger_kernel needs a GPU: its kernels are Triton's", hint="leave it out on a CPU")
    if _on(arguments, "use_liger_kernel") and not is_importable("liger_kernel"):
        raise ToolkitError("--use_liger_kernel needs liger-kernel", hint='pip install "finetune-toolkit[gpu]"')
    if _on(arguments, "activation_checkpointing_offload") and on_cpu:
        raise ToolkitError(
            "--activation_checkpointing_offload needs a GPU: on a CPU activations are in host memory already",
            hint="leave it out on a CPU",
        )
    if _on(arguments, "memory_snapshot") and on_cpu:
        raise ToolkitError(
            "--memory_snapshot needs a GPU: it records CUDA's allocator", hint="`--profile_steps 3:5` works on a CPU"
        )


def check_trackers(value: Any) -> None:
    """Refuse a tracker that transformers does not know, or whose package is not there."""
    for name in value if isinstance(value, list) else [value]:
        if name in (None, "none", "all"):
            continue
        known = tracker_names()
        if known and name not in known:
            hint = did_you_mean(str(name), known, otherwise=f"one of {', '.join(known)}")
            raise ToolkitError(f"--report_to has no tracker {name!r}", hint=hint)
        module, package = TRACKER_MODULES.get(str(name), (str(name), str(name)))
        alternative = name == "tensorboard" and is_importable("tensorboardX")
        if name != "kubeflow" and not alternative and not is_importable(module):
            raise ToolkitError(
                f"--report_to {name} needs a package that is not installed", hint=f"pip install {package}"
            )


def _check_strategy(arguments: Arguments, preset: PresetFacts) -> None:
    for name in STRATEGY_ARGUMENTS:
        if _given(arguments, name):
            raise ToolkitError(
                f"--{name} would shard in another way than preset {preset.name!r}",
                hint="put it into an accelerate YAML of your own: `--preset FILE`",
            )


def without_effect(arguments: Arguments, engine: str | None, preset: str) -> list[str]:
    """One line for each argument that changes nothing here."""
    lines = without_streaming(arguments)
    if engine not in (None, "ddp"):
        lines += [
            f"--{name} has no effect: preset {preset!r} does not train with DDP"
            for name in DDP_ARGUMENTS
            if name in arguments
        ]
    for name, needed in {**NEEDS, **dict.fromkeys(OPTIONS, "ddp_comm_hook")}.items():
        if name in arguments and not _given(arguments, needed):
            lines.append(f"--{name} has no effect without --{needed}")
    hook = arguments.get("ddp_comm_hook")
    lines += [
        f"--{name} has no effect: the hook is {hook}"
        for name, wanted in OPTIONS.items()
        if name in arguments and hook is not None and hook != wanted
    ]
    if engine == "fsdp2" and recomputes(arguments) and _given(arguments, "activation_checkpointing_kwargs"):
        lines.append("--activation_checkpointing_kwargs has no effect: FSDP2 checkpoints each layer itself")
    lines += [
        f"--{name} is an old name: write --{name.replace('gradient', 'activation')}"
        for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs")
        if name in arguments
    ]
    return lines

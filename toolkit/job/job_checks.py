"""Checks of a job that need neither a preset nor files; none of them imports torch.

`CHECKS` is the one list. `toolkit train` checks before the launch, and the training script checks again, so that a
plain `accelerate launch` gives the same errors. What depends on the preset is in `toolkit.presets.preset_checks`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.files.secrets import refuse_hidden
from toolkit.installation import install_line, wrong_version
from toolkit.job.argument_fields import ARGUMENTS
from toolkit.job.argument_reading import argument_words
from toolkit.job.argument_values import as_list, check_range, check_word
from toolkit.job.dataset_checks import check_evaluation, check_streaming, check_weights, streaming_warnings
from toolkit.job.global_batch import check_global_batch, check_scaling
from toolkit.job.job import Compilation, Job
from toolkit.job.trainer_checks import check_trainer_arguments
from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.attention import KERNEL, attention_words, missing_attention_package
from toolkit.models.optimizers import OPTIMIZERS
from toolkit.versions import is_importable

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

# Backends of torch 2.13 that train (`torch._dynamo.list_backends()`, and `aot_eager`, for debugging). The others are
# for inference (tensorrt, onnxrt, tvm), for other devices (openxla, hpu_backend, neuron), or are gone (nvfuser).
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "eager")
# `torch._inductor.list_mode_options()`; inductor's alone: torch passes a mode to no other backend.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DEFAULT_BACKEND = "inductor"
# option of the hook `power_sgd` -> its smallest value
POWER_SGD_OPTIONS = {"ddp_comm_hook_power_sgd_rank": 1, "ddp_comm_hook_power_sgd_start": 2}
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
    **dict.fromkeys(POWER_SGD_OPTIONS, "ddp_comm_hook"),
}


def check_values(job: Job, *, on_cpu: bool) -> None:
    """Raise ToolkitError for a value that works under no preset, as far as that is known without torch."""
    for check in CHECKS:
        check(job)
    if on_cpu:
        _check_on_cpu(job)


def _check_words(job: Job) -> None:
    words = argument_words()
    for name in job.given:
        for each in as_list(job.value(name)) if name in words else ():
            for word in each.split() if name == "debug" else [each]:
                check_word(f"--{name}", word, words[name])


def _check_ranges(job: Job) -> None:
    for name in job.given:
        if name in ARGUMENTS and "limits" in ARGUMENTS[name].metadata:
            check_range(f"--{name}", job.value(name), ARGUMENTS[name].metadata["limits"])


def _check_settings(job: Job) -> None:
    if job.profile_steps is not None:
        profiled_steps(job.profile_steps)
    if job.lora_config and not job.is_lora:
        raise ToolkitError("--lora_config needs --lora_r", hint="add `--lora_r 16`")
    # transformers 5.23 sets a flag per rank when SIGTERM arrives, and saves at the next event of that rank
    if job.enable_jit_checkpoint:
        raise ToolkitError(
            "--enable_jit_checkpoint lets each rank save as soon as its own signal arrives: ranks that are a step apart"
            " wait for each other for ever",
            hint="leave it out: on SIGTERM all ranks agree on a step, save after it and exit",
        )


def _check_comm_hook(job: Job) -> None:
    if job.ddp_comm_hook is None:
        return
    for option, lowest in POWER_SGD_OPTIONS.items():
        if job.value(option) < lowest:
            raise ToolkitError(f"--{option} is {job.value(option)}, expected {lowest} or more")


def _check_attention(job: Job) -> None:
    name = job.attn_implementation
    if name is not None and not KERNEL.fullmatch(name):
        check_word("--attn_implementation", name.removeprefix("paged|"), attention_words())


def _check_compilation(job: Job) -> None:
    compilation = job.compilation
    if compilation is None:
        return
    backend, mode = compilation.backend, compilation.mode
    check_word("--torch_compile_backend", backend, BACKENDS)
    if mode is not None:
        check_word("--torch_compile_mode", mode, MODES)
    if mode is not None and backend != DEFAULT_BACKEND:
        raise ToolkitError(
            f"--torch_compile_mode is inductor's, and --torch_compile_backend is {backend}",
            hint="leave `--torch_compile_mode` out",
        )


CHECKS: tuple[Callable[[Job], None], ...] = (
    lambda job: refuse_hidden(job.given_values),
    _check_words,
    _check_ranges,
    check_trainer_arguments,
    check_scaling,
    check_global_batch,
    _check_settings,
    check_weights,
    check_streaming,
    check_evaluation,
    _check_attention,
    _check_compilation,
    _check_comm_hook,
)
"""In this order; the first that objects is reported."""


def _check_on_cpu(job: Job) -> None:
    if job.tf32:
        raise ToolkitError("--tf32 needs a GPU", hint="leave it out on a CPU")
    if job.compilation is not None and job.compilation.backend == "cudagraphs":
        raise ToolkitError("--torch_compile_backend cudagraphs needs a GPU", hint="leave it out on a CPU")


def refuse_arguments_of_comparison(job: Job) -> None:
    """Raise ToolkitError for a training argument that a comparison sets for all of its trials."""
    for name, option in ARGUMENTS_OF_COMPARISON.items():
        if name in job.given:
            instead = "" if option is None else f"; `toolkit compare` has `{option}`"
            raise ToolkitError(f"--{name} is set by the comparison itself", hint=f"remove it{instead}")


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


def missing_packages(job: Job, *, on_cpu: bool) -> list[ToolkitError]:
    """Return one error for each package that the job needs and that is not installed."""
    spec = OPTIMIZERS.get(job.optim)
    needed = {
        "bitsandbytes": (
            f"--{'load_in_4bit' if job.load_in_4bit else f'optim {job.optim}'} needs bitsandbytes",
            job.load_in_4bit or (spec is not None and spec.class_name.startswith("bitsandbytes.")),
        ),
        "liger_kernel": ("--use_liger_kernel needs liger-kernel", job.use_liger_kernel),
    }
    missing = [
        ToolkitError(message, hint=install_line(module))
        for module, (message, is_used) in needed.items()
        if is_used and not is_importable(module)
    ]
    if job.load_in_4bit and (wrong := wrong_version("bitsandbytes")):  # an older one has layers that no check knows
        missing.append(wrong)
    package = missing_attention_package(job.attn_implementation)
    if package is not None:
        install = f"pip install {package}, or `--attn_implementation sdpa`"
        missing.append(ToolkitError(f"--attn_implementation {job.attn_implementation} needs {package}", hint=install))
    compiler = _missing_compiler(job.compilation, on_cpu=on_cpu)
    return missing if compiler is None else [*missing, compiler]


def _missing_compiler(compilation: Compilation | None, *, on_cpu: bool) -> ToolkitError | None:
    if compilation is None or compilation.backend != DEFAULT_BACKEND:
        return None
    if not on_cpu:
        missing = None if is_importable("triton") else ("Triton", "pip install triton")
    else:
        compiler = os.environ.get("CXX") or "g++"  # `torch._inductor.config.cpp.cxx`
        missing = None if shutil.which(compiler) else (f"the C++ compiler {compiler!r}", "apt-get install g++")
    if missing is None:
        return None
    return ToolkitError(f"--torch_compile needs {missing[0]} for its kernels", hint=missing[1])


def check_trackers(job: Job) -> None:
    """Raise ToolkitError for a tracker that transformers does not know, or whose package is not installed."""
    for name in as_list(job.value("report_to")):
        if name in ("none", "all"):
            continue
        known = trainer_schema().trackers
        if name not in known:
            hint = did_you_mean(str(name), known, otherwise=f"one of {', '.join(known)}")
            raise ToolkitError(f"--report_to has no tracker {shown(name)}", hint=hint)
        module, package = TRACKER_MODULES.get(str(name), (str(name), str(name)))
        alternative = name == "tensorboard" and is_importable("tensorboardX")
        if name != "kubeflow" and not alternative and not is_importable(module):
            raise ToolkitError(
                f"--report_to {name} needs a package that is not installed", hint=f"pip install {package}"
            )


def ineffective_arguments(job: Job) -> list[str]:
    """Return a warning for each argument that has no effect, whatever the preset."""
    lines = streaming_warnings(job)
    for name, needed in PREREQUISITES.items():
        is_on = job.uses_activation_checkpointing if needed == "activation_checkpointing" else job.value(needed)
        if name in job.given and not is_on:
            lines.append(f"--{name} has no effect without --{needed}")
    if job.accumulate is not None and job.gradient_accumulation_steps == 1 and job.global_batch_size is None:
        lines.append("--accumulate has no effect without --gradient_accumulation_steps above 1")
    if job.async_save and not job.saves_checkpoints:
        lines.append("--async_save has no effect with --save_strategy no")
    hook = job.ddp_comm_hook
    lines += [
        f"--{name} has no effect: the hook is {hook}"
        for name in POWER_SGD_OPTIONS
        if name in job.given and hook not in (None, "power_sgd")
    ]
    lines += [
        f"--{name}: here it is called --{name.replace('gradient', 'activation')}"
        for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs")
        if name in job.given
    ]
    return lines

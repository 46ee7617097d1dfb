"""Checks of a job that need neither a preset nor files; none of them imports torch.

`CHECKS` is the one list. `toolkit train` checks before the launch, and the training script checks again, so that a
plain `accelerate launch` gives the same errors. What depends on the preset is in `toolkit.presets.support`.
"""

import os
import re
import shutil
from collections.abc import Callable
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.files.secrets import refuse_hidden
from toolkit.installation import install_line, wrong_version
from toolkit.job.argument_fields import ARGUMENTS
from toolkit.job.argument_reading import argument_words
from toolkit.job.argument_values import as_list, check_range, check_word
from toolkit.job.dataset_checks import check_evaluation, check_streaming, check_weights, streaming_warnings
from toolkit.job.global_batch import check_global_batch, check_scaling
from toolkit.job.job import Compilation, Job
from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.attention import KERNEL, attention_words, missing_attention_package
from toolkit.models.optimizers import MUON, OF_SCRIPTS, OPTIMIZERS, parse_optimizer_arguments
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
EVALUATION_METRICS = ("loss", "perplexity", "supervised_tokens")  # metrics of an evaluation: `evaluation_figures`
# What people give to AdamW here, and the argument that sets it.
OPTIM_ARGS_HINTS = {
    "beta1": "`--adam_beta1`",
    "beta2": "`--adam_beta2`",
    "betas": "`--adam_beta1` and `--adam_beta2`",
    "eps": "`--adam_epsilon`",
    "weight_decay": "`--weight_decay`",
    "lr": "`--learning_rate`",
}
# Options of torch's Muon (`toolkit/train/engine/muon.py`).
MUON_OPTIONS = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")


def check_values(job: Job, *, on_cpu: bool) -> None:
    """Raise ToolkitError for a value that works under no preset, as far as that is known without torch."""
    for check in CHECKS:
        check(job)
    if on_cpu and job.tf32:
        raise ToolkitError("--tf32 needs a GPU", hint="leave it out on a CPU")
    if on_cpu and job.compilation is not None and job.compilation.backend == "cudagraphs":
        raise ToolkitError("--torch_compile_backend cudagraphs needs a GPU", hint="leave it out on a CPU")


def _check_words(job: Job) -> None:
    words = argument_words()
    check_trained_optimizer(job.optim)
    for name in job.given:
        for each in as_list(job.value(name)) if name in words else ():
            for word in each.split() if name == "debug" else [each]:
                check_word(f"--{name}", word, words[name])


def check_trained_optimizer(optim: str) -> None:
    """Raise ToolkitError for an optimizer that is planned, and that the Trainer does not make by a name."""
    if optim in OF_SCRIPTS:
        raise ToolkitError(
            f"--optim {optim} is for `toolkit plan` alone: transformers has no such optimizer",
            hint=f"make a {OPTIMIZERS[optim].class_name} in the `create_optimizer` of a script's Trainer, and run it:"
            " `toolkit train --script FILE`",
        )


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
        hint = "leave `--torch_compile_mode` out"
        raise ToolkitError(f"--torch_compile_mode is inductor's, and --torch_compile_backend is {backend}", hint=hint)


# -- transformers' own arguments against each other, without importing it
#
# What `TrainingArguments.__post_init__` and `Trainer.__init__` of transformers 5.23 refuse after a wait in a queue, and
# what it takes without a word, such as an option that an optimizer does not read. The rest is left to transformers: a
# rank refuses its arguments when it starts, and a schedule once the model is loaded. A test asks both.


def check_trainer_arguments(job: Job) -> None:
    """Raise ToolkitError for the first value or combination that transformers refuses."""
    _check_steps(job)
    _check_best_model(job)
    for end in ("", "_full_eval"):
        if job.value(f"bf16{end}") and job.value(f"fp16{end}"):
            raise ToolkitError(f"--bf16{end} and --fp16{end} are both on", hint=f"leave out `--fp16{end}`")
    _check_optimizer_arguments(job.optim, job.optim_args)
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if job.value(name) and not job.dataloader_num_workers:
            raise ToolkitError(f"--{name} needs --dataloader_num_workers above 0", hint="`--dataloader_num_workers 2`")


def _check_steps(job: Job) -> None:
    for kind in ("logging", "save", "eval"):
        steps = job.value(f"{kind}_steps")
        if job.value(f"{kind}_strategy") != "steps" or (kind == "eval" and not steps):
            continue  # without a number of its own, evaluation takes the one of logging
        assert steps is not None
        if steps <= 0 or (steps > 1 and steps != int(steps)):
            raise ToolkitError(
                f"--{kind}_steps is {steps:g}, expected a whole number above 0, or a fraction of all steps",
                hint=f"`--{kind}_strategy no` for none",
            )
    each = job.eval_steps or job.logging_steps
    if job.eval_strategy == "steps" and (each is None or each <= 0 or (each > 1 and each != int(each))):
        hint = "`--eval_steps 100`"
        raise ToolkitError("--eval_strategy steps needs --eval_steps, or a whole number of --logging_steps", hint=hint)


def _check_best_model(job: Job) -> None:
    best, keeps = job.save_strategy == "best", job.load_best_model_at_end
    schedule = job.lr_scheduler_type
    metric = job.metric_for_best_model
    if schedule in ("reduce_lr_on_plateau", "greedy") and job.eval_strategy == "no":
        raise ToolkitError(
            f"--lr_scheduler_type {schedule} follows the evaluation loss, and --eval_strategy is no",
            hint="`--eval_strategy epoch`",
        )
    if keeps and not best:
        _check_evaluated_saves(job)
    if best and metric is None and not keeps:
        raise ToolkitError("--save_strategy best needs --metric_for_best_model", hint="`--metric_for_best_model loss`")
    if metric is not None and (best or keeps or schedule in ("reduce_lr_on_plateau", "greedy")):
        name = str(metric).removeprefix("eval_")
        if name not in EVALUATION_METRICS:
            raise ToolkitError(
                f"--metric_for_best_model is {shown(metric)}, and an evaluation has {', '.join(EVALUATION_METRICS)}",
                hint=did_you_mean(name, EVALUATION_METRICS, otherwise="`--metric_for_best_model loss`"),
            )


def _check_evaluated_saves(job: Job) -> None:
    saves, evaluations = job.save_strategy, job.eval_strategy
    if saves != evaluations:
        raise ToolkitError(
            f"--load_best_model_at_end needs an evaluation at each save: --save_strategy is {saves}, --eval_strategy"
            f" {evaluations}",
            hint="`--save_strategy epoch --eval_strategy epoch`",
        )
    save, each = job.save_steps, job.eval_steps or job.logging_steps
    if saves != "steps" or not save or not each or save % each == 0:
        return
    in_millionths = save < 1 and each < 1 and (save * 1_000_000) % (each * 1_000_000) == 0
    if not in_millionths:
        raise ToolkitError(
            f"--load_best_model_at_end needs an evaluation at each save: --save_steps {save:g} is no multiple of"
            f" --eval_steps {each:g}",
            hint=f"`--save_steps {2 * each:g}`",
        )


def _check_optimizer_arguments(optim: str, text: Any) -> None:
    """`--optim_args` is `name=value`, several of them with commas between, of which the optimizer reads each."""
    for part in str(text).replace(" ", "").split(",") if text else []:
        if part.count("=") != 1:
            example = "`--optim_args momentum=0.9,nesterov=true`"
            raise ToolkitError(f"--optim_args has {shown(part)}, expected name=value", hint=example)
    known = MUON_OPTIONS if optim == MUON else trainer_schema().optim_args.get(optim)
    if known is None:
        return
    is_adamw_or_lion = optim.startswith(("adamw", "paged_adamw", "lion", "paged_lion"))  # made beside AdEMAMix
    for name in parse_optimizer_arguments(text):
        if name not in known or (is_adamw_or_lion and name in OPTIM_ARGS_HINTS):
            hint = OPTIM_ARGS_HINTS.get(name) or did_you_mean(name, known, otherwise="leave it out")
            raise ToolkitError(f"--optim_args: --optim {optim} reads no {shown(name)}", hint=hint)


# -- what is checked, in this order

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
"""The first that objects is reported."""


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
        hint = "`--profile_steps 3:5`"
        raise ToolkitError(f"--profile_steps is {shown(text)}, expected A:B with 1 <= A <= B", hint=hint)
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
            hint = f"pip install {package}"
            raise ToolkitError(f"--report_to {name} needs a package that is not installed", hint=hint)


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

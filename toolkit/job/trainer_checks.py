"""Checks of transformers' own arguments against each other, without importing it.

They are what `TrainingArguments.__post_init__` and `Trainer.__init__` of transformers 5.23 refuse after a wait in a
queue, and what it takes without a word. Keys of `--lr_scheduler_kwargs` and `--accelerator_config`, and the types of
an optimizer's options, are left to transformers: each rank refuses them when it starts. A test asks both.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.job.job import Job
from toolkit.models.optimizers import MUON, parse_optimizer_arguments

# Metrics of an evaluation: `evaluation_figures`.
EVALUATION_METRICS = ("loss", "perplexity", "supervised_tokens")
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
_TORCHAO = ("block_size", "bf16_stochastic_round")
_GALORE = ("rank", "update_proj_gap", "scale", "proj_type")
_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_ANYPRECISION = ("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
_GROKKING = ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping")
# Beginning of an optimizer's name -> the options that `trainer_optimizer.py` of transformers 5.23 reads from
# `optim_args`. It reads no other option, and says nothing of those that it does not read.
OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw_torch_4bit": _TORCHAO,
    "adamw_torch_8bit": _TORCHAO,
    "adamw_anyprecision": _ANYPRECISION,
    "adamw_": (),
    "adafactor": (),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop_bnb": (),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
    "grokadamw": _GROKKING,
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
    "lomo": (),
    "adalomo": (),
    "ademamix": _ADEMAMIX,
    "paged_ademamix": _ADEMAMIX,
    "paged_": (),
    "lion": (),
    "galore": _GALORE,
    "apollo": (*_GALORE, "proj", "scale_type"),
    "schedule_free": ("r", "weight_lr_power"),
}
# Part of an optimizer's name -> the module that it needs, and how that is installed.
OPTIMIZER_MODULES = {
    "torch_xla": ("torch_xla", "torch_xla"),
    "torch_npu": ("torch_npu", "torch_npu"),
    "torch_4bit": ("torchao", "torchao"),
    "torch_8bit": ("torchao", "torchao"),
    "anyprecision": ("torchdistx", "torchdistx"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "galore": ("galore_torch", "git+https://github.com/jiaweizzhao/GaLore"),
    "apollo": ("apollo_torch", "git+https://github.com/zhuhanqing/APOLLO"),
    "schedule_free": ("schedulefree", "schedulefree"),
    **dict.fromkeys(("ademamix", "paged_", "bnb", "8bit", "lion"), ("bitsandbytes", "-U bitsandbytes")),
}


def optimizer_options(optim: str) -> tuple[str, ...] | None:
    """Return what `optim_args` may set for an optimizer; None for one that is unknown here."""
    if optim == MUON:
        return MUON_OPTIONS
    return next((options for name, options in OPTIMIZER_OPTIONS.items() if optim.startswith(name)), None)


def optimizer_module(optim: str) -> tuple[str, str] | None:
    """Return the module that an optimizer needs, and the command that installs it; None for those of torch."""
    needed = next((needed for part, needed in OPTIMIZER_MODULES.items() if part in optim), None)
    return None if needed is None else (needed[0], f"pip install {needed[1]}")


def check_trainer_arguments(job: Job) -> None:
    """Raise ToolkitError for the first value or combination that transformers refuses."""
    _check_steps(job)
    _check_best_model(job)
    _check_precision(job)
    _check_optimizer_arguments(job.optim, job.optim_args)
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if job.value(name) and not job.dataloader_num_workers:
            raise ToolkitError(f"--{name} needs --dataloader_num_workers above 0", hint="`--dataloader_num_workers 2`")


def _check_steps(job: Job) -> None:
    """Steps between two logs, evaluations or saves: a whole number, or a fraction of all steps."""
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
        raise ToolkitError(
            "--eval_strategy steps needs --eval_steps, or a whole number of --logging_steps", hint="`--eval_steps 100`"
        )


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
    """`--load_best_model_at_end` needs an evaluation at each save."""
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


def _check_precision(job: Job) -> None:
    for end in ("", "_full_eval"):
        if job.value(f"bf16{end}") and job.value(f"fp16{end}"):
            raise ToolkitError(f"--bf16{end} and --fp16{end} are both on", hint=f"leave out `--fp16{end}`")


def _check_optimizer_arguments(optim: str, text: Any) -> None:
    """`--optim_args` is `name=value`, several of them with commas between, of which the optimizer reads each."""
    for part in str(text).replace(" ", "").split(",") if text else []:
        if part.count("=") != 1:
            raise ToolkitError(
                f"--optim_args has {shown(part)}, expected name=value", hint="`--optim_args momentum=0.9,nesterov=true`"
            )
    known = optimizer_options(optim)
    if known is None:
        return
    for name in parse_optimizer_arguments(text):
        if name not in known:
            otherwise = f"it has {', '.join(known)}" if known else "leave it out"
            hint = OPTIM_ARGS_HINTS.get(name) or did_you_mean(name, known, otherwise=otherwise)
            raise ToolkitError(f"--optim_args: --optim {optim} reads no {shown(name)}", hint=hint)
        if name == "block_size":
            raise ToolkitError(
                "--optim_args block_size: transformers passes it to torchao as text, which fails in the first step",
                hint="leave it out: blocks of 256",
            )

"""Checks of transformers' own arguments against each other, without importing it.

They are what `TrainingArguments.__post_init__`, `Trainer.__init__` and `get_scheduler` refuse (transformers 5.23); what
the installed ones accept is in `trainer_schema()`. A test gives the same arguments to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.job.job import Job
from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.optimizers import MUON, parse_optimizer_arguments

# Metrics of an evaluation: `evaluation_figures`.
EVALUATION_METRICS = ("loss", "perplexity", "supervised_tokens")
# What people give to AdamW here, and the argument that sets it.
OPTIM_ARGS_HINTS = {"beta1": "`--adam_beta1`", "beta2": "`--adam_beta2`", "eps": "`--adam_epsilon`"}
OPTIM_ARGS_HINTS |= {"betas": "`--adam_beta1` and `--adam_beta2`", "weight_decay": "`--weight_decay`"}
OPTIM_ARGS_HINTS |= {"lr": "`--learning_rate`"}
# Options of torch's Muon, and their types (`toolkit/train/engine/muon.py`).
MUON_OPTIONS = {"momentum": "float", "nesterov": "", "ns_steps": "int", "adjust_lr_fn": ""}
MIN_LR = ("min_lr", "min_lr_rate")
_GALORE = {"rank": "int", "update_proj_gap": "int", "scale": "float", "proj_type": ""}
_ADEMAMIX = {**dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), "float"), "t_alpha": "int", "t_beta3": "int"}
_DTYPES = ("momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
_GROKKING = ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping")
# Beginning of an optimizer's name -> the options that `trainer_optimizer.py` of transformers 5.23 reads from
# `optim_args` (text to type; empty for a word), the module that it needs, and how that is installed.
OPTIMIZERS: tuple[tuple[str, dict[str, str], str | None, str | None], ...] = (
    ("adamw_torch_xla", {}, "torch_xla", "torch_xla"),
    ("adamw_torch_npu_fused", {}, "torch_npu", "torch_npu"),
    ("adamw_torch_4bit", {"block_size": "", "bf16_stochastic_round": ""}, "torchao", "torchao"),
    ("adamw_torch_8bit", {"block_size": "", "bf16_stochastic_round": ""}, "torchao", "torchao"),
    ("adamw_torch", {}, None, None),
    ("adafactor", {}, None, None),
    ("sgd", {**dict.fromkeys(("momentum", "dampening", "weight_decay"), "float"), "nesterov": ""}, None, None),
    ("adagrad", dict.fromkeys(("lr_decay", "weight_decay", "eps"), "float"), None, None),
    ("rmsprop_bnb", {}, "bitsandbytes", "-U bitsandbytes"),
    ("rmsprop", dict.fromkeys(("momentum", "alpha", "eps", "weight_decay"), "float") | {"centered": ""}, None, None),
    ("adamw_anyprecision", dict.fromkeys(("use_kahan_summation", *_DTYPES), ""), "torchdistx", "torchdistx"),
    ("grokadamw", dict.fromkeys(_GROKKING, "float"), "grokadamw", "grokadamw"),
    ("stable_adamw", {"max_lr": "", "kahan_sum": "", "decouple_lr": ""}, "optimi", "torch-optimi"),
    ("lomo", {}, "lomo_optim", "lomo-optim"),
    ("adalomo", {}, "lomo_optim", "lomo-optim"),
    ("ademamix", _ADEMAMIX, "bitsandbytes", "-U bitsandbytes"),
    ("paged_ademamix", _ADEMAMIX, "bitsandbytes", "-U bitsandbytes"),
    ("paged_", {}, "bitsandbytes", "-U bitsandbytes"),
    ("adamw_bnb_8bit", {}, "bitsandbytes", "-U bitsandbytes"),
    ("adamw_8bit", {}, "bitsandbytes", "-U bitsandbytes"),
    ("lion", {}, "bitsandbytes", "-U bitsandbytes"),
    ("galore", _GALORE, "galore_torch", "git+https://github.com/jiaweizzhao/GaLore"),
    ("apollo", _GALORE | {"proj": "", "scale_type": ""}, "apollo_torch", "git+https://github.com/zhuhanqing/APOLLO"),
    ("schedule_free", {"r": "float", "weight_lr_power": "float"}, "schedulefree", "schedulefree"),
)


def optimizer_arguments(optim: str) -> Mapping[str, str] | None:
    """Return what `optim_args` may set for an optimizer of transformers, each with its type; None for no such one."""
    return next((arguments for name, arguments, _, _ in OPTIMIZERS if optim.startswith(name)), None)


def optimizer_module(optim: str) -> tuple[str, str] | None:
    """Return the module that an optimizer needs, and the command that installs it; None for those of transformers."""
    needed = next(((module, package) for name, _, module, package in OPTIMIZERS if optim.startswith(name)), None)
    return (needed[0], f"pip install {needed[1]}") if needed and needed[0] else None


def check_trainer_arguments(job: Job) -> None:
    """Raise ToolkitError for the first value or combination that transformers refuses."""
    _check_steps(job)
    _check_best_model(job)
    _check_precision(job)
    _check_schedule(job)
    _check_accelerator_config(job)
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


def _check_schedule(job: Job) -> None:
    """The keys of `--lr_scheduler_kwargs` are parameters of the schedule's function."""
    schedule, given = job.lr_scheduler_type, job.lr_scheduler_kwargs or {}
    known = trainer_schema().schedules.get(schedule)
    if known is None or schedule.startswith("constant"):  # they are not called with any
        return
    for name in given:
        if name not in known:
            raise ToolkitError(
                f"--lr_scheduler_kwargs: {schedule} has no {shown(name)}",
                hint=did_you_mean(name, known, otherwise=f"it has {', '.join(known)}"),
            )
    missing = [name for name, needed in known.items() if needed and name not in given]
    if set(MIN_LR) <= known.keys() and sum(given.get(name) is not None for name in MIN_LR) != 1:
        missing = ["either min_lr or min_lr_rate"]
    if missing:
        example = missing[0].rpartition(" ")[2]
        raise ToolkitError(
            f"--lr_scheduler_type {schedule} needs {missing[0]}",
            hint=f"`--lr_scheduler_kwargs '{{\"{example}\": {10 if 'steps' in example else 0.1}}}'`",
        )


def _check_accelerator_config(job: Job) -> None:
    types, given = trainer_schema().accelerator_config, job.accelerator_config or {}
    for name in given:
        if name not in types:
            hint = did_you_mean(name, types, otherwise=f"one of {', '.join(types)}")
            raise ToolkitError(f"--accelerator_config has no {shown(name)}", hint=hint)
        if types[name].startswith("bool") and str(given[name]).lower() not in {"true", "false", "none"}:
            raise ToolkitError(f"--accelerator_config {name} is {shown(given[name])}, expected true or false")


def _check_optimizer_arguments(optim: str, text: Any) -> None:
    """`--optim_args` is `name=value`, several of them with commas between, of which the optimizer reads each."""
    for part in str(text).replace(" ", "").split(",") if text else []:
        if part.count("=") != 1:
            raise ToolkitError(
                f"--optim_args has {shown(part)}, expected name=value", hint="`--optim_args momentum=0.9,nesterov=true`"
            )
    known = MUON_OPTIONS if optim == MUON else optimizer_arguments(optim)
    if known is None:
        return
    for name, value in parse_optimizer_arguments(text).items():
        if name not in known:
            otherwise = f"it has {', '.join(known)}" if known else "leave it out"
            hint = OPTIM_ARGS_HINTS.get(name) or did_you_mean(name, known, otherwise=otherwise)
            raise ToolkitError(f"--optim_args: --optim {optim} reads no {shown(name)}", hint=hint)
        if known[name] and not _is_number(value, whole=known[name] == "int"):
            kind = "a whole number" if known[name] == "int" else "a number"
            raise ToolkitError(f"--optim_args {name} is {shown(value)}, expected {kind}", hint=f"`{name}=0`")
        if name == "block_size":
            raise ToolkitError(
                "--optim_args block_size: transformers passes it to torchao as text, which fails in the first step",
                hint="leave it out: blocks of 256",
            )


def _is_number(text: str, *, whole: bool) -> bool:
    try:
        return math.isfinite(int(text) if whole else float(text))
    except ValueError:
        return False

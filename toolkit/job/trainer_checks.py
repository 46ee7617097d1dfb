"""Checks of transformers' own arguments against each other, without importing it.

They are what `TrainingArguments.__post_init__` and `Trainer.__init__` of transformers 5.23 refuse after a wait in a
queue, and what it takes without a word, such as an option that an optimizer does not read. The rest is left to
transformers: a rank refuses its arguments when it starts, and a schedule once the model is loaded. A test asks both.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.job.job import Job
from toolkit.job.trainer_schema import trainer_schema
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
            raise ToolkitError(
                f"--optim_args has {shown(part)}, expected name=value", hint="`--optim_args momentum=0.9,nesterov=true`"
            )
    known = MUON_OPTIONS if optim == MUON else trainer_schema().optim_args.get(optim)
    if known is None:
        return
    is_adamw_or_lion = optim.startswith(("adamw", "paged_adamw", "lion", "paged_lion"))  # made beside AdEMAMix
    for name in parse_optimizer_arguments(text):
        if name not in known or (is_adamw_or_lion and name in OPTIM_ARGS_HINTS):
            hint = OPTIM_ARGS_HINTS.get(name) or did_you_mean(name, known, otherwise="leave it out")
            raise ToolkitError(f"--optim_args: --optim {optim} reads no {shown(name)}", hint=hint)

"""Checks of transformers' own arguments against each other, without importing it.

    check_trainer_arguments({"eval_strategy": "steps", "logging_steps": "0"}, on_cpu=True)      # raises

They are what `TrainingArguments.__post_init__`, `Trainer.__init__` and `get_scheduler` refuse (transformers 5.23), and
what the installed ones accept is read from their source (`toolkit.versions`). A test gives the same arguments to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.json_files import parse_json, read_json_object
from toolkit.files.value_limits import CONFIGURATION, shown
from toolkit.job.argument_values import FALSE_WORDS, TRUE_WORDS
from toolkit.presets.optimizers import DEFAULT_OPTIMIZER, MUON, parse_optimizer_arguments
from toolkit.versions import (
    accelerator_config_types,
    optimizer_arguments,
    scheduler_arguments,
    training_argument_defaults,
)

# Metrics of an evaluation: `EvaluatedTokens.over_all_ranks`.
EVALUATION_METRICS = ("loss", "perplexity", "supervised_tokens")
# Arguments that hold JSON, and an example of each.
JSON_ARGUMENTS = {
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "activation_checkpointing_kwargs": '{"use_reentrant": false}',
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
    "accelerator_config": '{"split_batches": true}',
}
# What people give to AdamW here, and the argument that sets it.
OPTIM_ARGS_HINTS = {"beta1": "`--adam_beta1`", "beta2": "`--adam_beta2`", "eps": "`--adam_epsilon`"}
OPTIM_ARGS_HINTS |= {"betas": "`--adam_beta1` and `--adam_beta2`", "weight_decay": "`--weight_decay`"}
OPTIM_ARGS_HINTS |= {"lr": "`--learning_rate`"}
# Options of torch's Muon, and their types (`toolkit/train/engine/muon.py`).
MUON_OPTIONS = {"momentum": "float", "nesterov": "", "ns_steps": "int", "adjust_lr_fn": ""}
MIN_LR = ("min_lr", "min_lr_rate")


class TrainerValues:
    """The arguments that are given, and transformers' defaults for the others."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def word(self, name: str) -> str:
        """Return a word, for example a strategy."""
        return str(self._value(name))

    def number(self, name: str) -> float | None:
        """Return a number, or None where it has no default."""
        value = self._value(name)
        return None if value is None else float(value)

    def is_on(self, name: str) -> bool:
        """Return a boolean."""
        return str(self._value(name)).lower() in TRUE_WORDS

    def _value(self, name: str) -> Any:
        value = self.given.get(name)
        return training_argument_defaults().get(name) if value is None else value


def check_trainer_arguments(arguments: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raise ToolkitError for the first value or combination that transformers refuses."""
    values = TrainerValues(arguments)
    _check_steps(values)
    _check_best_model(values)
    _check_precision(values, on_cpu=on_cpu)
    _check_schedule(values, json_object(arguments, "lr_scheduler_kwargs"))
    _check_accelerator_config(json_object(arguments, "accelerator_config"))
    for name in JSON_ARGUMENTS:
        json_object(arguments, name)
    _check_optimizer_arguments(str(arguments.get("optim") or DEFAULT_OPTIMIZER), arguments.get("optim_args"))
    _check_loader(values)
    if arguments.get("liger_kernel_config") is not None and not isinstance(arguments["liger_kernel_config"], dict):
        raise ToolkitError(
            f"--liger_kernel_config is {shown(arguments['liger_kernel_config'])}, expected keys and values",
            hint="put it into a YAML file: `liger_kernel_config: {rope: true}`",
        )


def json_object(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an argument that is a JSON object, a mapping of a YAML file, or (one of them) the path of a JSON file.

    Empty without it. Raises ToolkitError for anything else.
    """
    value, option = arguments.get(name), f"--{name}"
    if value is None or isinstance(value, dict):
        return value or {}
    if isinstance(value, str) and value.startswith("{"):
        content = parse_json(value, option, limits=CONFIGURATION)
        assert isinstance(content, dict)
        return content
    if isinstance(value, str) and name == "accelerator_config" and value.endswith(".json"):
        return read_json_object(Path(value), limits=CONFIGURATION)
    raise ToolkitError(
        f"{option} is {shown(value)}, expected a JSON object", hint=f"`{option} '{JSON_ARGUMENTS[name]}'`"
    )


def evaluates(arguments: Mapping[str, Any]) -> bool:
    """Return True if the run evaluates during training or before it."""
    values = TrainerValues(arguments)
    return values.word("eval_strategy") != "no" or values.is_on("eval_on_start")


def _check_steps(values: TrainerValues) -> None:
    """Steps between two logs, evaluations or saves: a whole number, or a fraction of all steps."""
    for kind in ("logging", "save", "eval"):
        steps = values.number(f"{kind}_steps")
        if values.word(f"{kind}_strategy") != "steps" or (kind == "eval" and not steps):
            continue  # without a number of its own, evaluation takes the one of logging
        assert steps is not None
        if steps <= 0 or (steps > 1 and steps != int(steps)):
            raise ToolkitError(
                f"--{kind}_steps is {steps:g}, expected a whole number above 0, or a fraction of all steps",
                hint=f"`--{kind}_strategy no` for none",
            )
    each = values.number("eval_steps") or values.number("logging_steps")
    if values.word("eval_strategy") == "steps" and (each is None or each <= 0 or (each > 1 and each != int(each))):
        raise ToolkitError(
            "--eval_strategy steps needs --eval_steps, or a whole number of --logging_steps", hint="`--eval_steps 100`"
        )


def _check_best_model(values: TrainerValues) -> None:
    best, keeps = values.word("save_strategy") == "best", values.is_on("load_best_model_at_end")
    schedule = values.word("lr_scheduler_type")
    metric = values.given.get("metric_for_best_model")
    if schedule in ("reduce_lr_on_plateau", "greedy") and values.word("eval_strategy") == "no":
        raise ToolkitError(
            f"--lr_scheduler_type {schedule} follows the evaluation loss, and --eval_strategy is no",
            hint="`--eval_strategy epoch`",
        )
    if keeps and not best:
        _check_evaluated_saves(values)
    if best and metric is None and not keeps:
        raise ToolkitError("--save_strategy best needs --metric_for_best_model", hint="`--metric_for_best_model loss`")
    if metric is not None and (best or keeps or schedule in ("reduce_lr_on_plateau", "greedy")):
        name = str(metric).removeprefix("eval_")
        if name not in EVALUATION_METRICS:
            raise ToolkitError(
                f"--metric_for_best_model is {shown(metric)}, and an evaluation has {', '.join(EVALUATION_METRICS)}",
                hint=did_you_mean(name, EVALUATION_METRICS, otherwise="`--metric_for_best_model loss`"),
            )


def _check_evaluated_saves(values: TrainerValues) -> None:
    """`--load_best_model_at_end` needs an evaluation at each save."""
    saves, evaluations = values.word("save_strategy"), values.word("eval_strategy")
    if saves != evaluations:
        raise ToolkitError(
            f"--load_best_model_at_end needs an evaluation at each save: --save_strategy is {saves}, --eval_strategy"
            f" {evaluations}",
            hint="`--save_strategy epoch --eval_strategy epoch`",
        )
    save, each = values.number("save_steps"), values.number("eval_steps") or values.number("logging_steps")
    if saves != "steps" or not save or not each or save % each == 0:
        return
    in_millionths = save < 1 and each < 1 and (save * 1_000_000) % (each * 1_000_000) == 0
    if not in_millionths:
        raise ToolkitError(
            f"--load_best_model_at_end needs an evaluation at each save: --save_steps {save:g} is no multiple of"
            f" --eval_steps {each:g}",
            hint=f"`--save_steps {2 * each:g}`",
        )


def _check_precision(values: TrainerValues, *, on_cpu: bool) -> None:
    for end in ("", "_full_eval"):
        if values.is_on(f"bf16{end}") and values.is_on(f"fp16{end}"):
            raise ToolkitError(f"--bf16{end} and --fp16{end} are both on", hint=f"leave out `--fp16{end}`")
    if on_cpu and values.is_on("tf32"):
        raise ToolkitError("--tf32 needs a GPU", hint="leave it out on a CPU")


def _check_schedule(values: TrainerValues, given: Mapping[str, Any]) -> None:
    """The keys of `--lr_scheduler_kwargs` are parameters of the schedule's function."""
    schedule = values.word("lr_scheduler_type")
    known = scheduler_arguments(schedule)
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


def _check_accelerator_config(given: Mapping[str, Any]) -> None:
    types = accelerator_config_types()
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


def _check_loader(values: TrainerValues) -> None:
    workers = values.number("dataloader_num_workers")
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        value = values.given.get(name)
        if not workers and value is not None and str(value).lower() not in FALSE_WORDS:
            raise ToolkitError(f"--{name} needs --dataloader_num_workers above 0", hint="`--dataloader_num_workers 2`")

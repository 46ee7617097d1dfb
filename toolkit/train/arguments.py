"""Flags, a YAML file, or both, into the three dataclasses of the training script.

accelerate launch ... -m toolkit.train config.yaml --max_steps 8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import HfArgumentParser, TrainingArguments

from toolkit.errors import ToolkitError
from toolkit.presets.trainer import chosen_precision
from toolkit.runs.arguments import DataArguments, ModelArguments
from toolkit.runs.argv import CONFIG_SUFFIXES, flag, read_arguments, read_config_file
from toolkit.runs.switches import check_switches, recomputes
from toolkit.train.promise import Promise
from toolkit.train.switches import engine_values, rate_lines, rate_values, scaled_learning_rate

Arguments = tuple[ModelArguments, DataArguments, TrainingArguments]


class _Parser(HfArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise ToolkitError(message, hint="see `python -m toolkit.train --help`")


def parse(argv: Sequence[str], promise: Promise) -> Arguments:
    """The arguments with what the preset and the machine decide filled in.

    Raises ToolkitError for an unknown or missing argument, or a value that transformers refuses.
    """
    given = read_arguments(argv) if "--help" not in argv else {}
    values = vars(_namespace(list(argv)))
    for name in ("model_name_or_path", "dataset", "output_dir"):
        if given.get(name) is None:
            raise ToolkitError(f"--{name} is missing", hint=f"add `--{name} ...`, or `{name}: ...` in a YAML file")
    values |= _decided_by_machine(given, promise)
    warnings = check_switches(
        given, promise.preset, num_processes=promise.world_size, on_cpu=bool(values.get("use_cpu"))
    )
    rate = scaled_learning_rate(values)
    recompute = recomputes(values)
    values |= engine_values(values, promise) | rate_values(rate, given)
    try:
        model, data, training = _parser().parse_dict(values)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ToolkitError(" ".join(str(error).split())) from None
    if promise.preset is not None and promise.preset.engine == "none":
        training._n_gpu = min(training._n_gpu, 1)  # with several visible GPUs the Trainer would run DataParallel
    # What run.json and the attestation ask for; no fields of transformers', so that it saves nothing of them.
    training.scaled_rate, training.recompute_by_engine = rate, recompute
    training.notes = [*(f"warning: {line}" for line in warnings), *rate_lines(rate, training)]
    return model, data, training


def _parser() -> _Parser:
    return _Parser((ModelArguments, DataArguments, TrainingArguments), prog="python -m toolkit.train")


def _namespace(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    if argv and argv[0].endswith(CONFIG_SUFFIXES):
        parser.set_defaults(**read_config_file(Path(argv.pop(0))))
    namespace: argparse.Namespace = parser.parse_args(argv)
    return namespace


def _decided_by_machine(given: dict[str, Any], promise: Promise) -> dict[str, Any]:
    """CPU where there is no GPU, and the preset's precision on a GPU (fp32 on a CPU) unless the user says."""
    decided: dict[str, Any] = {"remove_unused_columns": False}  # the collator reads columns that no model takes
    if not torch.cuda.is_available():
        decided["use_cpu"] = True
        os.environ["ACCELERATE_USE_CPU"] = "false" if _is_deepspeed() else "true"
    on_cpu = bool(decided.get("use_cpu") or given.get("use_cpu"))
    if on_cpu and promise.preset is not None and promise.preset.needs_gpu is not None:
        raise ToolkitError(f"preset {promise.preset.name!r} does not run on a CPU: {promise.preset.needs_gpu}")
    said: dict[str, Any] = {name: flag(given[name]) for name in ("bf16", "fp16") if name in given}
    promised = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # the launcher's
    if promise.preset is not None:
        promised = promise.preset.mixed_precision
    precision = chosen_precision(said, promised, on_cpu=on_cpu)
    decided |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    if "disable_tqdm" not in given:
        decided["disable_tqdm"] = True  # one line a step is printed instead, which a log file can hold
    if "ddp_find_unused_parameters" not in given:
        decided["ddp_find_unused_parameters"] = False  # the Trainer's default walks the graph once more every step
    return decided


def _is_deepspeed() -> bool:
    """With ACCELERATE_USE_CPU, accelerate turns a DeepSpeed run into DDP."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"

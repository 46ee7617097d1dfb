"""`toolkit plan --config FILE`: the model and the options of a file of axolotl, TRL or LLaMA-Factory, or of ours."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from toolkit.convert.conversion import TOOLS, convert_file
from toolkit.convert.draft import PRESET, Conversion, load_dialect
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_configuration
from toolkit.files.reading import is_file
from toolkit.job.argument_reading import CONFIG_SUFFIXES
from toolkit.job.job import Job
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PLANNED_ARGUMENTS, PlannedJob

CHOSEN = ("accumulate", "activation_checkpointing", "loss")  # by `PlannedJob.of`, from several arguments
# transformers' own loss, without Liger: all logits of a micro-batch at once. TRL's is chunked (trainer/sft_trainer.py).
FULL_LOSS_TOOLS = ("axolotl", "LLaMA-Factory")


class ConfiguredPlan(NamedTuple):
    """What to plan, and one line about where it comes from."""

    model: str
    options: PlanOptions
    described: str


def configured_plan(file: Path, model: str | None, options: PlanOptions, *, given: Collection[str]) -> ConfiguredPlan:
    """Return the options of a file, below those that are `given` on the command line, by the names of the fields.

    Raises ToolkitError for a file that cannot be read, that trains something else than text with supervision, or that
    names no model where the command line names none.
    """
    conversion = _conversion(file)
    job = Job.from_values(read_configuration(file) if conversion is None else conversion.arguments)
    planned = PlannedJob.of(job)
    if conversion is not None and conversion.tool in FULL_LOSS_TOOLS and planned.loss == "chunked":
        planned = replace(planned, loss="full")
    names = {each.name for each in fields(options)}
    values = {name: getattr(planned, name) for name in (*PLANNED_ARGUMENTS, *CHOSEN) if name in names}
    values |= {"num_train_epochs": job.value("num_train_epochs") or 3.0, "max_steps": job.value("max_steps")}
    data = [Path(name) for name in job.dataset if is_file(Path(name))] if isinstance(job.dataset, tuple) else []
    if len(data) == 1 and not planned.packing:  # packed rows are counted only if they are asked for
        values["dataset"] = data[0]
    described = f"{file}: our training arguments"
    if conversion is not None:
        values["preset"] = (conversion.preset,)
        values["num_processes"] = () if conversion.num_processes is None else (conversion.num_processes,)
        note = f" ({conversion.notes[PRESET]})" if PRESET in conversion.notes else ""
        described = f"{file}: {conversion.tool}, preset {conversion.preset}{note}, {values['loss']} loss"
    if job.global_batch_size is not None and "gradient_accumulation_steps" not in given:
        described += "; its global_batch_size is not read: `--gradient-accumulation-steps`"
    values = {name: value for name, value in values.items() if name not in given}
    if model is None and job.model_name_or_path is None:
        raise ToolkitError(f"{file} names no model", hint="`toolkit plan MODEL --config FILE`")
    return ConfiguredPlan(model or str(job.model_name_or_path), replace(options, **values), described)


def _conversion(file: Path) -> Conversion | None:
    """The file of another tool in our words; None for a file that has no setting of another tool."""
    if file.suffix in CONFIG_SUFFIXES:
        values = read_configuration(file).keys()
        others = any(values & set(load_dialect(tool).markers) for tool in TOOLS)
        if not others and not values & {"distributed_type", "compute_environment"}:
            return None
    return convert_file(file)

"""`toolkit plan --config FILE`: the model and the options of a file of axolotl, TRL or LLaMA-Factory, or of ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.convert.conversion import TOOLS, convert_settings, read_settings
from toolkit.convert.draft import PRESET, Conversion, load_dialect
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_configuration
from toolkit.files.paths import is_file
from toolkit.job.argument_reading import CONFIG_SUFFIXES
from toolkit.job.argument_values import check_type, is_true
from toolkit.job.job import Job
from toolkit.plan.methods import METHODS, SFT
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PLANNED_ARGUMENTS, PlannedJob

# Of TRL's methods other than SFT, by the names of the options; a command has them as text.
METHOD_SETTINGS: dict[str, tuple[str, Callable[[Any], object]]] = {
    **dict.fromkeys(("beta", "vllm_gpu_memory_utilization"), ("float", float)),
    **dict.fromkeys(("num_generations", "max_completion_length"), ("int", int)),
    **dict.fromkeys(("precompute_ref_log_probs", "vllm_enable_sleep_mode"), ("bool", is_true)),
}
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

    A TRL command has its method; of a TRL YAML, whose method is the command's, `--method` is to be given. Raises
    ToolkitError for a file that cannot be read, that trains something else than text, or that names no model where the
    command line names none.
    """
    values, conversion = _read(file)
    job = Job.from_values(values if conversion is None else conversion.arguments)
    planned = PlannedJob.of(job)
    if conversion is not None and conversion.tool in FULL_LOSS_TOOLS and planned.loss == "chunked":
        planned = replace(planned, loss="full")
    names = {each.name for each in fields(options)}
    found = {name: getattr(planned, name) for name in (*PLANNED_ARGUMENTS, *CHOSEN) if name in names}
    found |= {"num_train_epochs": job.value("num_train_epochs") or 3.0, "max_steps": job.value("max_steps")}
    method = options.method if "method" in given else str(values.get("method", SFT))
    data = [Path(name) for name in job.dataset if is_file(Path(name))] if isinstance(job.dataset, tuple) else []
    if method != SFT:
        found |= {"method": method, "use_liger_kernel": job.use_liger_kernel, "loss": "chunked"} | _method_options(
            values
        )
    if len(data) == 1 and not planned.packing:  # packed rows are counted only if they are asked for
        found["dataset"] = data[0]
    described = f"{file}: our training arguments"
    if conversion is not None:
        found |= {"preset": (conversion.preset,), "gradient_as_bucket_view": False}
        found["num_processes"] = () if conversion.num_processes is None else (conversion.num_processes,)
        note = f" ({conversion.notes[PRESET]})" if PRESET in conversion.notes else ""
        loss = f"{found['loss']} loss" if method == SFT else method
        described = f"{file}: {conversion.tool}, preset {conversion.preset}{note}, {loss}"
    if job.global_batch_size is not None and "gradient_accumulation_steps" not in given:
        described += "; its global_batch_size is not read: `--gradient-accumulation-steps`"
    found = {name: value for name, value in found.items() if name not in given}
    if model is None and job.model_name_or_path is None:
        raise ToolkitError(f"{file} names no model", hint="`toolkit plan MODEL --config FILE`")
    return ConfiguredPlan(model or str(job.model_name_or_path), replace(options, **found), described)


def _read(file: Path) -> tuple[Mapping[str, Any], Conversion | None]:
    """The settings of a file, and those of another tool in our words; None where no setting is another tool's."""
    if file.suffix in CONFIG_SUFFIXES:
        values = read_configuration(file)
        others = any(values.keys() & set(load_dialect(tool).markers) for tool in TOOLS)
        if not others and not values.keys() & {"distributed_type", "compute_environment"}:
            return values, None
    tool, values = read_settings(file, methods=[method for method in METHODS if method != SFT])
    return values, convert_settings(tool, values, file)


def _method_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of TRL's DPOConfig, GRPOConfig and others that decide memory."""
    uses_vllm = is_true(values.get("use_vllm", False))
    found: dict[str, Any] = {"vllm": str(values.get("vllm_mode", "colocate"))} if uses_vllm else {}  # TRL's default
    for name, (annotation, read) in METHOD_SETTINGS.items():
        if values.get(name) is not None and (uses_vllm or not name.startswith("vllm")):
            check_type(name, values[name], annotation)
            found[name] = read(values[name])
    return found

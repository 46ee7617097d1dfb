"""The plan of a run from its training arguments: one line before the launch, and `plan` in its run.json.

planned = plan_of_run(load_preset("zero2"), arguments, world_size=2, gpu=find_gpu("h100"))
line_of(planned)     # planned peak 61.20 GiB of 79.14 GiB a GPU (backward): fits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, find_gpu
from toolkit.hardware.machine import gpu_names
from toolkit.models.read import read_model
from toolkit.plan.job import OPTIMIZERS, Job
from toolkit.plan.planner import Plan, Request, make_plans
from toolkit.plan.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE
from toolkit.presets.preset import Preset
from toolkit.runs.argv import DEFAULT_BATCH, flag, integer
from toolkit.units import gib

OPTIMIZER_OF = {theirs: ours for ours, theirs in OPTIMIZERS.items()}
WORDS = {FITS: "fits", DOES_NOT_FIT: "does not fit", TOO_CLOSE: "too close to call"}


def job_of(arguments: dict[str, Any]) -> Job:
    """The planner's job of training arguments. Raises ToolkitError for an optimizer that it does not plan."""
    optimizer = str(arguments.get("optim") or OPTIMIZERS[Job().optimizer])
    if optimizer not in OPTIMIZER_OF:
        raise ToolkitError(f"--optim {optimizer} is not planned", hint=f"planned: {', '.join(OPTIMIZER_OF)}")
    recomputes = ("activation_checkpointing", "gradient_checkpointing")
    return Job(
        per_device_train_batch_size=integer(arguments, "per_device_train_batch_size", DEFAULT_BATCH),
        max_seq_length=integer(arguments, "max_seq_length", Job().max_seq_length),
        gradient_accumulation_steps=integer(arguments, "gradient_accumulation_steps", 1),
        activation_checkpointing=any(flag(arguments.get(name, False)) for name in recomputes),
        lora_r=integer(arguments, "lora_r", 0) or None,
        load_in_4bit=flag(arguments.get("load_in_4bit", False)),
        packing=flag(arguments.get("packing", False)),
        loss="fused" if flag(arguments.get("use_liger_kernel", False)) else "full",
        optimizer=OPTIMIZER_OF[optimizer],
    )


def plan_of_run(preset: Preset, arguments: dict[str, Any], *, world_size: int, gpu: Gpu) -> Plan:
    """For rows of full length on one machine. Raises ToolkitError for what is not planned, with the reason."""
    request = Request(
        shape=read_model(str(arguments["model_name_or_path"]), count=False),
        presets=[preset],
        world_sizes=[world_size],
        job=job_of(arguments),
        gpu=gpu,
    )
    return make_plans(request)[0]


def plan_here(
    preset: Preset, arguments: dict[str, Any], *, world_size: int, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """The plan for this machine's GPUs, said in one line, as a row; None, with the reason, where there is none."""
    try:
        names = sorted(set(gpu_names()))
        if len(names) != 1:
            raise ToolkitError(f"this machine's GPUs are {', '.join(names) or 'not known to nvidia-smi'}")
        plan = plan_of_run(preset, arguments, world_size=world_size, gpu=find_gpu(names[0]))
    except ToolkitError as error:
        say(f"not planned: {error.message}")
        return None
    say(line_of(plan))
    if plan.verdict == DOES_NOT_FIT:
        say("  hint: `toolkit recommend` names what fits; out of memory ends the run with exit code 3")
    return plan.as_row()


def line_of(plan: Plan) -> str:
    """What the plan says, for people."""
    peak, memory = plan.memory.planned_peak_bytes, plan.memory_bytes
    return f"planned peak {gib(peak)} of {gib(memory)} a GPU ({plan.memory.peak.phase}): {WORDS[plan.verdict]}"

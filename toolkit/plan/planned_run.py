"""Plan of a training run from its training arguments: a line before the launch, and `plan` in its run.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, find_gpu
from toolkit.hardware.gpus import gpu_names
from toolkit.job.argument_values import as_list
from toolkit.job.defaults import LOSS_CHUNK_TOKENS, MAX_SEQ_LENGTH
from toolkit.job.script_arguments import (
    accumulate_argument,
    accumulation_steps,
    degrees_given,
    flag,
    integer,
    micro_batch_size,
    read_method,
    uses_activation_checkpointing,
)
from toolkit.models.lora import ALL_LINEAR
from toolkit.models.read_model import read_model
from toolkit.plan.job import TrainingJob
from toolkit.plan.memory_verdict import DOES_NOT_FIT, FITS, TOO_CLOSE
from toolkit.plan.planner import Plan, PlanRequest, make_plans
from toolkit.presets.compatibility import Method
from toolkit.presets.preset import Preset
from toolkit.presets.support import check_supported
from toolkit.units import gib

VERDICT_TEXT = {FITS: "fits", DOES_NOT_FIT: "does not fit", TOO_CLOSE: "too close to call"}


def job_from_arguments(arguments: dict[str, Any]) -> TrainingJob:
    """Return the planner's job for training arguments. Raises ToolkitError for an optimizer that is not planned.

    >>> job_from_arguments({"max_seq_length": "512", "lora_r": "8"}).lora_r
    8
    """
    optim = str(arguments.get("optim") or TrainingJob().optim)
    check_supported(None, Method(optim=optim), purpose="plan")
    return TrainingJob(
        per_device_train_batch_size=micro_batch_size(arguments),
        max_seq_length=integer(arguments, "max_seq_length", MAX_SEQ_LENGTH),
        gradient_accumulation_steps=accumulation_steps(arguments),
        accumulate=accumulate_argument(arguments),
        activation_checkpointing=uses_activation_checkpointing(arguments),
        lora_r=integer(arguments, "lora_r", 0) or None,
        lora_target_modules=tuple(map(str, as_list(arguments.get("lora_target_modules")))) or ALL_LINEAR,
        load_in_4bit=flag(arguments.get("load_in_4bit", False)),
        packing=flag(arguments.get("packing", False)),
        async_save=flag(arguments.get("async_save", False)),
        attn_implementation=read_method(arguments).attn_implementation,
        loss=planned_loss(arguments),
        loss_chunk_tokens=integer(arguments, "loss_chunk_tokens", LOSS_CHUNK_TOKENS),
        optim=optim,
        **degrees_given(arguments),  # type: ignore[arg-type]
    )


def planned_loss(arguments: dict[str, Any]) -> str:
    """Return the planner's name of the loss that these training arguments choose.

    >>> planned_loss({"loss": "auto", "use_liger_kernel": "true"})
    'fused'
    """
    given = str(arguments.get("loss") or "auto")
    if given != "auto":
        return given
    return "fused" if flag(arguments.get("use_liger_kernel", False)) else "chunked"


def plan_run(preset: Preset, arguments: dict[str, Any], *, world_size: int, gpu: Gpu) -> Plan:
    """Return the plan for rows of full length on one node. Raises ToolkitError, with the reason, if there is none."""
    request = PlanRequest(
        shape=read_model(str(arguments["model_name_or_path"]), count=False),
        presets=[preset],
        world_sizes=[world_size],
        job=job_from_arguments(arguments),
        gpu=gpu,
    )
    return make_plans(request)[0]


def plan_run_here(
    preset: Preset, arguments: dict[str, Any], *, world_size: int, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return the plan for this node's GPUs as a row of `toolkit plan --json`, or None if it cannot be planned.

    Passes one line about the plan, or the reason for which there is none, to `say`.
    """
    try:
        names = sorted(set(gpu_names()))
        if len(names) != 1:
            raise ToolkitError(f"the GPUs of this node are {', '.join(names) or 'not known to nvidia-smi'}")
        plan = plan_run(preset, arguments, world_size=world_size, gpu=find_gpu(names[0]))
    except ToolkitError as error:
        say(f"not planned: {error.message}")
        return None
    say(plan_line(plan))
    if plan.verdict == DOES_NOT_FIT:
        say("  hint: `toolkit recommend` names presets that fit; a run that goes out of memory has exit code 3")
    return plan.as_row()


def plan_line(plan: Plan) -> str:
    """Return one line about planned peak, GPU memory and verdict."""
    peak, memory = gib(plan.memory.planned_peak_bytes), gib(plan.gpu_memory_bytes)
    return f"planned peak {peak} of {memory} per GPU ({plan.memory.peak.phase}): {VERDICT_TEXT[plan.verdict]}"

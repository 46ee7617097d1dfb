"""What the planner predicts for a row: one rank's peak, as allocated and as the GPU shows it.

planned_bytes(comparison, "zero2", 2, shape=shape)["planned_peak_bytes"]
"""

from __future__ import annotations

import contextlib
from typing import Any

from toolkit.compare.trials import Comparison
from toolkit.errors import ToolkitError
from toolkit.launch.preflight import DEFAULT_BATCH
from toolkit.models.shape import ModelShape
from toolkit.plan.job import OPTIMIZERS, Job, check_job
from toolkit.plan.memory import plan_memory
from toolkit.presets import load_preset
from toolkit.runs.argv import flag, integer

Facts = dict[str, int | None]
NOTHING: Facts = {"planned_peak_bytes": None, "planned_allocated_bytes": None}


def planned_bytes(comparison: Comparison, preset: str, num_processes: int, *, shape: ModelShape | None) -> Facts:
    """For rows of full length on GPUs; None on a CPU, without a shape, or for what the planner does not know."""
    if comparison.cpu or shape is None:
        return NOTHING
    with contextlib.suppress(ToolkitError):
        job = job_of(comparison.arguments(preset, num_processes))
        check_job(job, shape)
        plan = plan_memory(shape, load_preset(comparison.loads[preset]), world_size=num_processes, job=job)
        allocated = plan.peak.allocated_bytes
        return {"planned_peak_bytes": plan.planned_peak_bytes, "planned_allocated_bytes": allocated}
    return NOTHING


def job_of(arguments: dict[str, Any]) -> Job:
    """The planner's job of training arguments; `check_job` refuses an optimizer that is not planned."""
    recomputes = any(
        flag(arguments.get(name, False)) for name in ("activation_checkpointing", "gradient_checkpointing")
    )
    optim = str(arguments.get("optim") or OPTIMIZERS[Job().optimizer])
    planned = {theirs: ours for ours, theirs in OPTIMIZERS.items()}
    return Job(
        per_device_train_batch_size=integer(arguments, "per_device_train_batch_size", DEFAULT_BATCH),
        max_seq_length=integer(arguments, "max_seq_length", Job().max_seq_length),
        gradient_accumulation_steps=integer(arguments, "gradient_accumulation_steps", 1),
        activation_checkpointing=recomputes,
        lora_r=integer(arguments, "lora_r", 0) or None,
        load_in_4bit=flag(arguments.get("load_in_4bit", False)),
        packing=flag(arguments.get("packing", False)),
        optimizer=planned.get(optim, optim),
    )

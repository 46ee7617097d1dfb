"""Plan of a training run from its job: a line before the launch, and `plan` in its run.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, find_gpu
from toolkit.hardware.gpus import gpu_names
from toolkit.job.job import Job
from toolkit.models.read_model import read_model
from toolkit.plan.memory_verdict import DOES_NOT_FIT, FITS, TOO_CLOSE
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import Plan, PlanRequest, make_plans
from toolkit.presets.preset import Preset
from toolkit.units import gib

VERDICT_TEXT = {FITS: "fits", DOES_NOT_FIT: "does not fit", TOO_CLOSE: "too close to call"}


def plan_run(preset: Preset, job: Job, *, world_size: int, gpu: Gpu) -> Plan:
    """Return the plan for rows of full length on one node. Raises ToolkitError, with the reason, if there is none."""
    request = PlanRequest(
        shape=read_model(str(job.model_name_or_path), count=False),
        presets=[preset],
        world_sizes=[world_size],
        job=PlannedJob.of(job),
        gpu=gpu,
    )
    return make_plans(request)[0]


def plan_run_here(preset: Preset, job: Job, *, world_size: int, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the plan for this node's GPUs as a row of `toolkit plan --json`, or None if it cannot be planned.

    Passes one line about the plan, or the reason for which there is none, to `say`.
    """
    try:
        names = sorted(set(gpu_names()))
        if len(names) != 1:
            raise ToolkitError(f"the GPUs of this node are {', '.join(names) or 'not known to nvidia-smi'}")
        plan = plan_run(preset, job, world_size=world_size, gpu=find_gpu(names[0]))
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

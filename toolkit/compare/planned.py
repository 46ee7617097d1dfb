"""What the planner predicts for a row: one rank's peak, as allocated and as the GPU shows it.

planned_bytes(comparison, "zero2", 2, shape=shape)["planned_peak_bytes"]
"""

from __future__ import annotations

import contextlib

from toolkit.compare.trials import Comparison
from toolkit.errors import ToolkitError
from toolkit.models.shape import ModelShape
from toolkit.plan.job import check_job
from toolkit.plan.memory import plan_memory
from toolkit.plan.of_run import job_of
from toolkit.presets import load_preset

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

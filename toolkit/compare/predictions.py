"""What is known of a trial before it runs: the planner's memory, and its duration.

The duration comes from trials in the ledger, else from the planner's step time. On a CPU none is known before a first
trial.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from toolkit.compare.ledger import LedgerRecord, TrialRecord
from toolkit.compare.rows import RowKey
from toolkit.compare.specification import ComparisonSpec
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.launch.preflight import check_dataset
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob, TrainingSetup, check_planned_job
from toolkit.plan.step_time import step_time
from toolkit.presets.preset import load_preset

# When the training script ends a run early (toolkit/observe/early_stopping.py): it decides after every fifth step
# once ten steps are timed, and all ranks end two steps later.
MIN_TIMED_STEPS, DECISION_INTERVAL, STEPS_AFTER_DECISION = 10, 5, 2


class ExpectedDuration(NamedTuple):
    """Seconds of one trial, and their source."""

    low: float
    high: float
    source: Literal["trials", "planner", "other trials"]


def read_shape(model: str) -> ModelShape | None:
    """Return a model's shape; None if its configuration cannot be read or its architecture is unknown."""
    with contextlib.suppress(ToolkitError, OSError, ImportError):
        return read_model(model)
    return None


def planned_memory(
    spec: ComparisonSpec, row: RowKey, *, shape: ModelShape | None
) -> tuple[int, int] | tuple[None, None]:
    """Return the peak of one rank that the planner predicts on GPUs for sequences of full length.

    First as the driver reports it for the process, then what the allocator holds of it; both are None on a CPU and
    without a shape.
    """
    if spec.cpu or shape is None:
        return None, None
    with contextlib.suppress(ToolkitError):
        job = PlannedJob.of(spec.job(row))
        check_planned_job(job, shape)
        preset = load_preset(spec.preset_sources[row.preset])
        plan = plan_memory(shape, preset, world_size=row.world_size, job=job)
        return plan.planned_peak_bytes, plan.peak.allocated_bytes
    return None, None


def expected_duration(
    row: RowKey,
    records: Mapping[str, LedgerRecord],
    spec: ComparisonSpec,
    *,
    shape: ModelShape | None = None,
    gpu: Gpu | None = None,
) -> ExpectedDuration | None:
    """Return the seconds of one trial of the row, lowest and highest; None if nothing is known.

    The row's own trials in the ledger come first, then the planner's step time, then the trials of other rows. Probes
    and side runs count for nothing: they have few steps.
    """
    trials = [record for record in records.values() if isinstance(record, TrialRecord) and record.completed]
    seconds = [(trial.key == row, trial.wall_seconds) for trial in trials if trial.wall_seconds]
    if own := [known for is_own, known in seconds if is_own]:
        return ExpectedDuration(min(own), max(own), "trials")
    if planned := _planned_duration(row, spec, shape, gpu):
        return planned
    others = [known for _, known in seconds]
    return ExpectedDuration(min(others), max(others), "other trials") if others else None


def _planned_duration(
    row: RowKey, spec: ComparisonSpec, shape: ModelShape | None, gpu: Gpu | None
) -> ExpectedDuration | None:
    """The steps alone, with sequences of full length; what comes before and after them is not planned."""
    row_job = spec.job(row)
    steps = row_job.max_steps
    if spec.cpu or shape is None or gpu is None or steps <= 0:
        return None
    with contextlib.suppress(ToolkitError):
        job, preset = PlannedJob.of(row_job), load_preset(spec.preset_sources[row.preset])
        setup = TrainingSetup(shape=shape, preset=preset, world_size=row.world_size, job=job)
        per_node = job.gpus_per_node if spec.processes_per_node is None else spec.processes_per_node
        planned = step_time(setup, Interconnect(gpu=gpu, world_size=row.world_size, gpus_per_node=per_node))
        if planned is not None:
            low, high = planned.step_seconds
            limit = math.inf if spec.trial_minutes is None else 60 * spec.trial_minutes
            fewest = steps
            if spec.target_interval is not None:
                decisions = math.ceil((spec.untimed_steps + MIN_TIMED_STEPS) / DECISION_INTERVAL)
                fewest = min(steps, decisions * DECISION_INTERVAL + STEPS_AFTER_DECISION)
            return ExpectedDuration(low * fewest, min(high * steps, limit), "planner")
    return None


def search_bounds(spec: ComparisonSpec, row: RowKey) -> tuple[int, int]:
    """Return where a row's search starts (the job's own micro-batch) and ends (what the option or the data allow)."""
    job, cap = spec.job(row), spec.find_max_batch or 1
    dataset_rows = check_dataset(job)
    if dataset_rows is not None:
        cap = max(1, min(cap, dataset_rows // (spec.data_parallel_size(row) * job.gradient_accumulation_steps)))
    return min(job.per_device_train_batch_size, cap), cap

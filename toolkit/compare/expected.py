"""How long a trial may take, before it is paid for: from trials in the ledger, or from the planner's step time.

    expected_time(trial, ledger, comparison, shape=shape, gpu=find_gpu("h100"))    # Expected(30.1, 92.8, "planner")

On a CPU nobody knows before a first trial.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from toolkit.compare.trials import Comparison, Trial, row_name
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.models.shape import ModelShape
from toolkit.plan.links import Cluster
from toolkit.plan.of_run import job_of
from toolkit.plan.step_time import step_time
from toolkit.plan.traffic import traffic_of
from toolkit.presets import load_preset
from toolkit.runs import status
from toolkit.runs.argv import integer

Row = dict[str, Any]
Source = Literal["trials", "planner", "other trials"]
# As the training script ends a run early (`toolkit/train/enough.py`): asked after every fifth step from ten timed
# steps on, and over two steps later.
LEAST_TIMED_STEPS, DECIDE_EVERY, READ_AFTER = 10, 5, 2


class Expected(NamedTuple):
    """Seconds from low to high, and what says so."""

    low: float
    high: float
    source: Source


def expected_time(
    trial: Trial,
    ledger: Mapping[str, Row],
    comparison: Comparison,
    *,
    shape: ModelShape | None = None,
    gpu: Gpu | None = None,
) -> Expected | None:
    """Its row's trials in the ledger, else the planner's steps, else other rows' trials; None if nothing is known."""
    done = [row for row in ledger.values() if _is_trial(row) and row["status"] == status.COMPLETED]
    same = [row for row in done if (row["preset"], row["world_size"]) == (trial.preset, trial.num_processes)]
    return _of_trials(same, "trials") or _planned(trial, comparison, shape, gpu) or _of_trials(done, "other trials")


def _is_trial(row: Row) -> bool:
    """Neither a probe nor a run beside the trials: those have few steps."""
    name = row_name(row.get("preset", ""), row.get("world_size", 0))
    return bool(row.get("wall_seconds")) and row["trial"].startswith(f"{name}-r")


def _of_trials(rows: Iterable[Row], source: Source) -> Expected | None:
    walls = [row["wall_seconds"] for row in rows]
    return Expected(min(walls), max(walls), source) if walls else None


def _planned(trial: Trial, comparison: Comparison, shape: ModelShape | None, gpu: Gpu | None) -> Expected | None:
    """Its steps, each of rows of full length; what stands before and after them is not in it."""
    arguments = comparison.arguments(trial.preset, trial.num_processes)
    steps = integer(arguments, "max_steps", 0)
    if comparison.cpu or shape is None or gpu is None or steps < 1:
        return None
    with contextlib.suppress(ToolkitError):
        job, preset = job_of(arguments), load_preset(comparison.loads[trial.preset])
        speed = step_time(
            traffic_of(shape, preset, job, world_size=trial.num_processes),
            Cluster(gpu=gpu, world_size=trial.num_processes),
            per_device_train_batch_size=job.per_device_train_batch_size,
            seq_length=job.max_seq_length,
        )
        if speed is not None:
            low, high = speed.step_seconds
            return Expected(low * _fewest_steps(comparison, steps), _capped(comparison, high * steps), "planner")
    return None


def _fewest_steps(comparison: Comparison, steps: int) -> int:
    """After how many a trial can end because its median step is known."""
    if comparison.target_interval is None:
        return steps
    asked = DECIDE_EVERY * math.ceil((comparison.untimed_steps + LEAST_TIMED_STEPS) / DECIDE_EVERY)
    return min(steps, asked + READ_AFTER)


def _capped(comparison: Comparison, seconds: float) -> float:
    return seconds if comparison.trial_minutes is None else min(seconds, 60 * comparison.trial_minutes)

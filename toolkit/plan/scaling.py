"""Larger jobs on paper: tokens a second by world size, pipeline bubbles, and what failures cost.

    >>> round(young_daly_seconds(save_seconds=60, mean_seconds_to_failure=86_400))
    3160

Arithmetic on published formulas; no run of ours stands behind a figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.plan.links import Interval
from toolkit.plan.step_time import StepTime
from toolkit.units import SECONDS_PER_HOUR

LARGEST_WORLD_SIZE = 1024
# Llama 3's training met 419 unexpected interruptions in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783,
# table 5): one in 50,700 hours of a GPU.
GPU_HOURS_TO_FAILURE = 54 * 24 * 16_384 / 419


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One world size on the curve, the micro-batch of each GPU unchanged."""

    world_size: int
    tokens_per_second: Interval
    scaling_efficiency: Interval
    """Tokens a second and GPU over those of the smallest world size at the same end of the interval."""
    failure_loss: float
    """Share of the time that failures take away, at the best interval between checkpoints."""


def scaling_curve(
    speed_of: Callable[[int], StepTime | None], world_sizes: Sequence[int], *, save_seconds: float = 60.0
) -> list[ScalingPoint]:
    """Weak scaling: the global batch grows with the world size."""
    speeds = [(size, speed) for size in world_sizes if (speed := speed_of(size)) is not None]
    points = []
    for size, speed in speeds:
        rates, first = speed.tokens_per_second_per_gpu, speeds[0][1].tokens_per_second_per_gpu
        points.append(
            ScalingPoint(
                world_size=size,
                tokens_per_second=(rates[0] * size, rates[1] * size),
                scaling_efficiency=(rates[0] / first[0], rates[1] / first[1]),
                failure_loss=failure_loss(
                    save_seconds=save_seconds, mean_seconds_to_failure=GPU_HOURS_TO_FAILURE * SECONDS_PER_HOUR / size
                ),
            )
        )
    return points


def doubled(world_size: int, *, largest: int = LARGEST_WORLD_SIZE) -> list[int]:
    """`world_size` and its doubles up to the largest."""
    return [world_size * 2**power for power in range(max(math.floor(math.log2(largest / world_size)), 0) + 1)]


def pipeline_bubble(*, stages: int, micro_batches: int, schedule: str = "1f1b", chunks: int = 1) -> float:
    """Idle share of a step's time in a pipeline.

    GPipe and 1F1B idle (p-1) of m+p-1 slots; interleaved 1F1B a v-th of that over the ideal time (Narayanan et al.,
    https://arxiv.org/abs/2104.04473); ZB1P a third, ZBV none (https://arxiv.org/abs/2401.10241).
    """
    over_ideal = {
        "gpipe": (stages - 1) / micro_batches,
        "1f1b": (stages - 1) / micro_batches,
        "interleaved": (stages - 1) / (chunks * micro_batches),
        "zb1p": (stages - 1) / (3 * micro_batches),
        "zbv": 0.0,
    }
    if schedule not in over_ideal:
        raise ToolkitError(f"no pipeline schedule {schedule!r}, only {', '.join(over_ideal)}")
    return over_ideal[schedule] / (1 + over_ideal[schedule])


def young_daly_seconds(*, save_seconds: float, mean_seconds_to_failure: float) -> float:
    """Between two checkpoints, so that saving and lost work cost least: √(2·δ·M) - δ (Daly 2006, first order)."""
    return max(math.sqrt(2 * save_seconds * mean_seconds_to_failure) - save_seconds, save_seconds)


def failure_loss(*, save_seconds: float, mean_seconds_to_failure: float, restart_seconds: float = 600.0) -> float:
    """Share of the time spent on saving, on work done again, and on restarts; at most 1."""
    interval = young_daly_seconds(save_seconds=save_seconds, mean_seconds_to_failure=mean_seconds_to_failure)
    saving = save_seconds / (interval + save_seconds)
    again = (interval / 2 + restart_seconds) / mean_seconds_to_failure
    return min(saving + again, 1.0)

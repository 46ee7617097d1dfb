"""Planned tokens per second by world size, and what failures cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.plan.failures import FailingJob
from toolkit.plan.interconnect import Range
from toolkit.plan.step_time import StepTime

LARGEST_WORLD_SIZE = 1024
HOURS_PER_DAY = 24
# Llama 3's training had 419 unexpected interruptions in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783,
# table 5): one per 50,700 GPU-hours.
GPU_HOURS_TO_FAILURE = 54 * 24 * 16_384 / 419


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One world size of a scaling curve, with the same micro-batch per GPU at each."""

    world_size: int
    tokens_per_second: Range
    scaling_efficiency: Range
    """Tokens per second and GPU over those of the smallest world size, at the same end of the range."""
    failure_loss: float
    """Share of the time lost to failures, at the best interval between checkpoints."""


def scaling_curve(
    step_time_at: Callable[[int], StepTime | None], world_sizes: Sequence[int], *, save_seconds: float = 60.0
) -> list[ScalingPoint]:
    """Return the weak-scaling curve, on which the global batch grows with the world size.

    World sizes without a step time are left out. `save_seconds` is the time that saving a checkpoint takes.
    """
    known = [(size, speed) for size in world_sizes if (speed := step_time_at(size)) is not None]
    points = []
    for size, speed in known:
        rates, smallest = speed.tokens_per_second_per_gpu, known[0][1].tokens_per_second_per_gpu
        points.append(
            ScalingPoint(
                world_size=size,
                tokens_per_second=(rates[0] * size, rates[1] * size),
                scaling_efficiency=(rates[0] / smallest[0], rates[1] / smallest[1]),
                failure_loss=failure_loss(size, save_seconds=save_seconds),
            )
        )
    return points


def doublings(world_size: int, *, largest: int = LARGEST_WORLD_SIZE) -> list[int]:
    """Return `world_size` doubled again and again, up to the largest.

    >>> doublings(6, largest=30)
    [6, 12, 24]
    """
    return [world_size * 2**power for power in range(max(math.floor(math.log2(largest / world_size)), 0) + 1)]


def failure_loss(world_size: int, *, save_seconds: float, restart_seconds: float = 600.0) -> float:
    """Return the share of the time spent on saving, on repeated work and on restarts, at Young's interval.

    >>> round(failure_loss(1024, save_seconds=60), 3)
    0.029
    """
    job = FailingJob(
        nodes=world_size,  # a GPU stands for a node: only their product with the rate counts
        failures_per_1000_node_days=1000 * HOURS_PER_DAY / GPU_HOURS_TO_FAILURE,
        checkpoint_seconds=save_seconds,
        restart_seconds=restart_seconds,
    )
    return 1 - job.exact_time_ratio

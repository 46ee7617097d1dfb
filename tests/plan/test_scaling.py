"""Scaling curves and the cost of failures."""

from __future__ import annotations

import pytest

from toolkit.plan.scaling import doublings, failure_loss, scaling_curve
from toolkit.plan.step_time import StepTime


def speed_at(world_size: int) -> StepTime | None:
    """1,000 to 2,000 tokens per second and GPU on 8 GPUs, falling with the number of GPUs; unknown on 64."""
    low, high = 1000 * (8 / world_size) ** 0.1, 2000 * (8 / world_size) ** 0.05
    same = (1.0, 1.0)
    return (
        None
        if world_size == 64
        else StepTime(
            step_seconds=same,
            compute_seconds=same,
            communication_seconds=same,
            offload_seconds=(0.0, 0.0),
            optimizer_seconds=same,
            tokens_per_second_per_gpu=(low, high),
            mfu=(0.1, 0.2),
            communication_bytes_per_step=0,
            tokens_per_step_per_gpu=1024,
            flops_per_token=1,
        )
    )


def test_world_sizes_are_doubled_up_to_1024() -> None:
    assert doublings(8) == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert doublings(6, largest=30) == [6, 12, 24]


def test_scaling_efficiency_is_relative_to_the_smallest_world_size() -> None:
    points = scaling_curve(speed_at, doublings(8))
    assert [point.world_size for point in points] == [8, 16, 32, 128, 256, 512, 1024]  # 64 has no step time
    assert points[0].scaling_efficiency == (1.0, 1.0)
    assert points[0].tokens_per_second == (8000, 16000)
    assert points[1].scaling_efficiency == pytest.approx((0.5**0.1, 0.5**0.05))
    assert points[-1].failure_loss > points[0].failure_loss > 0


def test_failures_cost_saves_half_an_interval_and_a_restart() -> None:
    """On 1,024 GPUs: one failure every 49.5 hours, so a save every √(2·60·178,164) = 4,624 s."""
    mean = 54 * 24 * 16_384 / 419 / 1024 * 3600
    interval = (2 * 60 * mean) ** 0.5
    first_order = 60 / interval + (interval / 2 + 600) / mean
    assert failure_loss(1024, save_seconds=60) == pytest.approx(first_order, rel=0.02)

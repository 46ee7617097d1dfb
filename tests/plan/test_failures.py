"""Closed forms of failures and checkpoints against published figures, the known miss included.

RSC-1 is Meta's cluster of 16,000 A100s with 6.5 failures per 1,000 node-days, and 5 minutes to restart a job
(https://arxiv.org/abs/2410.21680).
"""

from typing import Any

import pytest

from toolkit.plan.failures import FailingJob, daly_interval, erlang_loss, young_interval

HOUR = 3600


def rsc1_job(gpus: int, **changes: Any) -> FailingJob:
    values = {"failures_per_1000_node_days": 6.5, "checkpoint_seconds": 60.0, "restart_seconds": 300.0} | changes
    return FailingJob(nodes=gpus // 8, **values)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.80), (131_072, 0.225)])
def test_mean_time_between_failures_is_metas(gpus: int, hours: float) -> None:
    assert rsc1_job(gpus).mean_seconds_between_failures / HOUR == pytest.approx(hours, rel=0.005)


@pytest.mark.parametrize(("save_seconds", "ratio"), [(10.0, 0.920), (60.0, 0.858)])
def test_effective_time_ratio_of_12000_gpus_is_metas(save_seconds: float, ratio: float) -> None:
    job = rsc1_job(12_000, checkpoint_seconds=save_seconds)
    assert job.effective_time_ratio == pytest.approx(ratio, abs=0.001)
    assert job.exact_time_ratio == pytest.approx(ratio, abs=0.002)


def test_dalys_interval_is_better_than_youngs_where_saves_are_slow() -> None:
    job = rsc1_job(131_072)
    mean = job.mean_seconds_between_failures
    young, daly = (job.at_interval(find(60.0, mean)) for find in (young_interval, daly_interval))
    assert daly.exact_time_ratio > young.exact_time_ratio
    assert daly_interval(3 * mean, mean) == mean


def test_a_job_that_fails_faster_than_it_restarts_makes_no_progress_to_first_order() -> None:
    job = rsc1_job(10_000_000)
    assert job.effective_time_ratio == 0
    assert 0 < job.exact_time_ratio < 0.01
    assert rsc1_job(10_000_000, restart_seconds=10.0**6).exact_time_ratio == 0


def test_spares_cost_goodput_and_save_more() -> None:
    none, some, many = (
        rsc1_job(12_000, spare_nodes=spares, repair_seconds=24.0 * HOUR).goodput for spares in (0, 15, 600)
    )
    assert none < many < some
    assert erlang_loss(5, 3.0) == pytest.approx(0.1101, abs=0.0001)  # of Erlang's tables
    assert erlang_loss(10, 5.0) == pytest.approx(0.0184, abs=0.0001)

"""The simulation against the closed forms that hold exactly, and single runs that can be followed."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.plan.failures import FailingJob
from toolkit.simulate.failure_monte_carlo import SimulatedFailures, simulate_failures

HOUR = 3600


def job(**changes: Any) -> FailingJob:
    values: dict[str, Any] = {"nodes": 1500, "failures_per_1000_node_days": 6.5}
    return FailingJob(**{**values, "checkpoint_seconds": 60.0, "restart_seconds": 300.0, **changes})


def simulated(failing: FailingJob, **changes: Any) -> SimulatedFailures:
    return simulate_failures(failing, **{"days": 365.0, "runs": 10, "seed": 0, **changes})


@pytest.mark.parametrize(
    "failing",
    [
        job(),
        job(nodes=10_000),
        job(nodes=100, checkpoint_seconds=600.0),
        job(detection_seconds=900.0),
        job(interval_seconds=4.0 * HOUR),
        job(restart_seconds=0.0, interval_seconds=60.0),
    ],
    ids=["12k GPUs", "80k GPUs", "slow saves", "slow detection", "rare saves", "frequent saves"],
)
def test_the_simulation_agrees_with_the_exact_closed_form(failing: FailingJob) -> None:
    found = simulated(failing)
    assert found.standard_error is not None
    assert found.effective_time_ratio == pytest.approx(failing.exact_time_ratio, abs=5 * found.standard_error)
    assert found.standard_error < 0.006


def test_the_simulation_agrees_with_erlangs_formula_for_spares() -> None:
    failing = job(spare_nodes=12, repair_seconds=24.0 * HOUR)
    found = simulated(failing, runs=20)
    assert 1 - found.stopped_fraction == pytest.approx(failing.availability, abs=0.005)
    assert found.effective_time_ratio == pytest.approx(failing.exact_time_ratio * failing.availability, abs=0.006)


def test_failures_come_at_their_rate_and_a_seed_repeats_them() -> None:
    found = simulated(job(), runs=20)
    assert found.failures == pytest.approx(365 * 24 * HOUR / job().mean_seconds_between_failures, rel=0.01)
    assert simulated(job(), runs=20) == found
    assert simulated(job(), runs=20, seed=1) != found


def test_without_failures_only_saves_cost_time() -> None:
    reliable = job(failures_per_1000_node_days=1e-9, interval_seconds=540.0)
    found = simulated(reliable, days=1.0, runs=1)
    assert (found.effective_time_ratio, found.failures, found.standard_error) == (0.9, 0, None)


def test_a_year_of_10000_nodes_is_simulated_in_a_few_hundred_thousand_events() -> None:
    found = simulated(job(nodes=10_000))
    assert found.failures * found.runs < 250_000

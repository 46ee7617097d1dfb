"""Monte Carlo of a job that fails: the same assumptions as the closed forms, without their approximations.

    >>> from toolkit.plan.failures import FailingJob
    >>> job = FailingJob(nodes=1500, failures_per_1000_node_days=6.5, checkpoint_seconds=60, restart_seconds=300)
    >>> found = simulate_failures(job, days=30, runs=20, seed=0)
    >>> abs(found.effective_time_ratio - job.effective_time_ratio) < 0.01
    True

Times between failures are exponential. A failure during a restart starts another one; while a job is stopped, none of
its nodes fails.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from dataclasses import dataclass

from toolkit.plan.failures import SECONDS_PER_DAY, FailingJob


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedFailures:
    """Means over independent runs of equal length."""

    runs: int
    days: float
    seed: int
    effective_time_ratio: float
    """Progress over all of the time, also that without enough nodes."""
    standard_error: float | None
    """Of the ratio; None for one run."""
    failures: float
    """Per run."""
    stopped_fraction: float
    """Share of the time in which nodes are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    ratio: float
    failures: int
    stopped_fraction: float


def simulate_failures(job: FailingJob, *, days: float, runs: int, seed: int) -> SimulatedFailures:
    """Return the means of `runs` runs of `days` days each."""
    source = random.Random(seed)
    found = [_simulate(job, days * SECONDS_PER_DAY, source) for _ in range(runs)]
    ratios = [run.ratio for run in found]
    return SimulatedFailures(
        runs=runs,
        days=days,
        seed=seed,
        effective_time_ratio=statistics.fmean(ratios),
        standard_error=statistics.stdev(ratios) / math.sqrt(runs) if runs > 1 else None,
        failures=statistics.fmean(run.failures for run in found),
        stopped_fraction=statistics.fmean(run.stopped_fraction for run in found),
    )


def _simulate(job: FailingJob, horizon: float, source: random.Random) -> _Run:
    """From one failure to the next: whole intervals count, the one that it interrupts is lost."""
    rate, training = 1 / job.mean_seconds_between_failures, job.interval
    interval = training + job.checkpoint_seconds
    now = progress = stopped = starting = 0.0
    failures, in_repair = 0, list[float]()
    while True:
        lasted = source.expovariate(rate)
        if now + lasted >= horizon:
            progress += _training(horizon - now - starting, training, interval)
            return _Run(ratio=progress / horizon, failures=failures, stopped_fraction=stopped / horizon)
        if lasted > starting:
            progress += (lasted - starting) // interval * training
        now += lasted + job.detection_seconds
        failures += 1
        if job.spare_nodes is not None:
            waited = _wait_for_node(in_repair, now, job.spare_nodes, job.repair_seconds)
            stopped += min(waited, max(0.0, horizon - now))
            now += waited
        if now >= horizon:
            return _Run(ratio=progress / horizon, failures=failures, stopped_fraction=stopped / horizon)
        starting = job.restart_seconds


def _training(seconds: float, training: float, interval: float) -> float:
    """Training in what is left of the run, the interval that the end interrupts included."""
    if seconds <= 0:
        return 0.0
    whole, rest = divmod(seconds, interval)
    return whole * training + min(rest, training)


def _wait_for_node(in_repair: list[float], now: float, spares: int, repair_seconds: float) -> float:
    """Add the node that has failed, and return the time until the job has all of its nodes."""
    while in_repair and in_repair[0] <= now:
        heapq.heappop(in_repair)
    heapq.heappush(in_repair, now + repair_seconds)
    return in_repair[0] - now if len(in_repair) > spares else 0.0

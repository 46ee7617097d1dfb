"""From the options of `toolkit simulate failures` to closed forms and a Monte Carlo simulation side by side.

    >>> job = FailingJob(nodes=1500, failures_per_1000_node_days=6.5, checkpoint_seconds=60, restart_seconds=300)
    >>> simulated = simulate_failures(job, days=30, runs=20, seed=0)
    >>> abs(simulated.effective_time_ratio - job.effective_time_ratio) < 0.01
    True

The simulation has the same assumptions as the closed forms (`toolkit.plan.failures`), without their approximations.
Times between failures are exponential. A failure during a restart starts another one; while a job is stopped, none of
its nodes fails.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.plan.failures import SECONDS_PER_DAY, FailingJob, daly_interval, young_interval
from toolkit.simulate.options import DEFAULT_CHECKPOINT_SECONDS, FailureOptions
from toolkit.units import SECONDS_PER_HOUR

# Beyond any cluster; larger values are units mixed up.
LARGEST: dict[str, float] = {
    "gpus": 10**7,
    "gpus_per_node": 2**10,
    "failures_per_1000_node_days": 1e6,
    "checkpoint_seconds": 1e6,
    "checkpoint_interval_minutes": 1e6,
    "restart_minutes": 1e5,
    "detection_minutes": 1e5,
    "spare_nodes": 10**6,
    "repair_hours": 1e5,
    "days": 3650,
    "runs": 10**4,
    "seed": 2**63,
}
MAY_BE_ZERO = ("restart_minutes", "detection_minutes", "spare_nodes", "repair_hours", "seed")
DEFAULT_RUNS = 10
MOST_FAILURES = 2_000_000  # of all simulated runs: a few seconds


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


@dataclass(frozen=True, kw_only=True)
class FailureEstimate:
    """A job's closed forms and its simulation."""

    job: FailingJob
    gpus: int
    days: float
    simulated: SimulatedFailures
    checkpoint_source: str
    """Where the seconds of a save come from."""

    @property
    def expected_failures(self) -> float:
        """Failures of the whole job, while it has all of its nodes."""
        return self.days * SECONDS_PER_DAY / self.job.mean_seconds_between_failures

    def as_json(self) -> dict[str, Any]:
        """Return what `toolkit simulate failures --json` prints."""
        job, mean = self.job, self.job.mean_seconds_between_failures
        return {
            "gpus": self.gpus,
            "nodes": job.nodes,
            "mean_hours_between_failures": mean / SECONDS_PER_HOUR,
            "expected_failures": self.expected_failures,
            "checkpoint_seconds": job.checkpoint_seconds,
            "checkpoint_interval_seconds": job.interval,
            "best_checkpoint_interval_seconds": young_interval(job.checkpoint_seconds, mean),
            "daly_checkpoint_interval_seconds": daly_interval(job.checkpoint_seconds, mean),
            "checkpoint_fraction": job.checkpoint_fraction,
            "effective_time_ratio": job.effective_time_ratio,
            "exact_time_ratio": job.exact_time_ratio,
            "availability": job.availability,
            "goodput": job.goodput,
            "effective_gpus": job.exact_time_ratio * job.availability * self.gpus,
            "monte_carlo": asdict(self.simulated),
        }


def estimate_failures(options: FailureOptions) -> FailureEstimate:
    """Return closed forms and simulation. Raises ToolkitError for values out of range."""
    _check(options)
    save_seconds, source = _checkpoint_seconds(options)
    interval = options.checkpoint_interval_minutes
    job = FailingJob(
        nodes=math.ceil(options.gpus / options.gpus_per_node),
        failures_per_1000_node_days=options.failures_per_1000_node_days,
        checkpoint_seconds=save_seconds,
        restart_seconds=60 * options.restart_minutes,
        detection_seconds=60 * options.detection_minutes,
        interval_seconds=None if interval is None else 60 * interval,
        spare_nodes=options.spare_nodes,
        repair_seconds=SECONDS_PER_HOUR * (options.repair_hours or 0.0),
    )
    failures = options.days * SECONDS_PER_DAY / job.mean_seconds_between_failures
    runs = options.runs or max(1, min(DEFAULT_RUNS, int(MOST_FAILURES / failures)))
    if runs * failures > MOST_FAILURES:
        raise ToolkitError(
            f"{runs * failures:,.0f} failures in {runs} x {options.days:g} days are too many to simulate",
            hint=f"`--days {options.days * MOST_FAILURES / (runs * failures):.3g}`"
            + (", or fewer --runs" if runs > 1 else ""),
        )
    return FailureEstimate(
        job=job,
        gpus=options.gpus,
        days=options.days,
        simulated=simulate_failures(job, days=options.days, runs=runs, seed=options.seed),
        checkpoint_source=source,
    )


def _check(options: FailureOptions) -> None:
    for name, largest in LARGEST.items():
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            least = "0 or more" if name in MAY_BE_ZERO else "more than 0"
            raise ToolkitError(f"{flag} is {value:g}, expected {least}")
        if value > largest:
            raise ToolkitError(f"{flag} is {value:,.12g}, expected {largest:,.0f} or less")
    for given, missing in (("spare_nodes", "repair_hours"), ("repair_hours", "spare_nodes")):
        if getattr(options, given) is not None and getattr(options, missing) is None:
            flag, needed = (f"--{name.replace('_', '-')}" for name in (given, missing))
            raise ToolkitError(f"{flag} has no effect without {needed}", hint=f"`{needed} 24`, for example")


def _checkpoint_seconds(options: FailureOptions) -> tuple[float, str]:
    """Seconds of a save, and where they come from."""
    if options.run_folder is None:
        given = options.checkpoint_seconds
        return (DEFAULT_CHECKPOINT_SECONDS, "assumed") if given is None else (given, "given")
    if options.checkpoint_seconds is not None:
        raise ToolkitError("--checkpoint-seconds has no effect with --run-folder", hint="give one of them")
    return measured_checkpoint_seconds(options.run_folder), f"the median of {options.run_folder}"


def measured_checkpoint_seconds(folder: Path) -> float:
    """Return the median seconds in which training stood still for a checkpoint of a run.

    Raises ToolkitError for a folder without `run.json`, and for a run that recorded no checkpoint.
    """
    from toolkit.record.folder import RunFolder
    from toolkit.record.run_files import read_run  # takes as long to import as a simulation

    run_folder = RunFolder(folder)
    if not run_folder.run_json.is_file():
        raise ToolkitError(f"{folder} is no run folder: it has no {run_folder.run_json.name}")
    saves = [save for save in read_run(run_folder).saves or () if save.kind == "checkpoint"]
    stalls = [save.seconds if save.stall_seconds is None else save.stall_seconds for save in saves]
    measured = [seconds for seconds in stalls if seconds]
    if not measured:
        raise ToolkitError(
            f"{folder} recorded no checkpoint: a run records them when it completes",
            hint="a run with `--save_strategy steps`, or --checkpoint-seconds",
        )
    return statistics.median(measured)


def simulate_failures(job: FailingJob, *, days: float, runs: int, seed: int) -> SimulatedFailures:
    """Return the means of `runs` runs of `days` days each."""
    source = random.Random(seed)
    ratios, failures, stopped = zip(*(_simulate(job, days * SECONDS_PER_DAY, source) for _ in range(runs)), strict=True)
    return SimulatedFailures(
        runs=runs,
        days=days,
        seed=seed,
        effective_time_ratio=statistics.fmean(ratios),
        standard_error=statistics.stdev(ratios) / math.sqrt(runs) if runs > 1 else None,
        failures=statistics.fmean(failures),
        stopped_fraction=statistics.fmean(stopped),
    )


def _simulate(job: FailingJob, horizon: float, source: random.Random) -> tuple[float, int, float]:
    """Return the share of progress, the failures, and the share of the time without enough nodes of one run.

    From one failure to the next, complete intervals count, and the one that it interrupts is lost.
    """
    rate, training = 1 / job.mean_seconds_between_failures, job.interval
    interval = training + job.checkpoint_seconds
    now = progress = stopped = starting = 0.0
    failures, in_repair = 0, list[float]()
    while now < horizon:
        lasted = source.expovariate(rate)
        if now + lasted >= horizon:  # the interval that the end of the run interrupts counts
            complete, rest = divmod(max(0.0, horizon - now - starting), interval)
            progress += complete * training + min(rest, training)
            break
        if lasted > starting:
            progress += (lasted - starting) // interval * training
        now += lasted + job.detection_seconds
        failures += 1
        if job.spare_nodes is not None:
            waited = _wait_for_node(in_repair, now, job.spare_nodes, job.repair_seconds)
            stopped += min(waited, max(0.0, horizon - now))
            now += waited
        starting = job.restart_seconds
    return progress / horizon, failures, stopped / horizon


def _wait_for_node(in_repair: list[float], now: float, spares: int, repair_seconds: float) -> float:
    """Add the node that has failed, and return the time until the job has all of its nodes."""
    while in_repair and in_repair[0] <= now:
        heapq.heappop(in_repair)
    heapq.heappush(in_repair, now + repair_seconds)
    return in_repair[0] - now if len(in_repair) > spares else 0.0

"""From the options of `toolkit simulate failures` to closed forms and Monte Carlo side by side."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.plan.failures import SECONDS_PER_DAY, FailingJob, daly_interval, young_interval
from toolkit.simulate.failure_monte_carlo import SimulatedFailures, simulate_failures
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
    for name, largest in LARGEST.items():
        _check(name, getattr(options, name), largest)
    _check_spares(options)
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
    return FailureEstimate(
        job=job,
        gpus=options.gpus,
        days=options.days,
        simulated=simulate_failures(job, days=options.days, runs=_num_runs(options, job), seed=options.seed),
        checkpoint_source=source,
    )


def _check(name: str, value: float | None, largest: float) -> None:
    if value is None:
        return
    least = "0 or more" if name in MAY_BE_ZERO else "more than 0"
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        raise ToolkitError(f"{_flag(name)} is {value:g}, expected {least}")
    if value > largest:
        raise ToolkitError(f"{_flag(name)} is {value:,.12g}, expected {largest:,.0f} or less")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_spares(options: FailureOptions) -> None:
    if (options.spare_nodes is None) != (options.repair_hours is None):
        given, missing = "--spare-nodes", "--repair-hours"
        if options.spare_nodes is None:
            given, missing = missing, given
        raise ToolkitError(f"{given} has no effect without {missing}", hint=f"`{missing} 24`, for example")


def _num_runs(options: FailureOptions, job: FailingJob) -> int:
    """The runs that were given, or as many as are simulated in seconds. Raises ToolkitError for too many failures."""
    failures = options.days * SECONDS_PER_DAY / job.mean_seconds_between_failures
    runs = options.runs or max(1, min(DEFAULT_RUNS, int(MOST_FAILURES / failures)))
    if runs * failures > MOST_FAILURES:
        raise ToolkitError(
            f"{runs * failures:,.0f} failures in {runs} x {options.days:g} days are too many to simulate",
            hint=f"`--days {options.days * MOST_FAILURES / (runs * failures):.3g}`"
            + (", or fewer --runs" if runs > 1 else ""),
        )
    return runs


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

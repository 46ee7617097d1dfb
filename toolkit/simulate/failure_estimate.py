"""`toolkit simulate failures`: closed forms and a Monte Carlo simulation side by side, as JSON, a table and a chart.

The simulation has the same assumptions as the closed forms (`toolkit.plan.failures`), without their approximations.
Times between failures are exponential. A failure during a restart starts another one; while a job is stopped, none of
its nodes fails.
"""

import heapq
import math
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.plan.failures import SECONDS_PER_DAY, FailingJob, daly_interval, young_interval
from toolkit.report.charts import Line, LineChart
from toolkit.report.rendering import Cell
from toolkit.simulate.options import DEFAULT_CHECKPOINT_SECONDS, LEAST, FailureOptions, check_ranges
from toolkit.simulate.simulation_report import SimulationReport, table_of
from toolkit.units import SECONDS_PER_HOUR, seconds

# Beyond any cluster; larger values are units mixed up.
RANGES: dict[str, tuple[float, float]] = {
    **{"gpus": (1, 10**7), "gpus_per_node": (1, 2**10), "failures_per_1000_node_days": (LEAST, 10**6)},
    **{"checkpoint_seconds": (LEAST, 10**6), "checkpoint_interval_minutes": (LEAST, 10**6)},
    **{"restart_minutes": (0, 10**5), "detection_minutes": (0, 10**5), "spare_nodes": (0, 10**6)},
    **{"repair_hours": (0, 10**5), "days": (LEAST, 3650), "runs": (1, 10**4), "seed": (0, 2**63)},
}
DEFAULT_RUNS = 10
MOST_FAILURES = 2_000_000  # of all simulated runs: a few seconds
POINTS_PER_DECADE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedFailures:
    """Means over independent runs of equal length."""

    runs: int
    days: float
    seed: int
    effective_time_ratio: float  # progress over all of the time, also that without enough nodes
    standard_error: float | None  # of the ratio; None for one run
    failures: float  # per run
    stopped_fraction: float  # share of the time in which nodes are missing


@dataclass(frozen=True, kw_only=True)
class FailureEstimate:
    """A job's closed forms and its simulation."""

    job: FailingJob
    gpus: int
    expected_failures: float  # of the whole job, while it has all of its nodes
    simulated: SimulatedFailures
    checkpoint_source: str  # where the seconds of a save come from

    @property
    def best_intervals(self) -> tuple[float, float]:
        """Seconds of training between two saves that are best by Young's formula, and by Daly's."""
        save, mean = self.job.checkpoint_seconds, self.job.mean_seconds_between_failures
        return young_interval(save, mean), daly_interval(save, mean)

    def as_json(self) -> dict[str, Any]:
        """Return what `toolkit simulate failures --json` prints."""
        job, (young, daly) = self.job, self.best_intervals
        shares = ("checkpoint_fraction", "effective_time_ratio", "exact_time_ratio", "availability", "goodput")
        return {
            "gpus": self.gpus,
            "nodes": job.nodes,
            "mean_hours_between_failures": job.mean_seconds_between_failures / SECONDS_PER_HOUR,
            "expected_failures": self.expected_failures,
            "checkpoint_seconds": job.checkpoint_seconds,
            "checkpoint_interval_seconds": job.interval,
            "best_checkpoint_interval_seconds": young,
            "daly_checkpoint_interval_seconds": daly,
            **{name: getattr(job, name) for name in shares},
            "effective_gpus": job.exact_time_ratio * job.availability * self.gpus,
            "monte_carlo": asdict(self.simulated),
        }


def estimate_failures(options: FailureOptions) -> FailureEstimate:
    """Return closed forms and simulation. Raises ToolkitError for values out of range."""
    check_ranges(options, RANGES)
    if (options.spare_nodes is None) != (options.repair_hours is None):
        flags = ("--spare-nodes", "--repair-hours")
        flag, needed = flags if options.repair_hours is None else flags[::-1]
        raise ToolkitError(f"{flag} has no effect without {needed}", hint=f"`{needed} 24`, for example")
    save_seconds, source = _checkpoint_seconds(options)
    minutes = options.checkpoint_interval_minutes
    job = FailingJob(
        nodes=math.ceil(options.gpus / options.gpus_per_node),
        failures_per_1000_node_days=options.failures_per_1000_node_days,
        checkpoint_seconds=save_seconds,
        restart_seconds=60 * options.restart_minutes,
        detection_seconds=60 * options.detection_minutes,
        interval_seconds=None if minutes is None else 60 * minutes,
        spare_nodes=options.spare_nodes,
        repair_seconds=SECONDS_PER_HOUR * (options.repair_hours or 0.0),
    )
    failures = options.days * SECONDS_PER_DAY / job.mean_seconds_between_failures
    runs = options.runs or max(1, min(DEFAULT_RUNS, int(MOST_FAILURES / failures)))
    if runs * failures > MOST_FAILURES:
        what = f"{runs * failures:,.0f} failures in {runs} x {options.days:g} days are too many to simulate"
        fewer = f"`--days {options.days * MOST_FAILURES / (runs * failures):.3g}`"
        raise ToolkitError(what, hint=fewer + (", or fewer --runs" if runs > 1 else ""))
    return FailureEstimate(
        job=job,
        gpus=options.gpus,
        expected_failures=failures,
        simulated=simulate_failures(job, days=options.days, runs=runs, seed=options.seed),
        checkpoint_source=source,
    )


def _checkpoint_seconds(options: FailureOptions) -> tuple[float, str]:
    folder, given = options.run_folder, options.checkpoint_seconds
    if folder is None:
        return (DEFAULT_CHECKPOINT_SECONDS, "assumed") if given is None else (given, "given")
    if given is not None:
        raise ToolkitError("--checkpoint-seconds has no effect with --run-folder", hint="give one of them")
    from toolkit.record.folder import RunFolder
    from toolkit.record.run_files import read_run  # takes as long to import as a simulation

    run_folder = RunFolder(folder)
    if not run_folder.run_json.is_file():
        raise ToolkitError(f"{folder} is no run folder: it has no {run_folder.run_json.name}")
    saves = read_run(run_folder).saves or ()
    measured = [save.stall_seconds for save in saves if save.kind == "checkpoint" and save.stall_seconds]
    if not measured:
        hint = "a run with `--save_strategy steps`, or --checkpoint-seconds"
        raise ToolkitError(f"{folder} recorded no checkpoint: a run records them when it completes", hint=hint)
    return statistics.median(measured), f"the median of {folder}"


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
    """One run: its share of progress, its failures, and the share of the time without enough nodes."""
    rate, training = 1 / job.mean_seconds_between_failures, job.interval
    interval = training + job.checkpoint_seconds
    now = progress = stopped = starting = 0.0
    failures, in_repair = 0, list[float]()  # a heap: when each node that has failed will be spare
    while now < horizon:
        lasted = source.expovariate(rate)
        if now + lasted >= horizon:  # the interval that the end of the run interrupts counts
            complete, rest = divmod(max(0.0, horizon - now - starting), interval)
            progress += complete * training + min(rest, training)
            break
        if lasted > starting:  # the interval that a failure interrupts is lost
            progress += (lasted - starting) // interval * training
        now += lasted + job.detection_seconds
        failures += 1
        if job.spare_nodes is not None:
            while in_repair and in_repair[0] <= now:
                heapq.heappop(in_repair)
            heapq.heappush(in_repair, now + job.repair_seconds)
            waited = in_repair[0] - now if len(in_repair) > job.spare_nodes else 0.0
            stopped += min(waited, max(0.0, horizon - now))
            now += waited
        starting = job.restart_seconds
    return progress / horizon, failures, stopped / horizon


def failure_report(estimate: FailureEstimate) -> SimulationReport:
    """Return the estimate for people: closed form and Monte Carlo side by side, one row per quantity."""
    job, simulated, (young, daly) = estimate.job, estimate.simulated, map(seconds, estimate.best_intervals)
    spares = "" if job.spare_nodes is None else f", {job.spare_nodes:,} spare"
    hours, nodes = job.mean_seconds_between_failures / SECONDS_PER_HOUR, f"{job.nodes:,} node{'s' * (job.nodes > 1)}"
    summary = (
        f"{estimate.gpus:,} GPUs on {nodes}{spares}; {job.failures_per_1000_node_days:g} failures per 1,000"
        f" node-days: one every {f'{hours:.2f} h' if hours < 100 else f'{hours / 24:,.0f} days'}\n"
        f"a save takes {seconds(job.checkpoint_seconds)} ({estimate.checkpoint_source}), every"
        f" {seconds(job.interval)} of training: {100 * job.checkpoint_fraction:.2f} % of it;"
        f" best interval {young} (Young), {daly} (Daly)"
    )
    with_all_nodes = 1 - simulated.stopped_fraction
    ratio = simulated.effective_time_ratio / with_all_nodes if with_all_nodes else 0.0
    error = "" if simulated.standard_error is None else f" ± {2 * simulated.standard_error:.4f}"
    closed = f"{job.exact_time_ratio:.4f} (first order: {job.effective_time_ratio:.4f})"
    rows = [
        ("failures", f"{estimate.expected_failures:,.1f}", f"{simulated.failures:,.1f}"),
        ("effective time ratio", closed, f"{ratio:.4f}{error}"),
    ]
    if job.spare_nodes is not None:
        goodput = simulated.effective_time_ratio * job.nodes / (job.nodes + job.spare_nodes)
        rows += [
            ("time with all nodes", f"{100 * job.availability:.2f} %", f"{100 * with_all_nodes:.2f} %"),
            ("goodput of all nodes, spares included", f"{job.goodput:.4f}", f"{goodput:.4f}"),
        ]
    headings = ("", "closed form", "Monte Carlo")
    table = table_of([dict(zip(headings, (Cell(text=text) for text in row), strict=True)) for row in rows])
    notes = [
        "Assumed: independent failures at a constant rate; every failure stops the whole job.",
        "Known miss: on Meta's RSC-1, 1,024-GPU jobs were interrupted every 7.9 h, where this predicts 28.8 h.",
    ]
    if job.effective_time_ratio == 0:
        notes.append("Failures come faster than the job restarts and saves: it makes almost no progress.")
    return SimulationReport(
        title="Failures and checkpoints, simulated",
        summary=summary,
        sections=[
            ("", table),
            ("Effective time ratio by checkpoint interval", interval_chart(estimate)),
        ],
        notes=notes,
    )


def interval_chart(estimate: FailureEstimate) -> LineChart:
    """Return the effective time ratio at a tenth of the best interval to ten times it, with both best intervals."""
    job, (young, daly) = estimate.job, estimate.best_intervals
    places = [math.log10(young) + s / POINTS_PER_DECADE for s in range(-POINTS_PER_DECADE, POINTS_PER_DECADE + 1)]
    lines = []
    for label, ratio, color in (("exact", "exact_time_ratio", "c0"), ("first order", "effective_time_ratio", "c1")):
        points = [(place, getattr(job.at_interval(10**place), ratio)) for place in places]
        lines.append(Line(points=points, label=label, color=color, dashed=label != "exact"))
    for name, color, best in (("Young", "c5", young), ("Daly", "c4", daly)):
        point = (math.log10(best), job.at_interval(best).exact_time_ratio)
        lines.append(Line(points=[point], label=f"best by {name}", color=color, width=6.0, dots=True))
    return LineChart(
        lines=lines,
        x_labels=[(place, f"{10**place / 60:,.3g}") for place in (places[0], places[-1])],
        x_name="minutes of training between two saves, logarithmic",
        title="effective time ratio by checkpoint interval",
    )

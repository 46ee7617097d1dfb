"""An estimate of failures for people: a table in the terminal, and a page with the ratio by interval."""

from __future__ import annotations

import math

from rich.console import Console

from toolkit.plan.failures import FailingJob, daly_interval, young_interval
from toolkit.report.charts import Line, LineChart
from toolkit.report.rendering import render
from toolkit.report.tables import Cell, Heading, Table, rich_table, text_cell, text_heading
from toolkit.simulate.failure_estimate import FailureEstimate
from toolkit.units import SECONDS_PER_HOUR, seconds

TERMINAL_COLUMNS = 100
# Intervals of the chart: from a tenth of the best to ten times it.
CHART_DECADES, POINTS_PER_DECADE = 1, 20


def print_estimate(estimate: FailureEstimate) -> None:
    """Print the estimate as text."""
    print(heading(estimate), checkpoint_text(estimate), sep="\n")
    Console(width=max(Console().width, TERMINAL_COLUMNS)).print(rich_table(estimate_table(estimate)))
    print("", *notes(estimate), sep="\n")


def page(estimate: FailureEstimate) -> str:
    """Return the page: the table, and the effective time ratio by checkpoint interval."""
    return render(
        "failures.html.j2",
        title="Failures and checkpoints, simulated",
        summary=f"{heading(estimate)}; {checkpoint_text(estimate)}.",
        table=estimate_table(estimate),
        notes=notes(estimate),
        chart=interval_chart(estimate.job),
    )


def interval_chart(job: FailingJob) -> LineChart:
    """Return the effective time ratio by interval, on a logarithmic axis, with both best intervals."""
    mean = job.mean_seconds_between_failures
    best = young_interval(job.checkpoint_seconds, mean)
    center, steps = math.log10(best), CHART_DECADES * POINTS_PER_DECADE
    places = [center + step / POINTS_PER_DECADE for step in range(-steps, steps + 1)]
    exact = [(place, job.at_interval(10**place).exact_time_ratio) for place in places]
    first_order = [(place, job.at_interval(10**place).effective_time_ratio) for place in places]
    lines = [Line(points=exact, color="c2", width=2.0), Line(points=first_order, color="c1", width=2.0, dashed=True)]
    for color, marked in (("c5", best), ("c4", daly_interval(job.checkpoint_seconds, mean))):
        point = (math.log10(marked), job.at_interval(marked).exact_time_ratio)
        lines.append(Line(points=[point], color=color, width=6.0, dots=True))
    values = [value for _, value in (*exact, *first_order)]
    low, high = min(values), max(values)
    return LineChart(
        lines=lines,
        colors=[("c2", "exact"), ("c1", "first order"), ("c5", "best by Young"), ("c4", "best by Daly")],
        left=places[0],
        right=places[-1],
        low=low,
        high=high,
        y_labels=[f"{mark:.3f}" for mark in (high, (high + low) / 2, low)],
        x_labels=[(place, f"{10**place / 60:,.3g}") for place in (places[0], places[-1])],
        x_name="minutes of training between two saves, logarithmic",
        title="effective time ratio by checkpoint interval",
    )


def estimate_table(estimate: FailureEstimate) -> Table:
    """Return one row per quantity: closed form and Monte Carlo side by side."""
    job, simulated = estimate.job, estimate.simulated
    with_all_nodes = 1 - simulated.stopped_fraction
    ratio = simulated.effective_time_ratio / with_all_nodes if with_all_nodes else 0.0
    error = "" if simulated.standard_error is None else f" ± {2 * simulated.standard_error:.4f}"
    rows = [
        ("failures", f"{estimate.expected_failures:,.1f}", f"{simulated.failures:,.1f}"),
        (
            "effective time ratio",
            f"{job.exact_time_ratio:.4f} (first order: {job.effective_time_ratio:.4f})",
            f"{ratio:.4f}{error}",
        ),
    ]
    if job.spare_nodes is not None:
        goodput = simulated.effective_time_ratio * job.nodes / (job.nodes + job.spare_nodes)
        rows += [
            ("time with all nodes", f"{100 * job.availability:.2f} %", f"{100 * with_all_nodes:.2f} %"),
            ("goodput of all nodes, spares included", f"{job.goodput:.4f}", f"{goodput:.4f}"),
        ]
    headings = (text_heading(""), Heading(text="closed form"), Heading(text="Monte Carlo"))
    cells = ((text_cell(name), Cell(text=closed), Cell(text=drawn)) for name, closed, drawn in rows)
    return Table(headings=headings, rows=tuple(cells))


def heading(estimate: FailureEstimate) -> str:
    """Return what was estimated, in one line."""
    job = estimate.job
    spares = "" if job.spare_nodes is None else f", {job.spare_nodes:,} spare"
    return (
        f"{estimate.gpus:,} GPUs on {job.nodes:,} nodes{spares}; {job.failures_per_1000_node_days:g} failures per 1,000"
        f" node-days: one every {job.mean_seconds_between_failures / SECONDS_PER_HOUR:.2f} h"
    )


def checkpoint_text(estimate: FailureEstimate) -> str:
    """Return the interval in effect, and the best ones."""
    job, mean = estimate.job, estimate.job.mean_seconds_between_failures
    best = seconds(young_interval(job.checkpoint_seconds, mean))
    daly = seconds(daly_interval(job.checkpoint_seconds, mean))
    return (
        f"a save takes {seconds(job.checkpoint_seconds)} ({estimate.checkpoint_source}), every"
        f" {seconds(job.interval)} of training: {100 * job.checkpoint_fraction:.2f} % of it;"
        f" best interval {best} (Young), {daly} (Daly)"
    )


def notes(estimate: FailureEstimate) -> list[str]:
    """Return what a reader must know before quoting a figure."""
    found = [
        "Assumed: independent failures at a constant rate; every failure stops the whole job.",
        "Known miss: on Meta's RSC-1, 1,024-GPU jobs were interrupted every 7.9 h, where this predicts 28.8 h.",
    ]
    if estimate.job.effective_time_ratio == 0:
        found.append("Failures come faster than the job restarts and saves: it makes almost no progress.")
    return found

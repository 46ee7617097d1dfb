"""An estimate of failures for people: a table in the terminal, and a page with the ratio by interval."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.console import Console

from toolkit.compare.report.console_tables import rich_table
from toolkit.compare.report.line_charts import Line, LineChart
from toolkit.compare.report.rendering import render
from toolkit.compare.report.report_files import write_report_file
from toolkit.simulate.failure_estimate import FailureEstimate, checkpoint_text, estimate_table, heading, notes
from toolkit.simulate.failures import FailingJob, daly_interval, young_interval

TERMINAL_COLUMNS = 100
# Intervals of the chart: from a tenth of the best to ten times it.
CHART_DECADES, POINTS_PER_DECADE = 1, 20


def print_estimate(estimate: FailureEstimate) -> None:
    """Print the estimate as text."""
    console = Console(width=max(Console().width, TERMINAL_COLUMNS), highlight=False, soft_wrap=True)
    console.print(heading(estimate), markup=False)
    console.print(checkpoint_text(estimate), markup=False)
    console.print(rich_table(estimate_table(estimate)), soft_wrap=False)
    console.print()
    for note in notes(estimate):
        console.print(note, markup=False)


def write_report(estimate: FailureEstimate, folder: Path) -> Path:
    """Write `simulation.json` and `simulation.html`, and return the page. Raises ToolkitError for a bad folder."""
    write_report_file(folder / "simulation.json", json.dumps(estimate.as_json(), indent=2) + "\n")
    return write_report_file(folder / "simulation.html", page(estimate))


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

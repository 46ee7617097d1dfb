"""The table and charts of `toolkit simulate stragglers`, for a terminal and as a self-contained page."""

from __future__ import annotations

from rich.console import Console

from toolkit.report.charts import CURVES, Bar, BarChart, Line, LineChart, curve_widths
from toolkit.report.rendering import render
from toolkit.report.tables import Cell, Heading, Table, number_cell, rich_table, text_cell, text_heading
from toolkit.simulate.stragglers import PolicyResult, StragglerStudy
from toolkit.units import gib, number
from toolkit.units import seconds as seconds_text

TERMINAL_COLUMNS = 100
NOTES = (
    "A step is a global batch: as many gradients as synchronous training averages.",
    "Wasted GPU-hours are waiting and dropped gradients of all workers, until all steps are applied.",
    "The losses are those of a small classifier, trained in NumPy on the same rows under each policy: an order of "
    "policies, not a prediction for another model.",
    "A worker's gradient alone moves the weights by the learning rate over the gradients of a step.",
)


def print_study(study: StragglerStudy) -> None:
    """Print summary, table and notes to stdout."""
    print(summary(study), end="\n\n")
    Console(width=max(Console().width, TERMINAL_COLUMNS)).print(rich_table(policy_table(study)))
    print("", *(f"- {note}" for note in notes(study)), sep="\n")


def summary(study: StragglerStudy) -> str:
    """Return what was simulated, and what waiting for all workers costs."""
    count, waste = study.best_backup_workers, 100 * (1 - 1 / study.slowdown)
    backup = "No number of backup workers would apply more gradients per second than none."
    if count:
        backup = (
            f"{count} backup worker{'s'[: count > 1]} would apply most gradients per second, "
            f"{study.best_backup_gain:.3f} times those without."
        )
    return (
        f"{study.workers} workers, {study.steps} steps, compute times: {study.step_times}. Waiting for every worker "
        f"takes {study.slowdown:.3f} times the mean compute time: {waste:.1f} % of computing and waiting is waiting. "
        f"{backup}"
    )


def notes(study: StragglerStudy) -> list[str]:
    """Return what a reader must know to use the figures."""
    found = [*NOTES, f"The loss to reach is {study.target_loss:.4f}, 5 % above the last of {study.target_policy}."]
    if study.all_reduce_seconds is not None and study.push_pull_seconds is not None:
        reduced, pushed = (
            " to ".join(map(seconds_text, ends)) for ends in (study.all_reduce_seconds, study.push_pull_seconds)
        )
        found.append(
            f"Gradients of {gib(study.gradient_bytes)}: an all-reduce takes {reduced}, a push and pull through"
            f" parameter servers {pushed}. Policies take the worst rates, nothing overlaps; no GPU has confirmed them."
        )
    return found


def policy_table(study: StragglerStudy) -> Table:
    """Return speed, waste, staleness and loss of each policy."""
    headings = ("steps/s", "waiting\n%", "dropped\n%", "comm.\n%", "wasted\nGPU-h", "stale\nmean", "p99")
    return Table(
        headings=(
            text_heading("policy"),
            *(Heading(text=text) for text in (*headings, "s to\nloss", "last\nloss")),
        ),
        rows=tuple(map(_policy_cells, study.policies)),
    )


def _policy_cells(result: PolicyResult) -> tuple[Cell, ...]:
    row = result.as_row()
    return (
        text_cell(row["policy"]),
        number_cell(row["steps_per_second"], 3),
        number_cell(100 * row["waiting_fraction"], 1),
        number_cell(100 * row["discarded_fraction"], 1),
        number_cell(100 * row["communication_fraction"], 1),
        number_cell(row["wasted_gpu_hours"], 3),
        number_cell(row["staleness_mean"], 1),
        number_cell(row["staleness_p99"], 0),
        number_cell(result.seconds_to_target, 1),
        text_cell("diverged") if result.final_loss is None else number_cell(result.final_loss, 4),
    )


def loss_chart(study: StragglerStudy) -> LineChart:
    """Return each policy's losses by the time of the simulation."""
    lines, colors = [], []
    widths = curve_widths(len(study.policies))
    for index, (result, width) in enumerate(zip(study.policies, widths, strict=True)):
        color = f"c{index % len(CURVES)}"
        lines.append(Line(points=result.curve, color=color, width=width))
        colors.append((color, result.run.policy.label))
    losses = [loss for line in lines for _, loss in line.points]
    low, high, last = min(losses), max(losses), max(line.points[-1][0] for line in lines)
    return LineChart(
        lines=lines,
        colors=colors,
        left=0.0,
        right=last,
        low=low,
        high=high,
        y_labels=[f"{mark:.3f}" for mark in (high, (high + low) / 2, low)],
        x_labels=[(0.0, "0"), (last, f"{last:,.0f}")],
        x_name="seconds",
        title="loss by time",
    )


def page(study: StragglerStudy) -> str:
    """Return the complete page."""
    speeds = [(result.run.policy.label, result.run.steps_per_second) for result in study.policies]
    return render(
        "stragglers.html.j2",
        title="Stragglers and synchronization, simulated",
        summary=summary(study),
        notes=notes(study),
        policies=policy_table(study),
        speed_bars=BarChart(
            bars=tuple((name, Bar(segments=((speed, "speed"),), text=number(speed, 3))) for name, speed in speeds)
        ),
        loss_chart=loss_chart(study),
    )

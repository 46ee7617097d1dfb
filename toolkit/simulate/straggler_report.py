"""Tables and charts of `toolkit simulate stragglers`, for a terminal and as a self-contained page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.report.charts import CURVES, Bar, BarChart, Line, LineChart, curve_widths
from toolkit.report.rendering import render, write_report_file
from toolkit.report.tables import Cell, Heading, Table, number_cell, rich_table, text_cell, text_heading
from toolkit.simulate.small_training import LossPoint
from toolkit.simulate.stragglers import PolicyResult, StragglerStudy
from toolkit.units import MIB, gib, number
from toolkit.units import seconds as seconds_text

TITLE = "Stragglers and synchronization, simulated"
NOTES = (
    "A step is a global batch: as many gradients as synchronous training averages.",
    "Wasted GPU-hours are waiting and dropped gradients of all workers, until all steps are applied.",
    "The losses are those of a small classifier, trained in NumPy on the same rows under each policy: an order of "
    "policies, not a prediction for another model.",
    "A worker's gradient alone moves the weights by the learning rate over the gradients of a step.",
)
COMMUNICATION_NOTES = (
    "Communication is at the worst rates of the interconnect, and nothing overlaps with computation.",
    "All-reduce ranges are from the best to the worst rates; no GPU has confirmed them.",
)
# More of the staleness axis is the tail of single gradients.
MOST_STALENESS_POINTS = 400


def print_study(study: StragglerStudy) -> None:
    """Print the tables to stdout."""
    from rich.console import Console

    console = Console(width=100, highlight=False, soft_wrap=True)
    console.print(summary(study), markup=False)
    for table in (policy_table(study), reduction_table(study), compression_table(study)):
        if table.rows:
            console.print()
            console.print(rich_table(table))
    console.print()
    for note in notes(study):
        console.print(f"- {note}", markup=False)


def summary(study: StragglerStudy) -> str:
    """Return what was simulated, and what waiting for all workers costs."""
    waste = 100 * (1 - 1 / study.slowdown)
    return (
        f"{study.workers} workers, {study.steps} steps, compute times: {study.step_times}. Waiting for every worker "
        f"takes {study.slowdown:.3f} times the mean compute time: {waste:.1f} % of computing and waiting is waiting. "
        + _backup_text(study)
    )


def _backup_text(study: StragglerStudy) -> str:
    if study.best_backup_workers == 0:
        return "No number of backup workers would apply more gradients per second than none."
    number = study.best_backup_workers
    return (
        f"{number} backup worker{'s'[: number > 1]} would apply most gradients per second, "
        f"{study.best_backup_gain:.3f} times those without."
    )


def notes(study: StragglerStudy) -> tuple[str, ...]:
    """Return what a reader must know to use the figures."""
    target = f"The loss to reach is {study.target_loss:.4f}, 5 % above the last of {study.target_policy}."
    return (*NOTES, target, *(COMMUNICATION_NOTES if study.model else ()))


def policy_table(study: StragglerStudy) -> Table:
    """Return speed, waste, staleness and loss of each policy."""
    headings = ("steps/s", "waiting\n%", "dropped\n%", "comm.\n%", "wasted\nGPU-h", "stale\nmean", "p99")
    return Table(
        headings=(
            text_heading("policy"),
            *(Heading(text=text) for text in (*headings, "s to\nloss", "last\nloss")),
        ),
        rows=tuple(_policy_cells(result) for result in study.policies),
    )


def _policy_cells(result: PolicyResult) -> tuple[Cell, ...]:
    last = number_cell(result.final_loss, 4) if not result.diverged else text_cell("diverged")
    return (
        text_cell(result.policy),
        number_cell(result.steps_per_second, 3),
        number_cell(100 * result.waiting_fraction, 1),
        number_cell(100 * result.discarded_fraction, 1),
        number_cell(100 * result.communication_fraction, 1),
        number_cell(result.wasted_gpu_hours, 3),
        number_cell(result.staleness_mean, 1),
        number_cell(result.staleness_p99, 0),
        number_cell(result.seconds_to_target, 1),
        last,
    )


def reduction_table(study: StragglerStudy) -> Table:
    """Return seconds and bytes of each way to reduce the gradients; no rows without a model."""
    headings = ("seconds, best", "worst", "sent per worker", "through a server")
    return Table(
        headings=(text_heading("reduction"), *(Heading(text=text) for text in headings)),
        rows=tuple(
            (
                text_cell(found.algorithm),
                *(number_cell(end, 4) for end in found.seconds),
                _bytes_cell(found.sent_bytes),
                _bytes_cell(found.server_bytes),
            )
            for found in study.reductions
        ),
    )


def _bytes_text(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes >= MIB else f"{num_bytes:,} B"


def _bytes_cell(num_bytes: int | None) -> Cell:
    return Cell(text=gib(num_bytes), value=None if num_bytes is None else float(num_bytes))


def compression_table(study: StragglerStudy) -> Table:
    """Return bytes, time and loss of each compression."""
    headings = ("payload\nbytes", "of\nfp32", "sent by\na worker", "s per\nstep", "last\nloss")
    return Table(
        headings=(
            text_heading("compression"),
            text_heading("collective"),
            *(Heading(text=text) for text in headings),
        ),
        rows=tuple(
            (
                text_cell(result.compression),
                text_cell(result.collective),
                number_cell(result.payload_bytes, 0),
                number_cell(result.compressed_fraction, 4),
                number_cell(result.sent_bytes, 0),
                number_cell(result.step_seconds, 3),
                text_cell("diverged") if result.diverged else number_cell(result.final_loss, 4),
            )
            for result in study.compressions
        ),
    )


def loss_chart(curves: Sequence[tuple[str, Sequence[LossPoint]]], title: str) -> LineChart:
    """Return losses by the time of the simulation."""
    lines, colors = [], []
    for index, ((label, curve), width) in enumerate(zip(curves, curve_widths(len(curves)), strict=True)):
        color = f"c{index % len(CURVES)}"
        lines.append(Line(points=[(point.seconds, point.loss) for point in curve], color=color, width=width))
        colors.append((color, label))
    losses = [point.loss for _, curve in curves for point in curve]
    low, high, last = min(losses), max(losses), max(curve[-1].seconds for _, curve in curves)
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
        title=title,
    )


def staleness_chart(study: StragglerStudy) -> LineChart | None:
    """Return the share of gradients by staleness; None where every gradient is fresh."""
    stale = [result for result in study.policies if max(result.staleness) > 0]
    if not stale:
        return None
    right = min(max(max(result.staleness) for result in stale), MOST_STALENESS_POINTS)
    lines, colors, high = [], [], 0.0
    for index, result in enumerate(stale):
        total, color = sum(result.staleness.values()), f"c{(index + 1) % len(CURVES)}"
        points = [(float(age), result.staleness.get(age, 0) / total) for age in range(right + 1)]
        high = max(high, *(share for _, share in points))
        lines.append(Line(points=points, color=color, width=2.0))
        colors.append((color, result.policy))
    return LineChart(
        lines=lines,
        colors=colors,
        left=0.0,
        right=float(right),
        low=0.0,
        high=high,
        y_labels=[f"{100 * mark:.1f} %" for mark in (high, high / 2, 0.0)],
        x_labels=[(0.0, "0"), (float(right), str(right))],
        x_name="updates between reading the weights and applying the gradient",
        title="staleness of gradients",
    )


def speed_bars(study: StragglerStudy) -> BarChart:
    """Return steps per second of each policy."""
    return BarChart(
        bars=tuple(
            (result.policy, _bar(result.steps_per_second, number(result.steps_per_second, 3)))
            for result in study.policies
        )
    )


def byte_bars(study: StragglerStudy) -> BarChart:
    """Return the bytes that one worker sends per step, by compression."""
    return BarChart(
        bars=tuple(
            (result.compression, _bar(result.sent_bytes, _bytes_text(result.sent_bytes)))
            for result in study.compressions
        )
    )


def reduction_bars(study: StragglerStudy) -> BarChart | None:
    """Return the worst time of each reduction, with its range; None without a model."""
    bars = tuple(
        (found.algorithm, replace(_bar(found.seconds[1], _range_text(found.seconds)), interval=found.seconds))
        for found in study.reductions
    )
    return BarChart(bars=bars, marks=(("span", "best to worst rates"),)) if bars else None


def _bar(length: float, text: str) -> Bar:
    return Bar(segments=((length, "speed"),), text=text)


def _range_text(ends: tuple[float, float]) -> str:
    return f"{seconds_text(ends[0])} to {seconds_text(ends[1])}"


def html_text(study: StragglerStudy) -> str:
    """Return the complete page."""
    return render(
        "stragglers.html.j2",
        title=TITLE,
        summary=summary(study),
        notes=notes(study),
        policies=policy_table(study),
        speed_bars=speed_bars(study),
        loss_chart=loss_chart([(result.policy, result.curve) for result in study.policies], "loss by time"),
        staleness_chart=staleness_chart(study),
        reductions=reduction_table(study),
        reduction_bars=reduction_bars(study),
        compressions=compression_table(study),
        byte_bars=byte_bars(study),
        compression_chart=loss_chart(
            [(result.compression, result.curve) for result in study.compressions], "loss by time, compressed"
        ),
    )


def write_report(study: StragglerStudy, folder: Path) -> Path:
    """Write simulation.json and simulation.html, and return the page's path. Raises ToolkitError if it cannot."""
    text = json.dumps(study.as_json(), indent=2, allow_nan=False) + "\n"
    write_report_file(folder / "simulation.json", text)
    return write_report_file(folder / "simulation.html", html_text(study))

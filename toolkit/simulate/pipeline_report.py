"""Simulated schedules for people: a table and timelines in the terminal, and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from toolkit.compare.report.console_tables import rich_table
from toolkit.compare.report.rendering import render
from toolkit.compare.report.report_files import write_report_file
from toolkit.simulate.pipeline_comparison import (
    PipelineComparison,
    SimulatedSchedule,
    comparison_table,
    notes,
    stages_table,
)
from toolkit.simulate.pipeline_schedules import LETTERS
from toolkit.simulate.pipeline_timeline import COLORS, LEGEND, ScheduleTimeline, text_timeline
from toolkit.units import seconds

TERMINAL_COLUMNS = 100
MOST_SHOWN = 3  # schedules whose timelines and stages the terminal shows; the page has all
LABEL_COLUMNS = len("stage 4095 ")
KINDS = ("forward", "gradient of the input", "whole backward", "gradient of the weights")
assert len(KINDS) == len(LETTERS)


def print_comparison(comparison: PipelineComparison, *, timeline: bool) -> None:
    """Print the table, and of a few schedules the memory of each stage, if it was planned, and the timeline."""
    console = Console(width=max(Console().width, TERMINAL_COLUMNS), highlight=False, soft_wrap=True)
    console.print(comparison.heading, markup=False)
    console.print(rich_table(comparison_table(comparison)), soft_wrap=False)
    for simulated in _shown(comparison):
        run, stages = simulated.run, stages_table(simulated)
        if stages is not None or timeline:
            console.print(f"\n{run.order.schedule}, {seconds(run.makespan_seconds)}:", markup=False)
        if stages is not None:
            console.print(rich_table(stages), soft_wrap=False)
        if timeline:
            for line in text_timeline(run, columns=console.width - LABEL_COLUMNS):
                console.print(line, markup=False)
    if timeline:
        console.print(LEGEND, markup=False)
    console.print()
    for note in notes(comparison):
        console.print(note, markup=False)


def _shown(comparison: PipelineComparison) -> Sequence[SimulatedSchedule]:
    """A few schedules in full; of more, the one with the shortest step."""
    schedules = comparison.schedules
    return schedules if len(schedules) <= MOST_SHOWN else [fastest(schedules)]


def fastest(schedules: Sequence[SimulatedSchedule]) -> SimulatedSchedule:
    """Return the schedule with the shortest step."""
    return min(schedules, key=lambda each: each.run.step_seconds)


def write_report(comparison: PipelineComparison, folder: Path) -> Path:
    """Write `simulation.json` and `simulation.html`, and return the page. Raises ToolkitError for a bad folder."""
    write_report_file(folder / "simulation.json", json.dumps(comparison.as_json(), indent=2) + "\n")
    return write_report_file(folder / "simulation.html", page(comparison))


def page(comparison: PipelineComparison) -> str:
    """Return the page: the table, the timelines, and memory by stage."""
    first = fastest(comparison.schedules)
    run = first.run
    return render(
        "pipeline.html.j2",
        title="Pipeline schedules, simulated",
        summary=f"{comparison.heading}: {run.order.schedule} has the shortest step, {seconds(run.step_seconds)}, with"
        f" a bubble of {100 * run.bubble_fraction:.1f} %.",
        table=comparison_table(comparison),
        notes=notes(comparison),
        colors=list(zip(COLORS, KINDS, strict=True)),
        timelines=[
            ScheduleTimeline(run=each.run, expanded=each is first, length=seconds(each.run.makespan_seconds))
            for each in comparison.schedules
        ],
        stages=[(each.run.order.schedule, stages) for each in comparison.schedules if (stages := stages_table(each))],
    )

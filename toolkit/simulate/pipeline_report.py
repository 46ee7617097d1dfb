"""Simulated schedules for people: a table and timelines in the terminal, and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from toolkit.plan.memory_verdict import FITS
from toolkit.report.rendering import render, write_report_file
from toolkit.report.tables import Cell, Heading, Table, number_cell, rich_table, text_cell, text_heading
from toolkit.simulate.pipeline_comparison import PipelineComparison, SimulatedSchedule
from toolkit.simulate.pipeline_schedules import LETTERS
from toolkit.simulate.pipeline_step import PREDICTED_OVER_MEASURED
from toolkit.simulate.pipeline_timeline import COLORS, LEGEND, ScheduleTimeline, text_timeline
from toolkit.simulate.stage_plans import StageMemory
from toolkit.units import gib, seconds

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


def comparison_table(comparison: PipelineComparison) -> Table:
    """Return one row per schedule."""
    headings = [
        text_heading("schedule"),
        Heading(text="chunks"),
        Heading(text="step"),
        Heading(text="bubble"),
        Heading(text="in flight,\nfirst"),
        Heading(text="in flight,\nmost"),
    ]
    if comparison.staged is not None:
        headings += [Heading(text="largest\nstage"), text_heading("verdict"), Heading(text="planned step")]
    return Table(headings=tuple(headings), rows=tuple(map(_cells, comparison.schedules)))


def _cells(simulated: SimulatedSchedule) -> tuple[Cell, ...]:
    run = simulated.run
    peaks, digits = run.peak_micro_batches, 0 if run.size.chunks == 1 else 1
    cells = (
        text_cell(run.order.schedule),
        number_cell(run.size.chunks, 0),
        Cell(text=seconds(run.step_seconds), value=run.step_seconds),
        Cell(text=f"{100 * run.bubble_fraction:.1f} %", value=run.bubble_fraction),
        number_cell(peaks[0], digits),
        number_cell(max(peaks), digits),
    )
    largest, bounds = simulated.largest, simulated.step_seconds_range
    if largest is None or bounds is None:
        return cells
    verdict = text_cell(largest.verdict.replace("_", " "))
    between = f"{seconds(bounds[0])} to {seconds(bounds[1])}"
    return (
        *cells,
        Cell(text=gib(largest.peak_bytes), value=largest.peak_bytes),
        verdict,
        Cell(text=between, value=bounds[0]),
    )


def stages_table(simulated: SimulatedSchedule) -> Table | None:
    """Return one row per stage of a schedule with a model: micro-batches in flight, bytes, verdict."""
    if simulated.memory is None:
        return None
    headings = (
        text_heading("stage"),
        Heading(text="micro-batches in flight"),
        Heading(text="model states"),
        Heading(text="activations"),
        Heading(text="peak"),
        text_heading("verdict"),
    )
    rows = zip(simulated.run.peak_micro_batches, simulated.memory, strict=True)
    return Table(headings=headings, rows=tuple(_stage_cells(stage, *row) for stage, row in enumerate(rows)))


def _stage_cells(stage: int, in_flight: float, memory: StageMemory) -> tuple[Cell, ...]:
    sizes = (memory.state_bytes, memory.held_bytes, memory.peak_bytes)
    return (
        text_cell(f"stage {stage}"),
        Cell(text=f"{in_flight:g}", value=in_flight),
        *(Cell(text=gib(size), value=size) for size in sizes),
        text_cell(memory.verdict.replace("_", " ")),
    )


def notes(comparison: PipelineComparison) -> list[str]:
    """Return what a reader must know before quoting a figure."""
    low, high = PREDICTED_OVER_MEASURED
    found = [
        "Step: the longest time from a stage's first start to its last end, without the optimizer. Bubble: share of"
        " that in which the average stage is idle.",
        f"Optimistic: published throughputs predicted this way were {100 * low:.0f} to {100 * high:.0f} % above the"
        " measured ones, the most for interleaved_1f1b.",
    ]
    if comparison.staged is not None:
        found.append(
            "Planned, not measured: times are geometric means of the planned ranges; model states as under zero1, bf16"
            " with fp32 master weights and Adam's states."
        )
        if all(each.largest is not None and each.largest.verdict != FITS for each in comparison.schedules):
            found.append("No schedule fits: more --stages, a larger --tp, or --activation-checkpointing.")
    return found + [f"Left out: {reason}." for reason in comparison.left_out]

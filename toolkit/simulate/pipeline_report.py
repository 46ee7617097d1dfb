"""Simulated schedules for people: a table and timelines of characters in the terminal, and a page.

>>> from toolkit.simulate.pipeline_step import ChunkTimes, simulate
>>> from toolkit.simulate.pipeline_schedules import PipelineSize
>>> times = ChunkTimes(forward_seconds=1.0, backward_seconds=1.0, weight_seconds=1.0)
>>> run = simulate("1f1b", PipelineSize(stages=2, micro_batches=2), [times] * 2)
>>> print("\\n".join(text_timeline(run, columns=18)))
stage 0 FFFF....BBBB..BBBB
stage 1 ..FFBBBBFFBBBB....
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from toolkit.plan.memory import FITS
from toolkit.report.rendering import render
from toolkit.report.tables import Cell, Heading, Table, number_cell, rich_table, text_cell, text_heading
from toolkit.simulate.pipeline_comparison import PipelineComparison, SimulatedSchedule
from toolkit.simulate.pipeline_schedules import LETTERS
from toolkit.simulate.pipeline_step import PREDICTED_OVER_MEASURED, PipelineRun
from toolkit.simulate.stage_plans import StageMemory
from toolkit.units import gib, seconds

TERMINAL_COLUMNS = 100
MOST_SHOWN = 3  # of more schedules the terminal shows the timeline and stages of the fastest; the page has all
LABEL_COLUMNS = len("stage 4095 ")
IDLE = "."
LEGEND = "F forward, B whole backward, I gradient of the input, W gradient of the weights, . idle"
MOST_STAGES_OF_TEXT, MOST_STAGES_ON_PAGE = 16, 64
# The box of one stage on a page, in its own units, and the most boxes that are drawn exactly.
WIDTH, HEIGHT = 1000.0, 20.0
MOST_BOXES = 2000
# CSS variables of the page's colors by kind of operation: F, I, B, W.
COLORS = ("c2", "c1", "c5", "c4")
KINDS = ("forward", "gradient of the input", "whole backward", "gradient of the weights")
assert len(KINDS) == len(LETTERS)


def print_comparison(comparison: PipelineComparison, *, timeline: bool) -> None:
    """Print the table, and of a few schedules the memory of each stage, if it was planned, and the timeline."""
    console = Console(width=max(Console().width, TERMINAL_COLUMNS))
    print(comparison.heading)
    console.print(rich_table(comparison_table(comparison)))
    schedules = comparison.schedules
    for simulated in schedules if len(schedules) <= MOST_SHOWN else [fastest(schedules)]:
        run, stages = simulated.run, stages_table(simulated)
        if stages is not None or timeline:
            print(f"\n{run.order.schedule}, {seconds(run.makespan_seconds)}:")
        if stages is not None:
            console.print(rich_table(stages))
        if timeline:
            print(*text_timeline(run, columns=console.width - LABEL_COLUMNS), sep="\n")
    if timeline:
        print(LEGEND)
    print("", *notes(comparison), sep="\n")


def fastest(schedules: Sequence[SimulatedSchedule]) -> SimulatedSchedule:
    """Return the schedule with the shortest step."""
    return min(schedules, key=lambda each: each.run.step_seconds)


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


def text_timeline(run: PipelineRun, *, columns: int) -> list[str]:
    """Return one line per stage: what it does in the middle of each of `columns` equal times.

    Of more than 16 stages, evenly spaced ones are shown.
    """
    stages = shown_stages(run.size.stages, MOST_STAGES_OF_TEXT)
    width = len(str(stages[-1]))
    return [f"stage {stage:>{width}} {''.join(_sampled(run, stage, columns))}" for stage in stages]


def shown_stages(count: int, most: int) -> list[int]:
    """Return evenly spaced stages, the first and the last among them.

    >>> shown_stages(3, 16), shown_stages(64, 4)
    ([0, 1, 2], [0, 21, 42, 63])
    """
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def _sampled(run: PipelineRun, stage: int, columns: int) -> Iterator[str]:
    operations = run.stage_operations(stage)
    start, end, kind, _ = next(operations)
    for column in range(columns):
        now = (column + 0.5) * run.makespan_seconds / columns
        while end <= now and (following := next(operations, None)) is not None:
            start, end, kind, _ = following
        yield LETTERS[kind] if start <= now < end else IDLE


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleTimeline:
    """The timeline of one schedule on a page."""

    run: PipelineRun
    length: str
    expanded: bool
    """The page shows it opened."""

    def stages(self) -> list[int]:
        """Return the stages that the page shows."""
        return shown_stages(self.run.size.stages, MOST_STAGES_ON_PAGE)

    def paths(self, stage: int) -> list[tuple[str, str]]:
        """Return the SVG path and the CSS variable of each kind of operation."""
        scale = WIDTH / self.run.makespan_seconds
        boxes: list[list[str]] = [[] for _ in LETTERS]
        for start, end, kind in _boxes(self.run, stage):
            width = (end - start) * scale
            boxes[kind].append(f"M{start * scale:.2f} 0h{width:.2f}v{HEIGHT:g}h-{width:.2f}z")
        return [("".join(paths), COLORS[kind]) for kind, paths in enumerate(boxes) if paths]


def _boxes(run: PipelineRun, stage: int) -> Iterator[tuple[float, float, int]]:
    """Start, end and kind of each operation; where there are too many, what is sampled at equal times."""
    if len(run.order.operations[stage]) <= MOST_BOXES:
        for start, end, kind, _ in run.stage_operations(stage):
            yield start, end, kind
        return
    step = run.makespan_seconds / MOST_BOXES
    for place, letter in enumerate(_sampled(run, stage, MOST_BOXES)):
        if letter != IDLE:
            yield place * step, (place + 1) * step, LETTERS.index(letter)

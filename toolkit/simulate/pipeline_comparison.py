"""`toolkit simulate pipeline`: schedules side by side, as JSON, and as a table with timelines.

>>> from toolkit.simulate.pipeline_schedules import ChunkTimes, PipelineSize, simulate
>>> times = ChunkTimes(forward_seconds=1.0, backward_seconds=2.0)
>>> run = simulate("1f1b", PipelineSize(stages=2, micro_batches=2), [times] * 2)
>>> print("\\n".join(text_timeline(run, columns=18)))
stage 0 FFFF....BBBB..BBBB
stage 1 ..FFBBBBFFBBBB....
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from toolkit.errors import ToolkitError
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, INTERLEAVED_CHUNKS, SCHEDULES
from toolkit.report.charts import MOST_POINTS, Boxes, Chart, TimelineChart, TimelineCharts
from toolkit.report.rendering import Cell, Table, number_cell, text_cell
from toolkit.simulate import pipeline_schedules
from toolkit.simulate.options import LEAST, PipelineOptions, check_ranges, refuse_given
from toolkit.simulate.pipeline_schedules import LETTERS, ChunkTimes, PipelineRun, PipelineSize
from toolkit.simulate.simulation_report import SimulationReport, table_of
from toolkit.units import gib, seconds

if TYPE_CHECKING:
    from toolkit.simulate.stage_plans import StageMemory

OF_TIMES = ("forward_ms", "backward_ms", "transfer_ms", "num_layers")
OF_A_MODEL = ("gpu", "gpu_memory_gib", "gpu_tflops", "tp", "activation_checkpointing", "method")
LONGEST_MS = 10**7  # hours: more is a unit mixed up
RANGES = {
    **dict.fromkeys(("forward_ms", "backward_ms"), (LEAST, LONGEST_MS)),
    "transfer_ms": (0, LONGEST_MS),
    "num_layers": (1, 2**16),
}
LABEL_COLUMNS = len("stage 4095 ")
IDLE = "."
LEGEND = "F forward, B backward, . idle"
MOST_STAGES_OF_TEXT, MOST_STAGES_ON_PAGE = 16, 64
COLORS = dict(zip(LETTERS, ("c0", "c5"), strict=True))  # CSS variables of the page


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """One step of one schedule, and with a model what the plan adds."""

    run: PipelineRun
    step_seconds_range: tuple[float, float] | None = None  # steps at both ends of the planned times
    memory: Sequence[StageMemory] | None = None  # by stage

    @property
    def largest(self) -> StageMemory | None:
        """The stage that needs most memory."""
        return None if self.memory is None else max(self.memory, key=lambda stage: stage.peak_bytes)

    def as_row(self) -> dict[str, Any]:
        """Return the schedule as `toolkit simulate pipeline --json` prints it."""
        run, size, memory = self.run, self.run.size, self.memory
        row: dict[str, Any] = {
            "schedule": run.schedule,
            "stages": size.stages,
            "micro_batches": size.micro_batches,
            "chunks": size.chunks,
            **{name: getattr(run, name) for name in ("step_seconds", "makespan_seconds", "bubble_fraction")},
            "peak_micro_batches": list(run.peak_micro_batches),
            "chunk_seconds": [list(times) for times in run.times],
        }
        if memory is not None:
            row["step_seconds_range"] = list(self.step_seconds_range or ())
            by_stage = [asdict(stage) for stage in memory]
            row |= {name: [stage[name] for stage in by_stage] for name in by_stage[0]}
        return row


Simulated = Callable[[str, PipelineSize], SimulatedSchedule]


@dataclass(frozen=True, kw_only=True)
class PipelineComparison:
    """Simulated steps of several schedules with the same stages, micro-batches and times."""

    heading: str
    schedules: list[SimulatedSchedule]
    left_out: list[str]  # why schedules are missing that were not named

    def as_json(self) -> dict[str, Any]:
        """Return what `toolkit simulate pipeline --json` prints."""
        return {
            "schedules": [each.as_row() for each in self.schedules],
            "left_out": self.left_out,
            "predicted_over_measured": list(pipeline_schedules.PREDICTED_OVER_MEASURED),
        }


def compare_schedules(options: PipelineOptions) -> PipelineComparison:
    """Return the schedules that were named, or all that are possible.

    Raises ToolkitError for an impossible schedule that was named, and for values out of range.
    """
    check_ranges(options, RANGES)
    heading, layers, simulated = _with_times(options) if options.model is None else _with_model(options)
    possible, left_out = _possible(options, layers)
    return PipelineComparison(
        heading=f"{options.stages} stages, {options.micro_batches} micro-batches; {heading}",
        schedules=[simulated(schedule, size) for schedule, size in possible],
        left_out=left_out,
    )


def _with_times(options: PipelineOptions) -> tuple[str, int | None, Simulated]:
    refuse_given(options, OF_A_MODEL, "{flag} has no effect without --model", "`--model MODEL`")
    forward_ms, backward_ms = options.forward_ms, options.backward_ms
    if forward_ms is backward_ms is None:
        forward_ms, backward_ms = 1.0, 2.0
    if forward_ms is None or backward_ms is None:
        missing = "--forward-ms" if forward_ms is None else "--backward-ms"
        raise ToolkitError(f"{missing} is missing", hint="give --forward-ms and --backward-ms, or none of the times")
    times = ChunkTimes(forward_seconds=forward_ms / 1000, backward_seconds=backward_ms / 1000)
    transfer_ms = options.transfer_ms or 0.0

    def simulated(schedule: str, size: PipelineSize) -> SimulatedSchedule:
        chunks = [times.divided(size.chunks)] * size.num_chunks
        run = pipeline_schedules.simulate(schedule, size, chunks, transfer_seconds=transfer_ms / 1000)
        return SimulatedSchedule(run=run)

    heading = f"forward {forward_ms:g} ms, backward {backward_ms:g} ms, transfer {transfer_ms:g} ms"
    return heading, options.num_layers, simulated


def _with_model(options: PipelineOptions) -> tuple[str, int | None, Simulated]:
    from toolkit.simulate.stage_plans import staged_model  # the planner takes as long to import as all the rest

    refuse_given(options, OF_TIMES, "{flag} has no effect with --model, which has its own", "give one of them")
    staged = staged_model(options)

    def simulated(schedule: str, size: PipelineSize) -> SimulatedSchedule:
        run = staged.simulate(schedule, size)
        low, high = (staged.simulate(schedule, size, end).step_seconds for end in (0, 1))
        return SimulatedSchedule(run=run, step_seconds_range=(low, high), memory=staged.stage_memory(run))

    return staged.heading, staged.shape.num_layers, simulated


def _possible(options: PipelineOptions, num_layers: int | None) -> tuple[list[tuple[str, PipelineSize]], list[str]]:
    possible, left_out = [], []
    given = INTERLEAVED_CHUNKS if options.chunks is None else options.chunks
    for schedule in dict.fromkeys(options.schedule or SCHEDULES):
        chunks = given if schedule == INTERLEAVED else 1
        size = PipelineSize(stages=options.stages, micro_batches=options.micro_batches, chunks=chunks)
        try:
            pipeline_schedules.check_schedule(schedule, size)
            if num_layers is not None:
                _check_layers(num_layers, size)
        except ToolkitError as error:
            if options.schedule or schedule == GPIPE:  # whatever rules out GPipe rules out all of them
                raise
            left_out.append(f"{schedule}: {error.message}")
        else:
            possible.append((schedule, size))
    return possible, left_out


def _check_layers(num_layers: int, size: PipelineSize) -> None:
    if num_layers < size.num_chunks:
        chunks, hint = "" if size.chunks == 1 else f" of {size.chunks} chunks", max(1, num_layers // size.chunks)
        what = f"{num_layers} layers are too few for {size.stages} stages{chunks}"
        raise ToolkitError(what, hint=f"`--stages {hint}` or fewer")
    if size.chunks > 1 and num_layers % size.num_chunks:
        what = f"{num_layers} layers are not divisible by {size.stages} stages of {size.chunks} chunks"
        raise ToolkitError(what, hint="other --stages or --chunks, or a schedule with one chunk per stage")


def pipeline_report(comparison: PipelineComparison, *, timeline: bool, on_page: bool = False) -> SimulationReport:
    """Return the schedules for people: a table, and of each memory by stage and the timeline."""
    schedules = comparison.schedules
    fastest = min(schedules, key=lambda each: each.run.step_seconds)
    sections: list[tuple[str, Table | Chart | str]] = [("", table_of([_row(each) for each in schedules]))]
    if on_page:
        timelines = [_drawn_timeline(each.run, expanded=each is fastest) for each in schedules]
        colors = list(zip(COLORS.values(), ("forward", "backward"), strict=True))
        sections.append(("Timelines", TimelineCharts(timelines=timelines, colors=colors)))
    for simulated in schedules:
        run = simulated.run
        times = f"step {seconds(run.step_seconds)}, from the first start to the last end"
        shown = "memory by stage" if on_page else f"{times} {seconds(run.makespan_seconds)}"
        heading = f"{run.schedule}, {shown}"
        if simulated.memory is not None:
            stages = map(_stage_row, itertools.count(), run.peak_micro_batches, simulated.memory)
            sections.append((heading, table_of(list(stages))))
            heading = ""
        if timeline:
            columns = max(Console().width, 100) - LABEL_COLUMNS
            sections.append((heading, "\n".join(text_timeline(run, columns=columns))))
    low, high = pipeline_schedules.PREDICTED_OVER_MEASURED
    notes = [LEGEND] if timeline else []
    notes += [
        "Step: the longest time from a stage's first start to its last end, without the optimizer. Bubble: share of"
        " that in which the average stage is idle.",
        f"Optimistic: published throughputs predicted this way were {100 * low:.0f} to {100 * high:.0f} % above the"
        " measured ones, the most for interleaved_1f1b.",
    ]
    if fastest.memory is not None:
        notes.append(
            "Planned, not measured: times are geometric means of the planned ranges; model states as under zero1, bf16"
            " with fp32 master weights and Adam's states."
        )
        if all(each.largest is not None and not each.largest.fits for each in schedules):
            notes.append("No schedule fits: more --stages, a larger --tp, or --activation-checkpointing.")
    return SimulationReport(
        title="Pipeline schedules, simulated",
        summary=f"{comparison.heading}: {fastest.run.schedule} has the shortest step,"
        f" {seconds(fastest.run.step_seconds)}, with a bubble of {100 * fastest.run.bubble_fraction:.1f} %.",
        sections=sections,
        notes=notes + [f"Left out: {reason}." for reason in comparison.left_out],
    )


def _row(simulated: SimulatedSchedule) -> dict[str, Cell]:
    run, peaks = simulated.run, simulated.run.peak_micro_batches
    digits = 0 if run.size.chunks == 1 else 1
    row = {
        "schedule": text_cell(run.schedule),
        "chunks": number_cell(run.size.chunks, 0),
        "step": Cell(text=seconds(run.step_seconds), value=run.step_seconds),
        "bubble": Cell(text=f"{100 * run.bubble_fraction:.1f} %", value=run.bubble_fraction),
        "in flight,\nfirst": number_cell(peaks[0], digits),
        "in flight,\nmost": number_cell(max(peaks), digits),
    }
    largest, bounds = simulated.largest, simulated.step_seconds_range
    if largest is not None and bounds is not None:
        row["largest\nstage"] = _gib_cell(largest.peak_bytes)
        row["verdict"] = text_cell(largest.verdict.replace("_", " "))
        row["planned step"] = Cell(text=" to ".join(map(seconds, bounds)), value=bounds[0])
    return row


def _stage_row(stage: int, in_flight: float, memory: StageMemory) -> dict[str, Cell]:
    return {
        "stage": text_cell(f"stage {stage}"),
        "micro-batches in flight": Cell(text=f"{in_flight:g}", value=in_flight),
        "model states": _gib_cell(memory.state_bytes),
        "activations": _gib_cell(memory.activation_bytes),
        "peak": _gib_cell(memory.peak_bytes),
        "verdict": text_cell(memory.verdict.replace("_", " ")),
    }


def _gib_cell(size: int) -> Cell:
    return Cell(text=gib(size), value=size)


def text_timeline(run: PipelineRun, *, columns: int) -> list[str]:
    """Return one line per stage: what it does in the middle of each of `columns` equal times.

    Of more than 16 stages, evenly spaced ones are shown.
    """
    stages = shown_stages(run.size.stages, MOST_STAGES_OF_TEXT)
    width = len(str(stages[-1]))
    return [f"stage {stage:>{width}} {''.join(_sampled(run, stage, columns))}" for stage in stages]


def shown_stages(count: int, most: int) -> Sequence[int]:
    """Return evenly spaced stages, the first and the last among them.

    >>> shown_stages(64, 4)
    [0, 21, 42, 63]
    """
    return range(count) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]


def _sampled(run: PipelineRun, stage: int, columns: int) -> Iterator[str]:
    operations = run.stage_operations(stage)
    start, end, letter = next(operations)
    for column in range(columns):
        now = (column + 0.5) * run.makespan_seconds / columns
        while end <= now and (following := next(operations, None)) is not None:
            start, end, letter = following
        yield letter if start <= now < end else IDLE


def _drawn_timeline(run: PipelineRun, *, expanded: bool) -> TimelineChart:
    """Every operation of a stage; where there are too many, what it does at equal times."""
    rows, step = [], run.makespan_seconds / MOST_POINTS
    for stage in shown_stages(run.size.stages, MOST_STAGES_ON_PAGE):
        if len(run.operations[stage]) <= MOST_POINTS:
            drawn = list(run.stage_operations(stage))
        else:
            letters = enumerate(_sampled(run, stage, MOST_POINTS))
            drawn = [(place * step, (place + 1) * step, letter) for place, letter in letters]
        spans = {each: [(start, end) for start, end, letter in drawn if letter == each] for each in LETTERS}
        rows.append((f"stage {stage}", [Boxes(spans=spans[letter], color=color) for letter, color in COLORS.items()]))
    label = run.schedule
    return TimelineChart(label=label, rows=rows, seconds=run.makespan_seconds, x_name="one step", expanded=expanded)

"""The tables and charts of a report. A table lists its columns; headings and formats are those that fields declare."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from toolkit.compare.results import Results
from toolkit.compare.rows import MODEL_STATES, Row, Run
from toolkit.compare.significance import verdict
from toolkit.record import status
from toolkit.record.columns import Column, Format, column_of
from toolkit.record.measurements import MEMORY_PHASES
from toolkit.report import charts
from toolkit.report.rendering import UNKNOWN, Cell, Heading, Table, number_cell, one_line, text_cell
from toolkit.units import GIB_UNIT, NOT_AVAILABLE, ByteUnit, byte_unit, fixed, interval, number, percent, speed

TableName = Literal["comparison", "memory", "speed", "efficiency", "overhead", "scaling", "trials"]
LONGEST_SHORT_NAME = 6  # a longer name would make the heading of the ratio wider than its figures
# Columns that are computed when a table is made; `peak` is of host memory on a CPU, of the allocator on GPUs.
COMPUTED = {
    "model_state_bytes": Column("model\nstates\n{unit}"),
    "of_baseline": Column("of\nbaseline", percent),
    "planned_gpu_state_bytes": Column("planned\nwith GPUs\n{unit}"),
}
# Shorter than in the other tables: the comparison is shown on a terminal of 100 columns.
IN_COMPARISON = {
    "tokens_per_second": Column("tokens\n/s", column_of(Row, "tokens_per_second").show),
    "step_seconds_median": Column("step\ns", fixed(3)),
    "peak_allocated_bytes": Column("peak\nalloc.\n{unit}"),
    "ratio_to_reference": Column("ratio\nto {short_baseline}", fixed(2)),
}
# Headings of columns that hold words.
WORDS = ("preset", "trial", "status", "parity", "in phase", "row", "verdict", "kernels")
# Keys in the order of the table's columns.
COLUMNS: dict[TableName, str] = {
    "comparison": """tokens_per_second layout per_device_train_batch_size tokens_per_second_interval mfu
        cost_per_million_tokens step_seconds_median parameter_bytes gradient_bytes optimizer_bytes
        planned_gpu_state_bytes peak last_loss ratio_to_reference""",
    "memory": """model_state_bytes of_baseline planned_gpu_parameter_bytes planned_gpu_gradient_bytes
        planned_gpu_optimizer_bytes planned_peak_bytes peak_allocated_bytes peak_reserved_bytes peak_driver_bytes
        peak_host_bytes peak_rank allocator_retries""",
    "speed": """tokens_per_second_per_gpu non_padding_tokens_per_second supervised_tokens_per_second
        tokens_per_cpu_second padding_fraction step_seconds_median step_seconds_p90 timed_steps timed_seconds""",
    "efficiency": """ratio_to_reference ratio_interval rank mfu mfu_full_attention hfu cost_per_million_tokens
        energy_joules rank_skew kernels""",
    "overhead": """communication_fraction exposed_communication_fraction save_seconds save_bytes startup_seconds
        wall_seconds goodput_fraction""",
    "scaling": "world_size num_nodes tokens_per_second speed_up scaling_efficiency",
    "trials": "tokens_per_second step_seconds_median timed_steps startup_seconds wall_seconds",
}
# Names of the model states in legends, in the order of their colors.
PARTS = dict(zip(("parameters", "gradients", "optimizer"), MODEL_STATES, strict=True))
SAME_LINE = 0.005  # losses that differ by less than this share of a chart's height are one line
# An interval is drawn up to this many times the largest figure: that of two repeats can be ten times as long.
LONGEST_INTERVAL = 1.5
# Two lanes in the row of a rank: compute and waiting for data above, communication below.
LANE_HEIGHT = 9.0
LANE_TOP = {"compute": 0.0, "data_wait": 0.0, "communication": 11.0}


def results_unit(results: Results) -> ByteUnit:
    """Return the unit of every table and plot of one report."""
    parts = ((row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes) for row in results.rows)
    return byte_unit([*(size for sizes in parts for size in sizes), *map(results.peak_bytes, results.rows)])


def row_table(name: TableName, results: Results, *, narrow: bool = False) -> Table:
    """Return the figures of completed rows, without columns that no row has; `narrow` for a terminal."""
    unit, baseline = results_unit(results), one_line(results.reference)
    columns: dict[str, Column] = {}
    for listed in COLUMNS[name].split():
        key = ("peak_host_bytes" if results.on_cpu else "peak_allocated_bytes") if listed == "peak" else listed
        if key.startswith("planned_gpu_") and not results.on_cpu:  # there a rank measures them
            continue
        column = COMPUTED[key] if key in COMPUTED else column_of(Row, key)
        if name == "comparison":
            column = IN_COMPARISON.get(key, column)
            known = column.only_if_known
            if known is not None and (narrow or all(getattr(row, known) is None for row in results.rows)):
                continue
        columns[key] = column
    headings = [
        (column.heading or "").format(
            unit=unit.name,
            baseline=baseline,
            short_baseline=baseline if len(baseline) <= LONGEST_SHORT_NAME else "base.",
            process="process" if results.on_cpu else "GPU",
        )
        for column in columns.values()
    ]
    rows = []
    for label, row in results.labelled_rows:
        figures = [
            ratio_cell(row)
            if name == "comparison" and key == "ratio_to_reference"
            else format_cell(_value(results, row, key), column, unit)
            for key, column in columns.items()
        ]
        figures = figures if row.completed else [UNKNOWN] * len(columns)
        rows.append([text_cell(label), text_cell(row.status_text), *figures])
    return _without_equal_statuses(make_table(["preset", "status", *headings], rows)).without_unknown_columns()


def _without_equal_statuses(table: Table) -> Table:
    if any(row[1].text != status.COMPLETED for row in table.rows):
        return table
    return table.with_columns([index for index in range(len(table.headings)) if index != 1])


def ratio_cell(row: Row) -> Cell:
    """Return the ratio to the baseline with its interval, or `unclear` where that is too wide to tell."""
    ratio, bounds = row.ratio_to_reference, row.ratio_interval
    if ratio is None or bounds is None:
        return number_cell(ratio, 2)
    ends = interval(lambda end: number(end, 2 if end < 100 else 0))(bounds)
    known = "unclear" if verdict(bounds) == "unclear" else number(ratio, 2)
    return Cell(text=f"{known} ({ends})", value=ratio)


def _value(results: Results, row: Row, key: str) -> object:
    if key != "of_baseline":
        return getattr(row, key)
    baseline = results.baseline(row.world_size)
    of_baseline = baseline.model_state_bytes if baseline else None
    return None if row.model_state_bytes is None or not of_baseline else row.model_state_bytes / of_baseline


def trials_table(results: Results) -> Table | None:
    """Return every trial in the order in which they ran; None where there is none."""
    if not results.trials:
        return None
    columns = {key: column_of(Run, key) for key in COLUMNS["trials"].split()}
    rows = [
        [text_cell(trial.label), text_cell(trial.status)]
        + [format_cell(getattr(trial, key), column, GIB_UNIT) for key, column in columns.items()]
        for trial in results.trials
    ]
    table = make_table(["trial", "status", *(column.heading or key for key, column in columns.items())], rows)
    return _without_equal_statuses(table).without_unknown_columns()


def parity_table(results: Results) -> Table:
    """Return first and last loss beside the baseline's; a row that failed earlier has no last difference."""

    def difference(loss: float | None, baseline: float | None) -> Cell:
        """Relative to the baseline, signed; an exact 0 is written as such."""
        if loss is None or not baseline:
            return UNKNOWN
        relative = (loss - baseline) / abs(baseline)
        return Cell(text=f"{relative:+.1e}" if relative else "0", value=relative)

    rows = []
    for label, row in results.labelled_rows:
        baseline = results.baseline(row.world_size)
        first, last = (baseline.first_loss, baseline.last_loss) if baseline else (None, None)
        cells = [text_cell(label), text_cell(row.parity or NOT_AVAILABLE)]
        cells += [number_cell(row.first_loss, 6), difference(row.first_loss, first)]
        cells += [number_cell(row.last_loss, 6), difference(row.last_loss, last if row.completed else None)]
        rows.append(cells)
    return make_table(["preset", "parity", "first loss", "difference", "last loss", "difference"], rows)


def phases_table(results: Results) -> Table | None:
    """Return memory by phase of the first step, of failed rows too; None where no row has any."""
    known = [row.memory_by_phase for row in results.rows if row.memory_by_phase]
    if not known:
        return None
    unit = byte_unit(getattr(memory, phase) for memory in known for phase in MEMORY_PHASES)
    names = [f"{when}\n{unit.name}" for when in ("after loading", "after forward", "after backward", "after step")]
    rows = [
        [text_cell(label), text_cell(row.status_text)]
        + [bytes_cell(getattr(row.memory_by_phase, phase, None), unit) for phase in MEMORY_PHASES]
        for label, row in results.labelled_rows
    ]
    return _without_equal_statuses(make_table(["preset", "status", *names], rows))


def probes_table(results: Results) -> Table | None:
    """Return the sizes that the search for each row's largest per-GPU batch tried, and why the smallest failed."""
    rows = []
    for label, row in results.labelled_rows:
        if not row.probes:
            continue
        probes = sorted(row.probes, key=lambda probe: probe.per_device_train_batch_size)
        sizes = [probe.per_device_train_batch_size for probe in probes]
        ran = [probe.per_device_train_batch_size for probe in probes if probe.status == "completed"]
        cells = [text_cell(label), number_cell(max(ran, default=None), 0), text_cell(", ".join(map(str, sizes)))]
        none = [Cell(text="none"), *[Cell(text="")] * 4]
        failures = (
            [number_cell(probe.per_device_train_batch_size, 0), text_cell(probe.status)]
            + [text_cell(failure.phase or NOT_AVAILABLE)]
            + [bytes_cell(size, GIB_UNIT) for size in (failure.predicted_bytes, failure.measured_bytes)]
            for probe in probes
            if (failure := probe.failure)
        )
        rows.append([*cells, *next(failures, none)])
    headings = ["preset", "largest\nthat runs", "tried", "smallest\nthat does not", "status", "in phase"]
    return make_table([*headings, "predicted\npeak GiB", "last measured\npeak GiB"], rows) if rows else None


def make_table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], words: Sequence[str] = WORDS) -> Table:
    """Return a table; the columns that hold words are aligned left."""
    return Table(
        headings=tuple(Heading(text=text, numeric=text not in words) for text in headings), rows=tuple(map(tuple, rows))
    )


def format_cell(value: object, column: Column, unit: ByteUnit) -> Cell:
    """Return a value as its column shows it; an interval is sorted by its low end."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return text_cell(value)
    by = value[0] if isinstance(value, tuple) else value
    assert isinstance(by, (int, float))
    show: Format = column.show or unit.text
    return Cell(text=show(value), value=by)


def bytes_cell(size: int | None, unit: ByteUnit) -> Cell:
    return Cell(text=unit.text(size), value=size)


def losses_chart(results: Results) -> charts.LineChart | None:
    """Return loss curves, of which those that no eye could tell apart are one line; None without any."""
    known = [loss for row in results.rows for loss in row.losses if loss is not None]
    if not known:
        return None
    groups: list[list[tuple[str, Row]]] = []
    largest = 0.0
    for label, row in results.labelled_rows:
        name = label if row.status_text == status.COMPLETED else f"{label} ({row.status_text})"
        for group in groups:
            absolute, relative = _loss_differences(row, group[0][1])
            if absolute <= SAME_LINE * (max(known) - min(known)):
                largest = max(largest, relative)
                group.append((name, row))
                break
        else:
            groups += [[(name, row)]] if row.losses else []
    exponent = math.floor(math.log10(largest)) if largest else 0
    within = f"within {math.ceil(largest / 10.0**exponent)}e{exponent}" if largest else "exactly"
    agreement = f"All agree {within}." if len(groups) == 1 else f"Presets on one line agree {within}."
    last = max(len(row.losses) for row in results.rows)
    return charts.LineChart(
        lines=charts.curves(
            (
                ", ".join(name for name, _ in group),
                [(float(step), loss) for step, loss in enumerate(group[0][1].losses, 1) if loss is not None],
            )
            for group in groups
        ),
        x_labels=[(1.0, "1"), (float(last), f"{last}")],
        x_name="step",
        title="loss by step",
        note=agreement if any(len(group) > 1 for group in groups) else "",
    )


def _loss_differences(row: Row, other: Row) -> tuple[float, float]:
    pairs = list(zip_longest(row.losses, other.losses))
    differences = [(abs(a - b), abs(a - b) / (abs(b) or 1.0)) for a, b in pairs if a is not None and b is not None]
    if not pairs or len(differences) < len(pairs):
        return math.inf, math.inf
    return max(absolute for absolute, _ in differences), max(relative for _, relative in differences)


def scaling_chart(results: Results) -> charts.LineChart | None:
    """Return speed-ups over each preset's fewest processes, beside the ideal; None with one number of processes."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(results.rows, key=lambda row: row.world_size):
        if row.speed_up is not None and row.comparable:
            points.setdefault(row.preset, []).append((float(row.world_size), row.speed_up))
    points = {preset: own for preset, own in points.items() if len(own) > 1}
    if not points:
        return None
    sizes = sorted({size for own in points.values() for size, _ in own})
    ideal = [(sizes[0], 1.0), (sizes[-1], sizes[-1] / sizes[0])]
    lines = [charts.Line(points=ideal, label="ideal", color="muted", width=1.5, dashed=True)]
    for index, (preset, own) in enumerate(points.items(), 1):
        lines.append(charts.Line(points=own, label=preset, color=f"c{index % len(charts.CURVES)}", dots=True))
    return charts.LineChart(
        lines=lines,
        x_labels=[(size, f"{size:.0f}") for size in sizes],
        x_name="processes",
        title="speed-up by number of processes",
        y_unit="×",
    )


def profiled_steps(results: Results) -> charts.TimelineCharts:
    """Return one profiled step of each row that has one; the first of those with most ranks is expanded."""
    known = [(label, row.timeline) for label, row in results.labelled_rows if row.timeline]
    widest = max((step for _, step in known), key=lambda step: len(step.ranks), default=None)
    timelines = []
    for label, step in known:
        rows = []
        for rank in step.ranks:
            start = rank.start_seconds
            lanes = {lane: [(start + begin, start + end) for begin, end in spans] for lane, spans in rank.lanes.items()}
            boxes = [
                charts.Boxes(spans=lanes.get(lane, ()), color=lane, top=top, height=LANE_HEIGHT)
                for lane, top in LANE_TOP.items()
            ]
            rows.append((f"rank {rank.rank}", boxes))
        length = max(rank.start_seconds + rank.seconds for rank in step.ranks) or 1.0
        name, expanded = f"step {step.step}", step is widest
        timelines.append(charts.TimelineChart(label=label, rows=rows, seconds=length, x_name=name, expanded=expanded))
    return charts.TimelineCharts(timelines=timelines, colors=tuple(charts.LANES.items()))


def memory_chart(results: Results) -> charts.BarChart:
    """Return one bar per row, by part; on GPUs up to the allocated peak, with the plan and the GPU's memory."""
    unit, gpus = results_unit(results), results.environment.gpus
    bars = tuple((label, _memory_bar(results, row, unit)) for label, row in results.labelled_rows)
    capacity = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=None)
    colors = [(f"p{index}", name) for index, name in enumerate(PARTS)]
    if any(color == "rest" for _, bar in bars for _, color in bar.segments):
        colors.append(("rest", "activations and the rest, up to the allocated peak"))
    marks = [("tick", "planned")] * any(bar.tick for _, bar in bars)
    marks += [("capacity", f"capacity {unit.text(capacity)} {unit.name}")] * (capacity is not None)
    return charts.BarChart(bars=bars, colors=tuple(colors), marks=tuple(marks), limit=capacity)


def _memory_bar(results: Results, row: Row, unit: ByteUnit) -> charts.Bar:
    """The parts, up to the allocated peak. Of a row that ran out of memory the last measured peak, hatched.

    On a CPU a bar ends with the parts, resident memory of a process includes libraries; the plan is of mixed precision.
    """
    planned, peak = row.planned_allocated_bytes, row.peak_allocated_bytes
    if results.on_cpu:
        planned = peak = None
    if not row.completed:
        failure = row.failure
        if failure is None or results.on_cpu or not row.out_of_memory:
            return charts.Bar(segments=(), text=row.status, alarm=not row.unsupported)
        text, measured = row.status + (f" in {failure.phase}" if failure.phase else ""), failure.measured_bytes
        text += "" if measured is None else f", {unit.text(measured)} {unit.name} measured"
        return charts.Bar(segments=() if measured is None else ((measured, None),), text=text, alarm=True, tick=planned)
    parts = [(getattr(row, key), f"p{index}") for index, key in enumerate(PARTS.values())]
    segments = tuple((float(size), color) for size, color in parts if size)
    states = row.model_state_bytes
    if peak is None:
        text = NOT_AVAILABLE if states is None else f"{unit.text(states)} {unit.name}"
        return charts.Bar(segments=segments if states is not None else (), text=text, tick=planned)
    text = f"{unit.text(peak)} {unit.name}"
    if states is None or states > peak:  # some of it is offloaded to the host
        text += "" if states is None else f" (model states, host included: {unit.text(states)})"
        return charts.Bar(segments=((float(peak), "rest"),), text=text, tick=planned)
    return charts.Bar(segments=(*segments, (float(peak - states), "rest")), text=text, tick=planned)


def speed_chart(results: Results) -> charts.BarChart | None:
    """Return one bar per row with its interval, hatched where the speed is not comparable; None without any speed."""
    if not any(row.has_speed for row in results.rows):
        return None
    bars = []
    longest = LONGEST_INTERVAL * max(
        (row.tokens_per_second or 0.0 for row in results.rows if row.completed), default=0.0
    )
    for label, row in results.labelled_rows:
        value, bounds = row.tokens_per_second, row.tokens_per_second_interval
        if not row.completed or row.failed_parity:
            bars.append((label, charts.Bar(segments=(), text=row.status_text, alarm=not row.unsupported)))
            continue
        segments = () if value is None else ((value, "speed" if row.comparable else None),)
        text = speed(value) if bounds is None else f"{speed(value)} ({speed(bounds[0])} to {speed(bounds[1])})"
        is_open = bounds is not None and bounds[1] > longest  # the text has its end
        drawn = (bounds[0], longest) if bounds and is_open else bounds
        bars.append((label, charts.Bar(segments=segments, text=text, interval=drawn, open_interval=is_open)))
    marks = (("span", "95 % interval over repeats"),) if any(bar.interval for _, bar in bars) else ()
    return charts.BarChart(bars=tuple(bars), marks=marks)

"""The charts of a comparison: bytes by part, speeds, losses, speed-up by processes, a profiled step of every rank."""

from __future__ import annotations

from dataclasses import replace

from toolkit.compare.result_tables import results_unit
from toolkit.compare.results import Results
from toolkit.compare.rows import NOT_SUPPORTED, Row, TimelineRank
from toolkit.report.charts import (
    CURVES,
    LANES,
    Bar,
    BarChart,
    Boxes,
    Line,
    LineChart,
    TimelineChart,
    TimelineCharts,
    curves,
)
from toolkit.units import NOT_AVAILABLE, ByteUnit, speed

# Parts of the model states, in the order of their colors, and their keys in a row.
PARTS = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}
# An interval is drawn up to this many times the largest figure: that of two repeats can be ten times as long.
LONGEST_INTERVAL = 1.5
# Two lanes in the row of a rank: compute and waiting for data above, communication below.
LANE_HEIGHT = 9.0
LANE_TOP = {"compute": 0.0, "data_wait": 0.0, "communication": 11.0}


def losses_chart(results: Results) -> LineChart | None:
    """Return loss curves, earlier ones wider, so that one that coincides with another is visible; None without any."""
    if not any(loss is not None for row in results.rows for loss in row.losses):
        return None
    last = max(len(row.losses) for row in results.rows)
    return LineChart(
        lines=curves(
            (
                label if row.status_text == "completed" else f"{label} ({row.status_text})",
                [(float(step), loss) for step, loss in enumerate(row.losses, 1) if loss is not None],
            )
            for label, row in results.labelled_rows
            if row.losses
        ),
        y_format="{:.3f}",
        x_labels=[(1.0, "1"), (float(last), f"{last}")],
        x_name="step",
        title="loss by step",
        note="Where curves coincide, an earlier one is the wider line behind a later one.",
    )


def scaling_chart(results: Results) -> LineChart | None:
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
    lines = [Line(points=ideal, label="ideal", color="muted", width=1.5, dashed=True)]
    for index, (preset, own) in enumerate(points.items(), 1):
        lines.append(Line(points=own, label=preset, color=f"c{index % len(CURVES)}", dots=True))
    return LineChart(
        lines=lines,
        y_format="{:.2f}×",
        x_labels=[(size, f"{size:.0f}") for size in sizes],
        x_name="processes",
        title="speed-up by number of processes",
    )


def profiled_steps(results: Results) -> TimelineCharts:
    """Return one profiled step of each row that has one; the first of those with most ranks is expanded."""
    known = [(label, row.timeline) for label, row in results.labelled_rows if row.timeline]
    widest = max((step for _, step in known), key=lambda step: len(step.ranks), default=None)
    timelines = [
        TimelineChart(
            label=label,
            rows=[(f"rank {rank.rank}", _lanes(rank)) for rank in step.ranks],
            seconds=max(rank.start_seconds + rank.seconds for rank in step.ranks) or 1.0,
            x_name=f"step {step.step}",
            expanded=step is widest,
        )
        for label, step in known
    ]
    return TimelineCharts(timelines=timelines, colors=tuple(LANES.items()))


def _lanes(rank: TimelineRank) -> list[Boxes]:
    lanes = []
    for lane in LANES:
        spans = [(rank.start_seconds + start, rank.start_seconds + end) for start, end in rank.lanes.get(lane, ())]
        lanes.append(Boxes(spans=spans, color=lane, top=LANE_TOP[lane], height=LANE_HEIGHT))
    return lanes


def memory_chart(results: Results) -> BarChart:
    """Return one bar per row, by part; on GPUs up to the allocated peak, with the plan and the GPU's memory."""
    unit, gpus = results_unit(results), results.environment.gpus
    bars = tuple((label, _memory_bar(results, row, unit)) for label, row in results.labelled_rows)
    capacity = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=None)
    colors = [(f"p{index}", name) for index, name in enumerate(PARTS)]
    if any(color == "rest" for _, bar in bars for _, color in bar.segments):
        colors.append(("rest", "activations and the rest, up to the allocated peak"))
    marks = [("tick", "planned")] * any(bar.tick for _, bar in bars)
    marks += [("capacity", f"capacity {unit.text(capacity)} {unit.name}")] * (capacity is not None)
    return BarChart(bars=bars, colors=tuple(colors), marks=tuple(marks), limit=capacity)


def _memory_bar(results: Results, row: Row, unit: ByteUnit) -> Bar:
    planned = row.planned_allocated_bytes
    if not row.completed:
        return _failed_bar(row, unit, on_cpu=results.on_cpu)
    parts = [(getattr(row, key), f"p{index}") for index, key in enumerate(PARTS.values())]
    segments = tuple((float(size), color) for size, color in parts if size)
    states, peak = row.model_state_bytes, None if results.on_cpu else row.peak_allocated_bytes
    if peak is None:  # resident memory of a CPU process includes libraries: it is no end for a bar
        text = NOT_AVAILABLE if states is None else f"{unit.text(states)} {unit.name}"
        return Bar(segments=segments if states is not None else (), text=text, tick=planned)
    text = f"{unit.text(peak)} {unit.name}"
    if states is None or states > peak:  # some of it is offloaded to the host
        text += "" if states is None else f" (model states, host included: {unit.text(states)})"
        return Bar(segments=((float(peak), "rest"),), text=text, tick=planned)
    return Bar(segments=(*segments, (float(peak - states), "rest")), text=text, tick=planned)


def _failed_bar(row: Row, unit: ByteUnit, *, on_cpu: bool) -> Bar:
    """The last measured peak, hatched, and the plan. On a CPU the peak would be libraries too."""
    failure = row.failure
    if failure is None or on_cpu or not row.out_of_memory:
        return Bar(segments=(), text=row.status, alarm=row.status != NOT_SUPPORTED)
    text, measured = row.status + (f" in {failure.phase}" if failure.phase else ""), failure.measured_bytes
    text += "" if measured is None else f", {unit.text(measured)} {unit.name} measured"
    segments = () if measured is None else ((float(measured), None),)
    return Bar(segments=segments, text=text, alarm=True, tick=row.planned_allocated_bytes)


def speed_chart(results: Results) -> BarChart | None:
    """Return one bar per row with its interval, hatched where the speed is not comparable; None without rows."""
    if not results.rows:
        return None
    bars = [(label, _speed_bar(row)) for label, row in results.labelled_rows]
    longest = LONGEST_INTERVAL * max((bar.length for _, bar in bars), default=0.0)
    for place, (label, bar) in enumerate(bars):
        if bar.interval is not None and bar.interval[1] > longest:  # the text has its end
            bars[place] = label, replace(bar, interval=(bar.interval[0], longest), open_interval=True)
    marks = (("span", "95 % interval over repeats"),) if any(bar.interval for _, bar in bars) else ()
    return BarChart(bars=tuple(bars), marks=marks)


def _speed_bar(row: Row) -> Bar:
    if not row.completed or row.failed_parity:
        return Bar(segments=(), text=row.status_text, alarm=row.status != NOT_SUPPORTED)
    value, bounds = row.tokens_per_second, row.tokens_per_second_interval
    segments = () if value is None else ((value, "speed" if row.comparable else None),)
    text = speed(value) if bounds is None else f"{speed(value)} ({speed(bounds[0])} to {speed(bounds[1])})"
    return Bar(segments=segments, text=text, interval=bounds)

"""Bar charts of the page: bytes by part against the GPU's memory, and speeds with their intervals.

Geometry only: lengths become percentages of the line here, and the template draws them as plain elements that stretch,
so that text keeps its size on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.compare.columns import ByteUnit, speed
from toolkit.compare.report.chart_colors import PARTS
from toolkit.compare.report.result_tables import results_unit
from toolkit.compare.result_values import NOT_SUPPORTED, PARITY_FAILED
from toolkit.compare.results import Results
from toolkit.compare.rows import Row

# The text beside the longest bar needs the rest of the line, on a phone too.
LONGEST_BAR_PERCENT = 68.0
# An interval is drawn up to this many times the largest figure: that of two repeats can be ten times as long.
LONGEST_INTERVAL = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Segments from left to right, marks above them, and the text after both; lengths in one unit."""

    segments: tuple[tuple[float, str | None], ...]
    """Length, and the CSS variable of a color; None is hatched."""
    text: str
    alarm: bool = False
    tick: float | None = None
    """The planned length."""
    interval: tuple[float, float] | None = None
    open_interval: bool = False
    """The interval continues to the right of what is drawn."""

    @property
    def length(self) -> float:
        """Length of all segments."""
        return sum(length for length, _ in self.segments)

    @property
    def end(self) -> float:
        """Where the text starts: after segments and marks."""
        return max(self.length, self.tick or 0.0, self.interval[1] if self.interval else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """Labelled bars in one scale."""

    bars: tuple[tuple[str, Bar], ...]
    colors: tuple[tuple[str, str], ...] = ()
    """Entries of the legend: CSS variable and name."""
    marks: tuple[tuple[str, str], ...] = ()
    """Entries of the legend: CSS class and name."""
    limit: float | None = None
    """Length of a dashed line across all bars."""

    @property
    def scale(self) -> float:
        """Percent of the line per unit of length."""
        longest = max([self.limit or 0.0, *(bar.end for _, bar in self.bars)], default=0.0)
        return LONGEST_BAR_PERCENT / longest if longest else 0.0


def memory_chart(results: Results) -> BarChart:
    """Return one bar per row, by part; on GPUs up to the allocated peak, with the plan and the GPU's memory."""
    unit = results_unit(results)
    bars = tuple((label, _memory_bar(results, row, unit)) for label, row in results.labelled_rows)
    capacity = None if results.on_cpu else results.gpu_memory_bytes
    colors = [(f"p{index}", part.name) for index, part in enumerate(PARTS)]
    if any(color == "rest" for _, bar in bars for _, color in bar.segments):
        colors.append(("rest", "activations and the rest, up to the allocated peak"))
    marks = [("tick", "planned")] * any(bar.tick for _, bar in bars)
    marks += [("capacity", f"capacity {unit.text(capacity)} {unit.name}")] * (capacity is not None)
    return BarChart(bars=bars, colors=tuple(colors), marks=tuple(marks), limit=capacity)


def speed_chart(results: Results) -> BarChart | None:
    """Return one bar per row with its interval, hatched where the speed is not comparable; None without rows."""
    bars = [(label, _speed_bar(row)) for label, row in results.labelled_rows]
    if not bars:
        return None
    largest = max((length for _, bar in bars for length, _ in bar.segments), default=0.0)
    marks = (("span", "95 % interval over repeats"),) if any(bar.interval for _, bar in bars) else ()
    shortened = tuple((label, _shortened(bar, LONGEST_INTERVAL * largest)) for label, bar in bars)
    return BarChart(bars=shortened, marks=marks)


def _memory_bar(results: Results, row: Row, unit: ByteUnit) -> Bar:
    planned = row.planned_allocated_bytes
    if not row.completed:
        return _failed_bar(row, unit, on_cpu=results.on_cpu)
    parts = [(getattr(row, part.key), f"p{index}") for index, part in enumerate(PARTS)]
    segments = tuple((float(size), color) for size, color in parts if size)
    states, peak = row.model_state_bytes, None if results.on_cpu else row.peak_allocated_bytes
    if peak is None:  # resident memory of a CPU process includes libraries: it is no end for a bar
        text = "n/a" if states is None else f"{unit.text(states)} {unit.name}"
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
        return _status_bar(row)
    phase = f" in {failure.phase}" if failure.phase else ""
    measured = failure.measured_bytes
    text = "" if measured is None else f", {unit.text(measured)} {unit.name} measured"
    segments: Sequence[tuple[float, str | None]] = () if measured is None else ((float(measured), None),)
    tick = row.planned_allocated_bytes
    return Bar(segments=tuple(segments), text=f"{row.status}{phase}{text}", alarm=True, tick=tick)


def _status_bar(row: Row) -> Bar:
    return Bar(segments=(), text=row.status, alarm=row.status != NOT_SUPPORTED)


def _shortened(bar: Bar, longest: float) -> Bar:
    """An interval that would leave the other bars no space is open at its end; the text has its value."""
    if bar.interval is None or bar.interval[1] <= longest:
        return bar
    return replace(bar, interval=(bar.interval[0], longest), open_interval=True)


def _speed_bar(row: Row) -> Bar:
    if not row.completed:
        return _status_bar(row)
    if row.failed_parity:
        return Bar(segments=(), text=PARITY_FAILED, alarm=True)
    value, bounds = row.tokens_per_second, row.tokens_per_second_interval
    segments = () if value is None else ((value, "speed" if row.comparable else None),)
    text = speed(value) if bounds is None else f"{speed(value)} ({speed(bounds[0])} to {speed(bounds[1])})"
    return Bar(segments=segments, text=text, interval=bounds)

"""The page's bars: bytes by part against the GPU's capacity, and speeds with their intervals.

    >>> memory_bars(results)                             # doctest: +SKIP
    '<div class="legend">...'

Plain elements that stretch, so that text keeps its size on a phone.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, replace

from toolkit.compare.report import facts
from toolkit.compare.report.cells import ByteUnit, speed
from toolkit.compare.report.marks import legend
from toolkit.compare.report.palette import PARTS
from toolkit.compare.report.sheets import results_unit
from toolkit.compare.results import NOT_SUPPORTED, Results, Row

# The text beside the longest bar needs the rest of the line, on a phone too.
LONGEST_BAR_PERCENT = 68.0
# An interval is drawn up to this many times the largest figure: that of two repeats can be ten times as long.
LONGEST_SPAN = 1.5
NOTHING = '<p class="quiet">Nothing was measured.</p>'


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Pieces from left to right, marks above them, and the text after the last of both; lengths in one unit."""

    pieces: tuple[tuple[float, str | None], ...]
    """Length, and a colour's name; None is hatched."""
    text: str
    alarm: bool = False
    tick: float | None = None
    """Where something was expected to end."""
    span: tuple[float, float] | None = None
    """Low and high end of an interval."""
    open_span: bool = False
    """Whether the interval goes on to the right."""

    @property
    def end(self) -> float:
        return max(sum(length for length, _ in self.pieces), self.tick or 0.0, self.span[1] if self.span else 0.0)


def memory_bars(results: Results) -> str:
    """One bar a row, from its parts; on GPUs up to the peak, against the capacity, with what was planned."""
    unit = results_unit(results)
    bars = [_memory_bar(results, row, unit) for row in results["rows"]]
    capacity = None if facts.on_cpu(results) else facts.capacity_bytes(results)
    entries = [(f"p{index}", part.name) for index, part in enumerate(PARTS)]
    if any(colour == "rest" for bar in bars for _, colour in bar.pieces):
        entries.append(("rest", "activations and the rest, up to the allocated peak"))
    marks = [("tick", "planned")] * any(bar.tick for bar in bars)
    marks += [("capacity", f"capacity {unit.cell(capacity).text} {unit.name}")] * (capacity is not None)
    longest = max([capacity or 0.0, *(bar.end for bar in bars)])
    return legend(entries, marks) + _drawn(results, bars, longest, capacity)


def _memory_bar(results: Results, row: Row, unit: ByteUnit) -> Bar:
    planned = row["planned_allocated_bytes"]
    if not facts.finished(row):
        return _failed_bar(row, unit, on_cpu=facts.on_cpu(results))
    parts = [(facts.part_bytes(row, part.key), f"p{index}") for index, part in enumerate(PARTS)]
    held, peak = facts.model_state_bytes(row), None if facts.on_cpu(results) else row["peak_allocated_bytes"]
    pieces = tuple((float(size), colour) for size, colour in parts if size)
    if peak is None:  # resident memory of a CPU process holds libraries too: no bar can be made of it
        text = "n/a" if held is None else f"{unit.cell(held).text} {unit.name}"
        return Bar(pieces=pieces if held is not None else (), text=text, tick=planned)
    if held is None or held > peak:  # some of it is offloaded to the host
        where = "" if held is None else f" (model states, host included: {unit.cell(held).text})"
        return Bar(pieces=((float(peak), "rest"),), text=f"{unit.cell(peak).text} {unit.name}{where}", tick=planned)
    return Bar(pieces=(*pieces, (float(peak - held), "rest")), text=f"{unit.cell(peak).text} {unit.name}", tick=planned)


def _failed_bar(row: Row, unit: ByteUnit, *, on_cpu: bool) -> Bar:
    """What it held when it ended, hatched; what was planned, marked. On a CPU that would be libraries too."""
    failure = row["failure"]
    if failure is None or on_cpu or not facts.out_of_memory(row):
        return Bar(pieces=(), text=row["status"], alarm=row["status"] != NOT_SUPPORTED)
    phase = f" in {failure['phase']}" if failure["phase"] else ""
    measured, planned = failure["measured_bytes"], row["planned_allocated_bytes"]
    said = "" if measured is None else f", {unit.cell(measured).text} {unit.name} measured"
    pieces: tuple[tuple[float, str | None], ...] = () if measured is None else ((float(measured), None),)
    return Bar(pieces=pieces, text=f"{row['status']}{phase}{said}", alarm=True, tick=planned)


def speed_bars(results: Results) -> str:
    """One bar a row, with its interval; hatched where the speed is not comparable with the reference's."""
    bars = [_speed_bar(row) for row in results["rows"]]
    if not bars:
        return NOTHING
    marks = [("span", "95 % interval over repeats")] * any(bar.span for bar in bars)
    largest = max((length for bar in bars for length, _ in bar.pieces), default=0.0)
    bars = [_cut(bar, LONGEST_SPAN * largest) for bar in bars]
    return (legend([], marks) if marks else "") + _drawn(results, bars, max(bar.end for bar in bars), None)


def _cut(bar: Bar, longest: float) -> Bar:
    """An interval that would leave the other bars no room ends open; its text says where it ends."""
    if bar.span is None or bar.span[1] <= longest:
        return bar
    return replace(bar, span=(bar.span[0], longest), open_span=True)


def _speed_bar(row: Row) -> Bar:
    if not facts.finished(row):
        return Bar(pieces=(), text=row["status"], alarm=row["status"] != NOT_SUPPORTED)
    value, bounds = row["tokens_per_second"], row["tokens_per_second_interval"]
    if facts.differs(row):
        return Bar(pieces=(), text=facts.PARITY_FAILED, alarm=True)
    pieces = () if value is None else ((value, "speed" if facts.comparable(row) else None),)
    span = None if bounds is None else (bounds[0], bounds[1])
    text = speed(value) if bounds is None else f"{speed(value)} ({speed(bounds[0])} to {speed(bounds[1])})"
    return Bar(pieces=pieces, text=text, span=span)


def _drawn(results: Results, bars: list[Bar], longest: float, capacity: float | None) -> str:
    scale = LONGEST_BAR_PERCENT / longest if longest else 0.0
    limit = "" if capacity is None else f'<u class="capacity" style="left:{capacity * scale:.2f}%"></u>'
    return "".join(
        f'<div class="bar"><b>{html.escape(facts.one_line(label))}</b>'
        f'<div class="track">{limit}{_pieces(bar, scale)}{_text(bar)}</div></div>\n'
        for label, bar in zip(facts.labels(results), bars, strict=True)
    )


def _pieces(bar: Bar, scale: float) -> str:
    drawn, reached = [], 0.0
    for length, colour in bar.pieces:
        width, reached = f"width:{length * scale:.2f}%", reached + length
        hatched = f'<i class="hatch" style="{width}"></i>'
        drawn.append(hatched if colour is None else f'<i style="{width};background:var(--{colour})"></i>')
    if bar.end > reached:  # the text stands after the marks
        drawn.append(f'<i style="width:{(bar.end - reached) * scale:.2f}%"></i>')
    if bar.tick:
        drawn.append(f'<u class="tick" style="left:{bar.tick * scale:.2f}%"></u>')
    if bar.span:
        low, high = bar.span
        kind = "span open" if bar.open_span else "span"
        drawn.append(f'<u class="{kind}" style="left:{low * scale:.2f}%;width:{(high - low) * scale:.2f}%"></u>')
    return "".join(drawn)


def _text(bar: Bar) -> str:
    lonely = " lonely" if not bar.end else ""
    kind = f' class="alarm{lonely}"' if bar.alarm else ""
    return f"<span{kind}>{html.escape(bar.text)}</span>"

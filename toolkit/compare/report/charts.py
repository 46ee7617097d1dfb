"""Bars and curves of the HTML page: plain elements that stretch, so that text keeps its size on a phone.

>>> memory_bars(results)                                 # doctest: +SKIP
'<div class="legend">...'
"""

from __future__ import annotations

import html

from toolkit.compare.report import facts
from toolkit.compare.report.cells import speed
from toolkit.compare.report.palette import CURVES, PARTS, curve_widths
from toolkit.compare.report.sheets import results_unit
from toolkit.compare.results import Results, Row

# The text beside the longest bar needs the rest of the line, on a phone too.
LONGEST_BAR_PERCENT = 68.0
# A curve's box in its own units; the page stretches it.
CHART_WIDTH, CHART_HEIGHT = 1000.0, 300.0
NOTHING = '<p class="quiet">Nothing was measured.</p>'


def memory_bars(results: Results) -> str:
    """One bar a row, from the parts of its model states; a row that did not finish shows its status."""
    unit = results_unit(results)
    whole = [facts.model_state_bytes(row) if facts.finished(row) else None for row in results["rows"]]
    longest = max((size for size in whole if size), default=0)
    bars = []
    for label, row, held in zip(facts.labels(results), results["rows"], whole, strict=True):
        parts = [_part(facts.part_bytes(row, part.key), longest, f"p{index}") for index, part in enumerate(PARTS)]
        text = f"{unit.cell(held).text} {unit.name}" if held is not None else "n/a"
        bars.append(_bar(label, row, "".join(parts), text))
    return _legend([(f"p{index}", part.name) for index, part in enumerate(PARTS)]) + "".join(bars)


def speed_bars(results: Results) -> str:
    """One bar a row; hatched where the speed is not comparable with the reference's."""
    speeds = [row["tokens_per_second"] if facts.finished(row) else None for row in results["rows"]]
    longest = max((value for value in speeds if value), default=0.0)
    bars = []
    for label, row, value in zip(facts.labels(results), results["rows"], speeds, strict=True):
        inside = _part(value, longest, "speed" if facts.comparable(row) else None)
        text = f"{speed(value)} ({facts.PARITY_FAILED})" if facts.differs(row) else speed(value)
        bars.append(_bar(label, row, inside, text))
    return "".join(bars) or NOTHING


def losses_chart(results: Results) -> str:
    """Curves overlaid, earlier ones wider: one that coincides with another is seen at its edges."""
    known = [loss for row in results["rows"] for loss in row["losses"] if loss is not None]
    if not known:
        return NOTHING
    lowest, highest = min(known), max(known)
    num_steps = max(len(row["losses"]) for row in results["rows"])
    named = zip(facts.labels(results), results["rows"], curve_widths(len(results["rows"])), strict=True)
    curves, entries = [], []
    for index, (label, row, width) in enumerate(named):
        if row["losses"]:
            colour = f"c{index % len(CURVES)}"
            curves.append(_curve(row["losses"], lowest, highest, num_steps, colour, width))
            entries.append((colour, facts.curve_name(label, row)))
    return f"{_legend(entries)}{_axes(curves, lowest, highest, num_steps)}"


def _bar(label: str, row: Row, parts: str, text: str) -> str:
    if not facts.finished(row):
        parts, text = "", f'<span class="alarm">{row["status"]}</span>'
    else:
        text = f"<span>{html.escape(text)}</span>"
    return f'<div class="bar"><b>{html.escape(facts.one_line(label))}</b><div class="track">{parts}{text}</div></div>\n'


def _part(size: float | None, longest: float, colour: str | None) -> str:
    if not size or not longest:
        return ""
    fill = f"width:{LONGEST_BAR_PERCENT * size / longest:.2f}%"
    return (
        f'<i class="hatch" style="{fill}"></i>'
        if colour is None
        else f'<i style="{fill};background:var(--{colour})"></i>'
    )


def _legend(entries: list[tuple[str, str]]) -> str:
    marks = [f'<span><i style="background:var(--{colour})"></i>{html.escape(name)}</span>' for colour, name in entries]
    return f'<div class="legend">{"".join(marks)}</div>'


def _curve(losses: list[float | None], lowest: float, highest: float, num_steps: int, colour: str, width: float) -> str:
    """A line through the known losses; the highest loss is at the top, the first step at the left."""
    across, down = max(num_steps - 1, 1), (highest - lowest) or 1.0
    points = [
        f"{CHART_WIDTH * step / across:.1f},{CHART_HEIGHT * (highest - loss) / down:.1f}"
        for step, loss in enumerate(losses)
        if loss is not None
    ]
    points = points * 2 if len(points) == 1 else points  # a lone step is a dot
    return f'<polyline points="{" ".join(points)}" style="stroke:var(--{colour});stroke-width:{width:.1f}px"/>'


def _axes(curves: list[str], lowest: float, highest: float, num_steps: int) -> str:
    box = f"0 0 {CHART_WIDTH:.0f} {CHART_HEIGHT:.0f}"
    marks = [highest, (highest + lowest) / 2, lowest]
    return (
        f'<div class="chart"><div class="y">{"".join(f"<span>{mark:.3f}</span>" for mark in marks)}</div>'
        f'<svg viewBox="{box}" preserveAspectRatio="none" role="img" aria-label="loss by step">{"".join(curves)}</svg>'
        f'<div class="x"><span>step 1</span><span>step {num_steps}</span></div></div>'
        '<p class="quiet">Where curves coincide, an earlier one is the wider line behind a later one.</p>'
    )

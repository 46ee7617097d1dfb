"""Curves of the HTML page: losses overlaid, speed-up by processes, and one step of every rank.

>>> losses_chart(results)                                # doctest: +SKIP
'<div class="legend">...'
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from toolkit.compare.report import facts
from toolkit.compare.report.bars import NOTHING
from toolkit.compare.report.marks import Axes, Line, legend, line_chart
from toolkit.compare.report.palette import CURVES, LANES, curve_widths
from toolkit.compare.results import Results, Row, Timeline
from toolkit.units import seconds

# One rank's picture in its own units: compute and waiting for data above, communication below.
LANE_WIDTH, LANE_HEIGHT = 1000.0, 9.0
LANE_TOP = {"compute": 0.0, "data_wait": 0.0, "communication": 11.0}


def losses_chart(results: Results) -> str:
    """Curves overlaid, earlier ones wider: one that coincides with another is seen at its edges."""
    known = [loss for row in results["rows"] for loss in row["losses"] if loss is not None]
    if not known:
        return NOTHING
    named = [(label, row) for label, row in zip(facts.labels(results), results["rows"], strict=True) if row["losses"]]
    lines, entries = [], []
    for index, ((label, row), width) in enumerate(zip(named, curve_widths(len(named)), strict=True)):
        colour = f"c{index % len(CURVES)}"
        points = [(float(step), loss) for step, loss in enumerate(row["losses"], 1) if loss is not None]
        lines.append(Line(points=points, colour=colour, width=width))
        entries.append((colour, facts.curve_name(label, row)))
    low, high, last = min(known), max(known), max(len(row["losses"]) for row in results["rows"])
    axes = Axes(
        left=1.0,
        right=float(last),
        low=low,
        high=high,
        y_labels=[f"{mark:.3f}" for mark in (high, (high + low) / 2, low)],
        x_labels=[(1.0, "1"), (float(last), f"{last}")],
        x_name="step",
        title="loss by step",
    )
    wide = '<p class="quiet">Where curves coincide, an earlier one is the wider line behind a later one.</p>'
    return f"{legend(entries)}{line_chart(lines, axes)}{wide}"


def scaling_chart(results: Results) -> str:
    """Speed-up over each preset's fewest processes, beside the ideal; nothing for one number of processes."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in results["rows"]:
        if row["speed_up"] is not None and facts.comparable(row):
            curves.setdefault(row["preset"], []).append((float(row["world_size"]), row["speed_up"]))
    curves = {preset: sorted(points) for preset, points in curves.items() if len(points) > 1}
    if not curves:
        return ""
    sizes = sorted({size for points in curves.values() for size, _ in points})
    rises = [rise for points in curves.values() for _, rise in points]
    least, most = min(1.0, *rises), max(sizes[-1] / sizes[0], *rises)
    lines = [Line(points=[(sizes[0], 1.0), (sizes[-1], sizes[-1] / sizes[0])], colour="muted", width=1.5, dashed=True)]
    entries = [("muted", "ideal")]
    for index, (preset, points) in enumerate(curves.items(), 1):
        colour = f"c{index % len(CURVES)}"
        lines.append(Line(points=points, colour=colour, width=2.0, dots=True))
        entries.append((colour, facts.one_line(preset)))
    axes = Axes(
        left=sizes[0],
        right=sizes[-1],
        low=least,
        high=most,
        y_labels=[f"{mark:.2f}×" for mark in (most, (most + least) / 2, least)],
        x_labels=[(size, f"{size:.0f}") for size in sizes],
        x_name="processes",
        title="speed-up by number of processes",
    )
    return legend(entries) + line_chart(lines, axes)


def timelines(results: Results) -> str:
    """One profiled step of each row that has one; open is the first of those with most ranks."""
    rows = zip(facts.labels(results), results["rows"], strict=True)
    drawn = [(label, row, row["timeline"]) for label, row in rows if row["timeline"]]
    if not drawn:
        return ""
    most = max(drawn, key=lambda one: len(one[2]["ranks"]))
    blocks = [
        f"<details{' open' if row is most[1] else ''}><summary>{html.escape(facts.one_line(label))}</summary>"
        f"{_timeline(row, timeline)}</details>"
        for label, row, timeline in drawn
    ]
    said = "A profiler slows a step: lengths compare within a picture, not with the speeds above."
    entries = [(lane.key, lane.name) for lane in LANES]
    return f'{legend(entries)}{"".join(blocks)}<p class="quiet">{said}</p>'


def _timeline(row: Row, timeline: Timeline) -> str:
    del row
    longest = max(rank["start_seconds"] + rank["seconds"] for rank in timeline["ranks"]) or 1.0
    ranks = "".join(
        f'<div class="rank"><b>rank {rank["rank"]}</b><svg viewBox="0 0 {LANE_WIDTH:.0f} 20"'
        f' preserveAspectRatio="none" role="img" aria-label="rank {rank["rank"]}">'
        + "".join(_lane(lane.key, rank, longest) for lane in LANES)
        + "</svg></div>"
        for rank in timeline["ranks"]
    )
    ends = f'<div class="rank x"><b></b><span>step {timeline["step"]}</span><span>{seconds(longest)}</span></div>'
    return ranks + ends


def _lane(key: str, rank: dict[str, object], longest: float) -> str:
    """A lane's intervals as one path."""
    start, lanes = rank["start_seconds"], rank["lanes"]
    assert isinstance(start, (int, float))
    assert isinstance(lanes, dict)
    intervals: Sequence[Sequence[float]] = lanes.get(key, [])
    scale, top = LANE_WIDTH / longest, LANE_TOP[key]
    boxes = [
        f"M{(start + at) * scale:.1f} {top:g}h{(end - at) * scale:.1f}v{LANE_HEIGHT:g}h-{(end - at) * scale:.1f}z"
        for at, end in intervals
    ]
    return f'<path d="{"".join(boxes)}" fill="var(--{key})"/>' if boxes else ""

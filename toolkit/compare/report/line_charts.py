"""Curves of the page: losses, speed-up by processes, and one profiled step of every rank.

Geometry only: coordinates are in the chart's own units, and the template draws them in a box that stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.compare.report.chart_colors import CURVES, LANES, curve_widths
from toolkit.compare.result_values import Timeline, TimelineRank
from toolkit.compare.results import Results
from toolkit.compare.rows import Row
from toolkit.units import seconds

# A chart's box in its own units.
WIDTH, HEIGHT = 1000.0, 300.0
# More points than this are closer than the pixels of a page.
MOST_POINTS = 2000
# The box of one rank of a timeline: compute and waiting for data above, communication below.
LANE_WIDTH, LANE_HEIGHT = 1000.0, 9.0
LANE_TOP = {"compute": 0.0, "data_wait": 0.0, "communication": 11.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points that are joined, in the chart's own values."""

    points: Sequence[tuple[float, float]]
    color: str
    """CSS variable."""
    width: float
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Lines in a box, with labels beside it (evenly spaced, high to low) and below it (where they belong)."""

    lines: Sequence[Line]
    colors: Sequence[tuple[str, str]]
    """Entries of the legend: CSS variable and name."""
    left: float
    right: float
    low: float
    high: float
    y_labels: Sequence[str]
    x_labels: Sequence[tuple[float, str]]
    x_name: str
    title: str
    note: str = ""

    def points(self, line: Line) -> list[str]:
        """Return the line's points as SVG coordinates."""
        across, down = (self.right - self.left) or 1.0, (self.high - self.low) or 1.0
        return [f"{WIDTH * (x - self.left) / across:.1f},{HEIGHT * (self.high - y) / down:.1f}" for x, y in line.points]

    def position(self, x: float) -> float:
        """Return the place of a label below the box, from 0 to 1."""
        return (x - self.left) / ((self.right - self.left) or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """One profiled step of a row."""

    label: str
    timeline: Timeline
    expanded: bool
    """The page shows it opened."""

    @property
    def seconds(self) -> float:
        """Length of the chart, from the earliest start to the latest end."""
        return max(rank.start_seconds + rank.seconds for rank in self.timeline.ranks) or 1.0

    @property
    def length(self) -> str:
        """Length of the chart as text."""
        return seconds(self.seconds)

    def lanes(self, rank: TimelineRank) -> list[tuple[str, str]]:
        """Return the SVG path and the CSS variable of each lane that has intervals."""
        scale, paths = LANE_WIDTH / self.seconds, []
        for lane in LANES:
            boxes = [
                f"M{(rank.start_seconds + start) * scale:.1f} {LANE_TOP[lane.key]:g}h{(end - start) * scale:.1f}"
                f"v{LANE_HEIGHT:g}h-{(end - start) * scale:.1f}z"
                for start, end in rank.lanes.get(lane.key, ())
            ]
            if boxes:
                paths.append(("".join(boxes), lane.key))
        return paths


def losses_chart(results: Results) -> LineChart | None:
    """Return loss curves, earlier ones wider, so that one that coincides with another is visible; None without any."""
    known = [loss for row in results.rows for loss in row.losses if loss is not None]
    if not known:
        return None
    named = [(label, row) for label, row in results.labelled_rows if row.losses]
    lines, colors = [], []
    for index, ((label, row), width) in enumerate(zip(named, curve_widths(len(named)), strict=True)):
        color = f"c{index % len(CURVES)}"
        points = [(float(step), loss) for step, loss in enumerate(row.losses, 1) if loss is not None]
        lines.append(Line(points=thinned(points), color=color, width=width))
        colors.append((color, curve_name(label, row)))
    low, high, last = min(known), max(known), max(len(row.losses) for row in results.rows)
    return LineChart(
        lines=lines,
        colors=colors,
        left=1.0,
        right=float(last),
        low=low,
        high=high,
        y_labels=[f"{mark:.3f}" for mark in (high, (high + low) / 2, low)],
        x_labels=[(1.0, "1"), (float(last), f"{last}")],
        x_name="step",
        title="loss by step",
        note="Where curves coincide, an earlier one is the wider line behind a later one.",
    )


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return points of a curve at equal distances, at most `MOST_POINTS` and the last.

    >>> len(thinned([(step, 1.0) for step in range(4001)])), thinned([(1.0, 2.0)])
    (1335, [(1.0, 2.0)])
    """
    stride = -(-len(points) // MOST_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def curve_name(label: str, row: Row) -> str:
    """Return the label of a loss curve, with the status of a row that is not an ordinary one."""
    return label if row.status_text == "completed" else f"{label} ({row.status_text})"


def scaling_chart(results: Results) -> LineChart | None:
    """Return speed-ups over each preset's fewest processes, beside the ideal; None with one number of processes."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in results.rows:
        if row.speed_up is not None and row.comparable:
            curves.setdefault(row.preset, []).append((float(row.world_size), row.speed_up))
    curves = {preset: sorted(points) for preset, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    sizes = sorted({size for points in curves.values() for size, _ in points})
    ideal, speed_ups = sizes[-1] / sizes[0], [speed_up for points in curves.values() for _, speed_up in points]
    low, high = min(1.0, *speed_ups), max(ideal, *speed_ups)
    lines = [Line(points=[(sizes[0], 1.0), (sizes[-1], ideal)], color="muted", width=1.5, dashed=True)]
    colors = [("muted", "ideal")]
    for index, (preset, points) in enumerate(curves.items(), 1):
        color = f"c{index % len(CURVES)}"
        lines.append(Line(points=points, color=color, width=2.0, dots=True))
        colors.append((color, preset))
    return LineChart(
        lines=lines,
        colors=colors,
        left=sizes[0],
        right=sizes[-1],
        low=low,
        high=high,
        y_labels=[f"{mark:.2f}×" for mark in (high, (high + low) / 2, low)],
        x_labels=[(size, f"{size:.0f}") for size in sizes],
        x_name="processes",
        title="speed-up by number of processes",
    )


def timeline_charts(results: Results) -> list[TimelineChart]:
    """Return one profiled step of each row that has one; the first of those with most ranks is expanded."""
    known = [(label, row.timeline) for label, row in results.labelled_rows if row.timeline]
    if not known:
        return []
    widest = max(known, key=lambda item: len(item[1].ranks))[1]
    return [TimelineChart(label=label, timeline=timeline, expanded=timeline is widest) for label, timeline in known]

"""Bar charts, line charts and timelines as data, and their colors, distinguishable with red-green color blindness.

Geometry only: lengths become percentages and points become coordinates of a box that stretches; the templates draw them
as plain elements and SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.units import seconds

# The text beside the longest bar needs the rest of the line, on a phone too.
LONGEST_BAR_PERCENT = 68.0
# The box of a line chart in its own units.
WIDTH, HEIGHT = 1000.0, 300.0
# The height of one row of a timeline, as wide as a line chart.
ROW_HEIGHT = 20.0
# More points are closer than the pixels of a page.
MOST_POINTS = 2000
# In points, of a curve under all others.
WIDEST_CURVE = 9.0


class Color(NamedTuple):
    """One color, as it reads on a white page and on a dark one."""

    light: str
    dark: str


# Hues of Okabe and Ito (https://jfly.uni-koeln.de/color/), darker or lighter for contrast with the page.
BLUE, ORANGE, GREEN = Color("#0072B2", "#4AA3DF"), Color("#E69F00", "#E8B04A"), Color("#009E73", "#3CC79D")
PURPLE, RED, GRAY = Color("#CC79A7", "#DF9CC2"), Color("#D55E00", "#F08A45"), Color("#BBBBBB", "#6B7280")
CURVES = (GRAY, ORANGE, BLUE, PURPLE, GREEN, RED, Color("#222222", "#F3F4F6"))
LANES = {"compute": "compute", "data_wait": "waiting for data", "communication": "communication (lower line)"}
"""The lanes of a profiled step, with their names in the legend."""
CSS_VARIABLES: dict[str, Color] = {
    **{f"p{index}": color for index, color in enumerate((BLUE, ORANGE, GREEN))},  # parts of the model states
    **{f"c{index}": color for index, color in enumerate(CURVES)},
    **dict(zip(LANES, (BLUE, ORANGE, PURPLE), strict=True)),
    "speed": Color("#4A6FA5", "#7C9FD3"),
    "muted": Color("#6B7280", "#9AA3AF"),
    "rest": Color("#C7B5DA", "#8F7BA8"),
    "page": Color("#ffffff", "#14171a"),
    "ink": Color("#1f2328", "#e6e8ea"),
    "line": Color("#d8dee4", "#363c43"),
    "band": Color("#f3f5f7", "#20252a"),
    "alarm": Color("#b42318", "#ff8a7a"),
}
"""Every color of the page by the name of its CSS variable."""


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
        """Return SVG coordinates of the line's points: of a long line at equal distances, and the last."""
        across, down = (self.right - self.left) or 1.0, (self.high - self.low) or 1.0
        stride, kept = -(-len(line.points) // MOST_POINTS), line.points
        if stride > 1:
            kept = [*kept[:-1:stride], kept[-1]]
        return [f"{WIDTH * (x - self.left) / across:.1f},{HEIGHT * (self.high - y) / down:.1f}" for x, y in kept]

    def position(self, x: float) -> float:
        """Return the place of a label below the box, from 0 to 1."""
        return (x - self.left) / ((self.right - self.left) or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """Boxes of one color in a row of a timeline, from start to end in seconds."""

    spans: Iterable[tuple[float, float]]
    color: str
    """CSS variable."""
    top: float = 0.0
    height: float = ROW_HEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """One row of boxes per rank or stage, on the same axis of time."""

    label: str
    rows: Sequence[tuple[str, Sequence[Boxes]]]
    seconds: float
    """Length of the axis."""
    x_name: str
    expanded: bool
    """The page shows it opened."""

    @property
    def length(self) -> str:
        """Length of the axis as text."""
        return seconds(self.seconds)

    def path(self, boxes: Boxes) -> str:
        """Return the SVG path of boxes; empty without any."""
        scale = WIDTH / self.seconds
        places = ((start * scale, (end - start) * scale) for start, end in boxes.spans)
        return "".join(f"M{x:.2f} {boxes.top:g}h{width:.2f}v{boxes.height:g}h-{width:.2f}z" for x, width in places)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineCharts:
    """Timelines, each of which can be opened and closed."""

    timelines: Sequence[TimelineChart]
    colors: Sequence[tuple[str, str]]
    """Entries of the legend: CSS variable and name."""


Chart = BarChart | LineChart | TimelineCharts


def curve_widths(count: int) -> list[float]:
    """Return line widths from wide to narrow, in points: a curve drawn on an equal one leaves its edges visible."""
    step = min(1.6, WIDEST_CURVE / max(count, 1))
    return [1.4 + step * (count - 1 - index) for index in range(count)]

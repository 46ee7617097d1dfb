"""Bar charts, line charts and timelines as data, and their colors, distinguishable with red-green color blindness.

Geometry only: lengths become percentages and points become coordinates of a box that stretches; the templates draw them
as plain elements and SVG.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 300.0  # the box of a line chart in its own units
ROW_HEIGHT = 20.0  # the height of one row of a timeline, as wide as a line chart
MOST_INTERVALS = 4  # distances between the round heights beside a line chart
MOST_POINTS = 2000  # more points are closer than the pixels of a page

# Each color as it reads on a white page and on a dark one: hues of Okabe and Ito (https://jfly.uni-koeln.de/color/),
# darker or lighter for contrast with the page.
BLUE, ORANGE, GREEN = ("#0072B2", "#4AA3DF"), ("#E69F00", "#E8B04A"), ("#009E73", "#3CC79D")
PURPLE, RED, GRAY = ("#CC79A7", "#DF9CC2"), ("#D55E00", "#F08A45"), ("#BBBBBB", "#6B7280")
CURVES = (BLUE, ORANGE, GRAY, PURPLE, GREEN, RED, ("#222222", "#F3F4F6"))
LANES = {"compute": "compute", "data_wait": "waiting for data", "communication": "communication (lower line)"}
"""The lanes of a profiled step, with their names in the legend."""
CSS_VARIABLES: dict[str, tuple[str, str]] = {
    **{f"p{index}": color for index, color in enumerate((BLUE, ORANGE, GREEN))},  # parts of the model states
    **{f"c{index}": color for index, color in enumerate(CURVES)},
    **dict(zip(LANES, (BLUE, ORANGE, PURPLE), strict=True)),
    "speed": ("#4A6FA5", "#7C9FD3"),
    "muted": ("#6B7280", "#9AA3AF"),
    "rest": ("#C7B5DA", "#8F7BA8"),
    "page": ("#ffffff", "#14171a"),
    "ink": ("#1f2328", "#e6e8ea"),
    "line": ("#d8dee4", "#363c43"),
    "band": ("#f3f5f7", "#20252a"),
    "alarm": ("#b42318", "#ff8a7a"),
}
"""Every color of the page by the name of its CSS variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Segments from left to right, marks above them, and the text after both; lengths in one unit."""

    segments: tuple[tuple[float, str | None], ...]  # length, and the CSS variable of a color; None is hatched
    text: str
    alarm: bool = False
    tick: float | None = None  # the planned length
    interval: tuple[float, float] | None = None
    open_interval: bool = False  # the interval continues to the right of what is drawn

    @property
    def length(self) -> float:
        """Length of all segments."""
        return sum(length for length, _ in self.segments)

    @property
    def end(self) -> float:
        """Length of the bar with its marks."""
        return max(self.length, self.tick or 0.0, self.interval[1] if self.interval else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """Labelled bars in one scale."""

    bars: tuple[tuple[str, Bar], ...]
    colors: tuple[tuple[str, str], ...] = ()  # entries of the legend: CSS variable and name
    marks: tuple[tuple[str, str], ...] = ()  # entries of the legend: CSS class and name
    limit: float | None = None  # length of a dashed line across all bars

    @property
    def scale(self) -> float:
        """Percent of the line per unit of length."""
        longest = max([self.limit or 0.0, *(bar.end for _, bar in self.bars)], default=0.0)
        return 100 / longest if longest else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points that are joined, in the chart's own values."""

    points: Sequence[tuple[float, float]]
    label: str  # its name in the legend
    color: str  # CSS variable
    width: float = 2.0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines in a box between round heights, as wide as its labels, which stand below it where they belong."""

    lines: Sequence[Line]
    x_labels: Sequence[tuple[float, str]]
    x_name: str
    title: str
    note: str = ""
    y_unit: str = ""

    @property
    def colors(self) -> list[tuple[str, str]]:
        """Entries of the legend: CSS variable and name."""
        return [(line.color, line.label) for line in self.lines]

    @functools.cached_property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Round heights at equal distances with their labels, from the high end of the box to the low end."""
        heights = [y for line in self.lines for _, y in line.points]
        low, high = min(heights), max(heights)
        rough = (high - low or abs(high) or 1.0) / MOST_INTERVALS
        power = math.floor(math.log10(rough))
        step = next(times for times in (1, 2, 5, 10) if times * 10.0**power >= 0.999 * rough) * 10.0**power
        first = math.floor(low / step + 1e-6)
        last = max(first + 1, math.ceil(high / step - 1e-6))
        digits = max(0, -math.floor(math.log10(step)))
        return [(n * step, f"{n * step:,.{digits}f}{self.y_unit}") for n in range(last, first - 1, -1)]

    def points(self, line: Line) -> list[str]:
        """Return SVG coordinates of the line's points: of a long line at equal distances, and the last."""
        high, low = self.y_ticks[0][0], self.y_ticks[-1][0]
        stride, kept = -(-len(line.points) // MOST_POINTS), line.points
        if stride > 1:
            kept = [*kept[:-1:stride], kept[-1]]
        return [f"{WIDTH * self.position(x):.1f},{HEIGHT * (high - y) / (high - low):.1f}" for x, y in kept]

    def position(self, x: float) -> float:
        """Return the place of a value between the first label and the last, from 0 to 1."""
        left, right = self.x_labels[0][0], self.x_labels[-1][0]
        return (x - left) / ((right - left) or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """Boxes of one color in a row of a timeline, from start to end in seconds."""

    spans: Iterable[tuple[float, float]]
    color: str  # CSS variable
    top: float = 0.0
    height: float = ROW_HEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """One row of boxes per rank or stage, on the same axis of time."""

    label: str
    rows: Sequence[tuple[str, Sequence[Boxes]]]
    seconds: float  # length of the axis
    x_name: str
    expanded: bool  # the page shows it opened

    def path(self, boxes: Boxes) -> str:
        """Return the SVG path of boxes; empty without any."""
        scale = WIDTH / self.seconds
        places = ((start * scale, (end - start) * scale) for start, end in boxes.spans)
        return "".join(f"M{x:.2f} {boxes.top:g}h{width:.2f}v{boxes.height:g}h-{width:.2f}z" for x, width in places)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineCharts:
    """Timelines, each of which can be opened and closed."""

    timelines: Sequence[TimelineChart]
    colors: Sequence[tuple[str, str]]  # entries of the legend: CSS variable and name


Chart = BarChart | LineChart | TimelineCharts


def curves(points: Iterable[tuple[str, Sequence[tuple[float, float]]]]) -> list[Line]:
    """Return labelled lines, each in a color of its own."""
    return [
        Line(points=line, label=label, color=f"c{index % len(CURVES)}") for index, (label, line) in enumerate(points)
    ]

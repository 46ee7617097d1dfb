"""Legends, and line charts that stretch: what bars and curves share.

>>> legend([("p0", "parameters")])
'<div class="legend"><span><i style="background:var(--p0)"></i>parameters</span></div>'
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

# A chart's box in its own units; the page stretches it.
WIDTH, HEIGHT = 1000.0, 300.0


def legend(colours: Sequence[tuple[str, str]], marks: Sequence[tuple[str, str]] = ()) -> str:
    """Colours by name, then marks by the class that draws them."""
    entries = [
        f'<span><i style="background:var(--{colour})"></i>{html.escape(name)}</span>' for colour, name in colours
    ]
    entries += [f'<span><u class="{kind}"></u>{html.escape(name)}</span>' for kind, name in marks]
    return f'<div class="legend">{"".join(entries)}</div>'


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points that are joined, in the chart's own values."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: float
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """What the box spans; labels stand beside it, evenly spaced from high to low, and below it where they belong."""

    left: float
    right: float
    low: float
    high: float
    y_labels: Sequence[str]
    x_labels: Sequence[tuple[float, str]]
    x_name: str
    title: str


def line_chart(lines: Sequence[Line], axes: Axes) -> str:
    """The box with its lines and labels."""
    down = "".join(f"<span>{html.escape(label)}</span>" for label in axes.y_labels)
    across = "".join(_below(place, label, axes) for place, label in axes.x_labels)
    return (
        f'<div class="chart"><div class="y">{down}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img"'
        f' aria-label="{html.escape(axes.title)}">{"".join(_line(line, axes) for line in lines)}</svg>'
        f'<div class="x">{across}</div><div class="name">{html.escape(axes.x_name)}</div></div>'
    )


def _below(place: float, label: str, axes: Axes) -> str:
    """A label under its place; the first and the last stay inside the box."""
    share = (place - axes.left) / ((axes.right - axes.left) or 1.0)
    return f'<span style="left:{100 * share:.2f}%;translate:-{100 * share:.0f}%">{html.escape(label)}</span>'


def _line(line: Line, axes: Axes) -> str:
    across, down = (axes.right - axes.left) or 1.0, (axes.high - axes.low) or 1.0
    points = [f"{WIDTH * (x - axes.left) / across:.1f},{HEIGHT * (axes.high - y) / down:.1f}" for x, y in line.points]
    joined = points * 2 if len(points) == 1 else points  # a lone point is a dot
    dashes = ";stroke-dasharray:5 5" if line.dashed else ""
    style = f"stroke:var(--{line.colour});stroke-width:{line.width:.1f}px{dashes}"
    drawn = f'<polyline points="{" ".join(joined)}" style="{style}"/>'
    if line.dots:  # a line of no length has round ends, which do not stretch with the box
        dot = f"stroke:var(--{line.colour});stroke-width:{line.width + 6:.1f}px"
        drawn += "".join(f'<polyline points="{point} {point}" style="{dot}"/>' for point in points)
    return drawn

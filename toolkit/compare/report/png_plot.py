"""Draw a comparison as one PNG: bytes by part, tokens/s, and the losses overlaid."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.compare.columns import ByteUnit, speed
from toolkit.compare.report.chart_colors import CURVES, MUTED, PARTS, SPEED, curve_widths
from toolkit.compare.report.line_charts import curve_name, thinned
from toolkit.compare.report.result_tables import results_unit
from toolkit.compare.report.table_model import one_line
from toolkit.compare.result_values import PARITY_FAILED
from toolkit.compare.results import Results
from toolkit.compare.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES = 0.5
LEAST_INCHES = 3.6
# Nobody reads more in one picture, and no picture may have 2**16 pixels in a column; the page has all rows.
MOST_ROWS = 60
LONGEST_NAME = 40


def plot_png(results: Results) -> bytes:
    """Return the PNG. Left: model states per rank. Middle: tokens/s. Right: loss by step."""
    from matplotlib.figure import Figure

    results = results.updated(rows=results.rows[:MOST_ROWS])
    height = max(LEAST_INCHES, 1.4 + ROW_INCHES * len(results.rows))
    figure = Figure(figsize=(15, height), layout="constrained")
    memory, speeds, losses = figure.subplots(1, 3, width_ratios=(1.15, 0.95, 1.2))
    _draw_memory(memory, results)
    _draw_speed(speeds, results)
    _draw_losses(losses, results)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _draw_memory(axes: Axes, results: Results) -> None:
    unit = results_unit(results)
    places = range(len(results.rows))
    left = [0.0] * len(places)
    for part in PARTS:
        sizes = [_in_unit(row, part.key, unit) for row in results.rows]
        axes.barh(places, sizes, left=left, color=part.light, label=part.name, height=0.66)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    _write_beside(axes, left, [_memory_text(row, unit) for row in results.rows])
    _name_rows(axes, [_plain(one_line(label, LONGEST_NAME)) for label, _ in results.labelled_rows])
    _finish(axes, f"model states per rank ({unit.name})", max(left, default=0.0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=len(PARTS), frameon=False, fontsize=9)


def _draw_speed(axes: Axes, results: Results) -> None:
    rows = results.rows
    speeds = [(row.tokens_per_second or 0.0) if row.completed else 0.0 for row in rows]
    bars = axes.barh(range(len(rows)), speeds, color=SPEED.light, height=0.66)
    for place, row in enumerate(rows):
        if row.tokens_per_second_interval is not None:
            low, high = row.tokens_per_second_interval
            axes.plot([low, high], [place, place], color="black", marker="|", markersize=7, linewidth=1)
    for bar, row in zip(bars, rows, strict=True):
        if row.completed and not row.comparable:
            bar.set(facecolor="white", edgecolor=MUTED.light, hatch="///")
    _write_beside(axes, speeds, [_speed_text(row) for row in rows])
    _name_rows(axes, [""] * len(rows))
    _finish(axes, "tokens/s, all ranks", max(speeds, default=0.0))


def _draw_losses(axes: Axes, results: Results) -> None:
    """Earlier curves are wider, so that curves that coincide are all seen."""
    from matplotlib.ticker import MaxNLocator

    widths = curve_widths(len(results.rows))
    for index, ((label, row), width) in enumerate(zip(results.labelled_rows, widths, strict=True)):
        if row.losses:
            curve = [(float(step), math.nan if loss is None else loss) for step, loss in enumerate(row.losses, 1)]
            steps, losses = zip(*thinned(curve), strict=True)
            name, color = _plain(one_line(curve_name(label, row), LONGEST_NAME)), CURVES[index % len(CURVES)].light
            dot = "o" if len(losses) == 1 else None
            axes.plot(steps, losses, color=color, linewidth=width, marker=dot, label=name)
    axes.set_title("loss by step (wide under narrow where they coincide)", fontsize=11, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no losses", ha="center", transform=axes.transAxes, color=MUTED.light)


def _in_unit(row: Row, key: str, unit: ByteUnit) -> float:
    """The bar of a part; a row that did not complete, or a part that is unknown, has none."""
    size = getattr(row, key) if row.completed else None
    return 0.0 if size is None else size / unit.num_bytes


def _memory_text(row: Row, unit: ByteUnit) -> str:
    return unit.text(row.model_state_bytes) if row.completed else row.status


def _speed_text(row: Row) -> str:
    if not row.completed:
        return row.status
    return PARITY_FAILED if row.failed_parity else speed(row.tokens_per_second)


def _write_beside(axes: Axes, lengths: Sequence[float], texts: Sequence[str]) -> None:
    for place, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        axes.annotate(text, (length, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _finish(axes: Axes, title: str, longest: float) -> None:
    """Room at the right for the text beside the longest bar."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlim(0, longest * 1.45 or 1.0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _plain(text: str) -> str:
    """Text in which no dollar sign starts mathematics."""
    return text.replace("$", r"\$")

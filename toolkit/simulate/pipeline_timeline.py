"""Timelines of simulated pipelines: characters for the terminal, and boxes for a page.

>>> from toolkit.simulate.pipeline_step import ChunkTimes, simulate
>>> from toolkit.simulate.pipeline_schedules import PipelineSize
>>> times = ChunkTimes(forward_seconds=1.0, backward_seconds=1.0, weight_seconds=1.0)
>>> run = simulate("1f1b", PipelineSize(stages=2, micro_batches=2), [times] * 2)
>>> print("\\n".join(text_timeline(run, columns=18)))
stage 0 FFFF....BBBB..BBBB
stage 1 ..FFBBBBFFBBBB....
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.simulate.pipeline_schedules import LETTERS
from toolkit.simulate.pipeline_step import PipelineRun

IDLE = "."
LEGEND = "F forward, B whole backward, I gradient of the input, W gradient of the weights, . idle"
MOST_STAGES_OF_TEXT, MOST_STAGES_ON_PAGE = 16, 64
# The box of one stage on a page, in its own units, and the most boxes that are drawn exactly.
WIDTH, HEIGHT = 1000.0, 20.0
MOST_BOXES = 2000
# CSS variables of the page's colors by kind of operation: F, I, B, W.
COLORS = ("c2", "c1", "c5", "c4")


def text_timeline(run: PipelineRun, *, columns: int) -> list[str]:
    """Return one line per stage: what it does in the middle of each of `columns` equal times.

    Of more than 16 stages, evenly spaced ones are shown.
    """
    stages = shown_stages(run.size.stages, MOST_STAGES_OF_TEXT)
    width = len(str(stages[-1]))
    return [f"stage {stage:>{width}} {''.join(_sampled(run, stage, columns))}" for stage in stages]


def shown_stages(count: int, most: int) -> list[int]:
    """Return evenly spaced stages, the first and the last among them.

    >>> shown_stages(3, 16), shown_stages(64, 4)
    ([0, 1, 2], [0, 21, 42, 63])
    """
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def _sampled(run: PipelineRun, stage: int, columns: int) -> Iterator[str]:
    operations = run.stage_operations(stage)
    start, end, kind, _ = next(operations)
    for column in range(columns):
        now = (column + 0.5) * run.makespan_seconds / columns
        while end <= now and (following := next(operations, None)) is not None:
            start, end, kind, _ = following
        yield LETTERS[kind] if start <= now < end else IDLE


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleTimeline:
    """The timeline of one schedule on a page."""

    run: PipelineRun
    length: str
    expanded: bool
    """The page shows it opened."""

    def stages(self) -> list[int]:
        """Return the stages that the page shows."""
        return shown_stages(self.run.size.stages, MOST_STAGES_ON_PAGE)

    def paths(self, stage: int) -> list[tuple[str, str]]:
        """Return the SVG path and the CSS variable of each kind of operation."""
        scale = WIDTH / self.run.makespan_seconds
        boxes: list[list[str]] = [[] for _ in LETTERS]
        for start, end, kind in _boxes(self.run, stage):
            width = (end - start) * scale
            boxes[kind].append(f"M{start * scale:.2f} 0h{width:.2f}v{HEIGHT:g}h-{width:.2f}z")
        return [("".join(paths), COLORS[kind]) for kind, paths in enumerate(boxes) if paths]


def _boxes(run: PipelineRun, stage: int) -> Iterator[tuple[float, float, int]]:
    """Start, end and kind of each operation; where there are too many, what is sampled at equal times."""
    if len(run.order.operations[stage]) <= MOST_BOXES:
        for start, end, kind, _ in run.stage_operations(stage):
            yield start, end, kind
        return
    step = run.makespan_seconds / MOST_BOXES
    for place, letter in enumerate(_sampled(run, stage, MOST_BOXES)):
        if letter != IDLE:
            yield place * step, (place + 1) * step, LETTERS.index(letter)

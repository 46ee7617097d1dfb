"""Arithmetic on lists of time intervals: the parts of a profiled step.

    >>> step_parts((0, 10), compute=[(0, 4)], communication=[(3, 6)], data_wait=[(6, 7)])["exposed_communication"]
    2

Intervals are (start, end); any unit.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in order and without overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The time of the first that is not in the second."""
    left: list[Interval] = []
    holes = union(taken)
    for start, end in union(intervals):
        for hole_start, hole_end in holes:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if end > start:
            left.append((start, end))
    return left


def within(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts that lie in a window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return union((start, end) for start, end in cut if end > start)


def length(intervals: Iterable[Interval]) -> float:
    """Time covered, each moment once."""
    return sum(end - start for start, end in union(intervals))


def step_parts(
    step: Interval, *, compute: Iterable[Interval], communication: Iterable[Interval], data_wait: Iterable[Interval]
) -> dict[str, float]:
    """Each moment of the step in one part: compute + exposed_communication + data_wait + idle = step.

    `communication` is all of it; what runs beside compute is hidden, the rest is exposed.
    """
    busy, sent, waited = (within(part, step) for part in (compute, communication, data_wait))
    exposed = without(sent, busy)
    waiting = without(waited, [*busy, *sent])
    return {
        "step": step[1] - step[0],
        "compute": length(busy),
        "communication": length(sent),
        "exposed_communication": length(exposed),
        "data_wait": length(waiting),
        "idle": step[1] - step[0] - length([*busy, *sent, *waiting]),
    }

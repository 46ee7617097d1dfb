"""When a rank computed, communicated and waited for data within one profiled step: what a report draws.

>>> lane([(0.0, 1.0), (1.001, 2.0), (5.0, 5.0001)], (0.0, 10.0))
[(0.0, 2.0)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.train.intervals import Interval, within

# Finer than a pixel of a page: what is closer together is drawn as one, what is shorter is left out.
LANE_RESOLUTION = 1 / 500


def lane(intervals: Iterable[Interval], step: Interval) -> list[Interval]:
    """The intervals inside the step, as coarse as a page shows them."""
    finest = (step[1] - step[0]) * LANE_RESOLUTION
    joined: list[Interval] = []
    for start, end in within(intervals, step):
        if joined and start - joined[-1][1] < finest:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return [(start, end) for start, end in joined if end - start >= finest]


def rank_timeline(step: Interval, lanes: Mapping[str, Iterable[Interval]], *, epoch_seconds: float) -> dict[str, Any]:
    """Start of the step (seconds since 1970), its length, and each lane's intervals in seconds from that start."""
    drawn = {name: [(start - step[0], end - step[0]) for start, end in lane(of, step)] for name, of in lanes.items()}
    return {
        "start_unix": epoch_seconds + step[0] / 1e6,
        "seconds": (step[1] - step[0]) / 1e6,
        "lanes": {name: [[round(at / 1e6, 7) for at in pair] for pair in pairs] for name, pairs in drawn.items()},
    }

"""What repeats of a trial allow to be claimed: intervals of a speed, of a ratio, and whether two differ.

    >>> difference((0.71, 0.78))
    'slower'

The unit is the trial, never the step: steps of one process share its placement, clocks and neighbours, so they vary
less than processes do, and an interval over pooled steps would find differences between a preset and itself. Each
trial gives one figure; the interval is Student's t over the logarithms of the trials' figures, as speeds vary by
factors. What varies between steps of a trial is inside the trial's figure, and so in the interval. Resampling three
trials would not do: the bootstrap of so few clusters is too narrow (Cameron, Gelbach and Miller 2008, "Bootstrap-based
improvements for inference with clustered errors"). Method: Kalibera and Jones 2013, "Rigorous benchmarking in
reasonable time"; Georges, Buytaert and Eeckhout 2007, "Statistically rigorous Java performance evaluation".

A ratio is the difference of two means of logarithms, with Welch's degrees of freedom: an offloading preset varies more
than another. Trials are interleaved, so what drifts over a comparison widens both sides and favours none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from toolkit.compare.results import Difference, Interval

CONFIDENCE = 0.95
# One claim in a hundred comparisons of a preset with itself; at 95 % it would be one in twenty. Where many rows are
# held against the reference, all of them together make a false claim in at most one comparison of twenty (Bonferroni).
PAIR_ERROR = 0.01
COMPARISON_ERROR = 0.05
METHOD = (
    "95 % Student t interval over the logarithms of the repeats' figures; a ratio by Welch's t at ratio_confidence:"
    " 99 %, or more where over 5 rows are compared, so that a comparison without differences claims one at most once"
    " in twenty"
)
SIMPSON_PARTS = 200


def centre(figures: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(math.fsum(map(math.log, figures)) / len(figures))


def interval(figures: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Of the centre of the repeats' figures; None with fewer than two."""
    if len(figures) < 2:
        return None
    logs = [math.log(figure) for figure in figures]
    half = student_t(confidence, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return _around(statistics.fmean(logs), half)


def next_interval(figures: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Where one more repeat is expected: wider than `interval`, which is of the mean."""
    if len(figures) < 2:
        return None
    logs = [math.log(figure) for figure in figures]
    half = student_t(confidence, len(logs) - 1) * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return _around(statistics.fmean(logs), half)


def ratio_interval(own: Sequence[float], other: Sequence[float], confidence: float) -> Interval | None:
    """Of the ratio of two centres; None with fewer than two repeats of either."""
    if min(len(own), len(other)) < 2:
        return None
    logs = [[math.log(figure) for figure in figures] for figures in (own, other)]
    errors = [statistics.variance(values) / len(values) for values in logs]
    middle = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if sum(errors) == 0:
        return _around(middle, 0.0)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True))
    return _around(middle, student_t(confidence, freedom) * math.sqrt(sum(errors)))


def ratio_confidence(ratios: int) -> float:
    """Confidence of each of this many ratios of one comparison."""
    return 1 - min(PAIR_ERROR, COMPARISON_ERROR / max(1, ratios))


def difference(ratio: Interval | tuple[float, float] | None) -> Difference | None:
    """What a ratio's interval allows to be said; None where there is none."""
    if ratio is None:
        return None
    low, high = ratio
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference seen"


def student_t(confidence: float, freedom: float) -> float:
    """Two-sided quantile of Student's t: `student_t(0.95, 2)` is 4.303."""
    low, high = 0.0, math.pi / 2  # t = sqrt(freedom) * tan(angle), whose density is cos(angle) ** (freedom - 1)
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _cosine_area(middle, freedom - 1) < confidence * whole else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _cosine_area(angle: float, power: float) -> float:
    """Integral of cos(x) ** power from 0 to `angle`, by Simpson's rule."""
    width = angle / SIMPSON_PARTS
    weights = (1 if i in (0, SIMPSON_PARTS) else 4 if i % 2 else 2 for i in range(SIMPSON_PARTS + 1))
    return width / 3 * math.fsum(weight * math.cos(i * width) ** power for i, weight in enumerate(weights))


def _around(middle: float, half: float) -> Interval:
    return [math.exp(middle - half), math.exp(middle + half)]

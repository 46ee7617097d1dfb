"""What repeated trials allow to be claimed: intervals of speeds and ratios, differences, ranks and scaling.

>>> difference((0.71, 0.78))
'slower'

The unit is the trial, never the step: the steps of one process share its placement, clocks and neighbors, so they vary
less than processes do, and an interval over pooled steps would find differences between a preset and itself. Each
trial gives one figure; the interval is Student's t over the logarithms of the trials' figures, because speeds vary by
factors. The variance between the steps of a trial is inside the trial's figure, and so in the interval. Resampling
three trials is no alternative: the bootstrap of so few clusters is too narrow (Cameron, Gelbach and Miller 2008,
"Bootstrap-based improvements for inference with clustered errors"). Method: Kalibera and Jones 2013, "Rigorous
benchmarking in reasonable time"; Georges, Buytaert and Eeckhout 2007, "Statistically rigorous Java performance
evaluation".

A ratio is the difference of two means of logarithms, with Welch's degrees of freedom: an offloading preset varies more
than another. Trials are interleaved, so a drift during the comparison widens both sides and favors none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from toolkit.compare.rows import Difference, Row, RowKey, Run
from toolkit.record.columns import Interval

CONFIDENCE = 0.95
# One false claim in a hundred comparisons of a preset with itself; at 95 % it would be one in twenty. When many rows
# are compared with the baseline, all of them together make a false claim in at most one comparison of twenty
# (Bonferroni).
PAIR_ERROR = 0.01
COMPARISON_ERROR = 0.05
METHOD = (
    "95 % Student t interval over the logarithms of the repeats' figures; a ratio by Welch's t at ratio_confidence:"
    " 99 %, or more where over 5 rows are compared, so that a comparison without differences claims one at most once"
    " in twenty"
)
# Two presets are equally fast where the interval of their ratio lies within this share of 1.
SAME_SPEED = 0.05
Verdict = Literal["faster", "slower", "same speed", "unclear"]
SIMPSON_INTERVALS = 200
# Tokens per second beyond every GPU; damaged times, not speeds, are outside of it and of its inverse.
FASTEST = 1e30
# exp() of more overflows.
LARGEST_LOG = 700.0

Speeds = Mapping[RowKey, Sequence[float]]
"""Tokens per second, without padding, of each repeat of a row, over the same steps in all trials with its number of
processes. Rows with other batches, such as those of another layout, pad the same sequences to other lengths."""


def mean_interval(figures: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Return the interval of the geometric mean; None with fewer than two figures."""
    if len(figures) < 2:
        return None
    logs = [math.log(figure) for figure in figures]
    half = student_t(confidence, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return _exp_interval(statistics.fmean(logs), half)


def ratio_interval(own: Sequence[float], other: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of the ratio of two geometric means; None with fewer than two repeats of either."""
    if min(len(own), len(other)) < 2:
        return None
    logs = [[math.log(figure) for figure in figures] for figures in (own, other)]
    errors = [statistics.variance(values) / len(values) for values in logs]
    middle = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if sum(errors) == 0:
        return _exp_interval(middle, 0.0)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True))
    return _exp_interval(middle, student_t(confidence, freedom) * math.sqrt(sum(errors)))


def ratio_confidence(num_ratios: int) -> float:
    """Return the confidence level of each of this many ratios in one comparison."""
    return 1 - min(PAIR_ERROR, COMPARISON_ERROR / max(1, num_ratios))


def difference(ratio: Interval | None) -> Difference | None:
    if ratio is None:
        return None
    return "faster" if ratio[0] > 1 else "slower" if ratio[1] < 1 else "no difference seen"


def verdict(ratio: Interval | None) -> Verdict | None:
    """Return what a ratio's interval shows; an interval that includes 1 shows equality only if it is narrow.

    >>> verdict((0.97, 1.02)), verdict((0.3, 2.1)), verdict((0.3, 0.98))
    ('same speed', 'unclear', 'slower')
    """
    if (claim := difference(ratio)) == "no difference seen" and ratio is not None:
        return "same speed" if ratio[0] >= 1 - SAME_SPEED and ratio[1] <= 1 + SAME_SPEED else "unclear"
    return claim if claim in ("faster", "slower") else None


def quotient(own: Interval, other: Interval) -> Interval:
    """Return the interval between the extreme quotients of two intervals: wider than that of the quotient."""
    return own[0] / other[1], own[1] / other[0] if other[0] else math.inf


def student_t(confidence: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t, for fractional degrees of freedom too.

    >>> round(student_t(0.95, 2), 3)
    4.303
    """

    def area(angle: float) -> float:
        """Integral of cos(x) ** (freedom - 1) from 0 to `angle`, by Simpson's rule."""
        width = angle / SIMPSON_INTERVALS
        weights = (1 if i in (0, SIMPSON_INTERVALS) else 4 if i % 2 else 2 for i in range(SIMPSON_INTERVALS + 1))
        return width / 3 * math.fsum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights))

    # With t = sqrt(freedom) * tan(angle) the density is proportional to cos(angle) ** (freedom - 1).
    low, high = 0.0, math.pi / 2
    total = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle) < confidence * total else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _exp_interval(middle: float, half: float) -> Interval:
    """Repeats that differ by many orders of magnitude would have an end that no number can stand for."""
    high = min(middle + half, LARGEST_LOG)
    return math.exp(min(middle - half, high)), math.exp(high)


def common_steps(trials: Sequence[Run]) -> int:
    """Return the number of timed steps that every completed trial has."""
    return min((len(trial.timed_step_numbers) for trial in trials if trial.completed), default=0)


def speeds_of(trials: Sequence[Run], steps: int, *, padding: bool = True) -> list[float]:
    """Return the tokens per second of each repeat over its first timed steps; 0 for a speed that no clock gives.

    Without `padding`, only other tokens are counted, in records that have their number: a script's may not.
    """
    speeds = []
    for trial in trials:
        numbers = trial.timed_step_numbers[:steps]
        without_padding = trial.step_non_padding_tokens
        known = bool(without_padding) and None not in without_padding
        counted = without_padding if known and not padding else trial.step_tokens
        seconds = sum(trial.step_seconds[number - 1] or 0.0 for number in numbers)
        tokens = sum(counted[number - 1] or 0 for number in numbers)
        speed = tokens / seconds if seconds else 0.0
        speeds.append(speed if 1 / FASTEST <= speed <= FASTEST else 0.0)
    return speeds


def compare_with_baseline(row: Row, rows: Sequence[Row], speeds: Speeds, baseline: RowKey) -> dict[str, Any]:
    """Return the row's ratio to the baseline with its claim, and its scaling, as columns.

    Scaling is relative to the same preset with the fewest processes; there is none if it ran with a single number.
    """
    columns: dict[str, Any] = {"ratio_to_reference": None}
    if row.key not in speeds:
        return columns
    speed_by_size = {
        other.world_size: other.tokens_per_second or 0.0
        for other in rows
        if other.preset == row.preset and other.has_speed
    }
    if len(speed_by_size) > 1:
        fewest = min(speed_by_size)
        speed_up = speed_by_size[row.world_size] / speed_by_size[fewest]
        columns |= {"speed_up": speed_up, "scaling_efficiency": speed_up / (row.world_size / fewest)}
    if row.key == baseline:
        columns |= {"ratio_to_reference": 1.0, "difference": "reference"}
    elif baseline in speeds:
        own, others = speeds[row.key], speeds[baseline]
        interval = ratio_interval(own, others, confidence_of(rows))
        columns |= {"ratio_interval": interval, "difference": difference(interval)}
        columns["ratio_to_reference"] = statistics.geometric_mean(own) / statistics.geometric_mean(others)
    return columns


def confidence_of(rows: Sequence[Row]) -> float:
    """Return the confidence level of each ratio to a baseline, of which there is one per number of processes."""
    return ratio_confidence(len(rows) - len({row.world_size for row in rows}))


def rank_of(row: Row, rows: Sequence[Row], speeds: Speeds) -> int | None:
    """Return the place in its world size and group; None unless separated from all others, all pairs together."""
    kind = (row.world_size, row.group)
    peers = [other for other in rows if other.key in speeds and (other.world_size, other.group) == kind]
    if row not in peers or len(peers) < 2:
        return None
    confidence = ratio_confidence(len(peers) * (len(peers) - 1) // 2)
    others = [speeds[other.key] for other in peers if other is not row]
    claims = [difference(ratio_interval(other, speeds[row.key], confidence)) for other in others]
    return 1 + claims.count("faster") if set(claims) <= {"faster", "slower"} else None

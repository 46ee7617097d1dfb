"""How well a run's timed steps know their own median: its bootstrap interval, without drawing a sample.

    >>> median_interval([1.0, 1.0, 1.1, 1.0, 0.9, 1.0, 1.0])
    (0.9, 1.1)

Resampling n values with replacement puts the median at or below the k-th smallest with the probability that at least
half of the n draws do, a binomial sum; so the bootstrap's distribution is known exactly, and every process that has the
same values has the same interval (Efron 1979, "Bootstrap methods: another look at the jackknife", section 3).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median; None without a value."""
    if not values:
        return None
    ordered, tail = sorted(values), (1 - confidence) / 2
    return ordered[_quantile(len(ordered), tail)], ordered[_quantile(len(ordered), 1 - tail)]


def is_within(values: Sequence[float], share: float) -> bool:
    """Whether the 95 % interval of the median lies within `share` of the median on both sides."""
    interval = median_interval(values)
    if interval is None:
        return False
    median = statistics.median(values)
    return max(interval[1] - median, median - interval[0]) <= share * median


def _quantile(n: int, probability: float) -> int:
    """Index of the smallest value that the resampled median is at or below with at least this probability."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _median_at_or_below(middle + 1, n) >= probability else (middle + 1, high)
    return low


def _median_at_or_below(k: int, n: int) -> float:
    """P(at least half of n draws are among the k smallest of n values)."""
    if k == n:
        return 1.0
    share = k / n
    least = (n + 1) // 2
    return math.fsum(math.exp(_log_binomial(n, drawn, share)) for drawn in range(least, n + 1))


def _log_binomial(n: int, k: int, share: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(share) + (n - k) * math.log1p(-share)

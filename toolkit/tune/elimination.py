"""Sequential elimination: which settings can still be the fastest after some rounds of trials, at a stated error.

A round is one trial of every setting that is left. The figure of a trial is the logarithm of its seconds per step,

    figure = setting + round + noise,

so that what slows a whole round, such as a neighbor on the node, cancels in the differences within it. After round r,
setting i is eliminated if the confidence interval of its ratio to the leader (the setting with the lowest mean) lies
above 1:

    mean(i) - mean(leader) > t(1 - e_r, df) · s · sqrt(2 / r),
    e_r = e / (K - 1) · (f(r) - f(r - 1)),    f(r) = ((r - 1) / (R - 1))².

The error e (5 %) is shared by the K - 1 settings that could wrongly eliminate the fastest, and by the rounds from the
second to R, the last: by the union bound the truly fastest setting is eliminated in at most e of the searches, whenever
one stops. Dividing an error over repeated looks is the "alpha spending" of Lan and DeMets 1983 ("Discrete sequential
boundaries for clinical trials"), and this f the power family of Kim and DeMets 1987 ("Design and analysis of group
sequential tests based on the type I error spending rate function"): little is spent while few trials say how large
the noise is. Racing to the best by elimination is Maron and Moore 1994 ("Hoeffding races") and, with t tests, Birattari
et al. 2002 ("A racing algorithm for configuring metaheuristics").

The variance s² is pooled over all settings, those already eliminated included: two trials of one setting say little.
Each round adds the squared deviations of its figures from the means of the rounds before, without their common shift
(Helmert contrasts): a round of k settings has k - 1 degrees of freedom. Where the differences between two settings
themselves vary more than that, as those of a setting that offloads do, their own variance is taken.

>>> figures = {"a": [0.0, 0.01, 0.0], "b": [0.7, 0.7, 0.69], "c": [0.02, 0.0, 0.01]}
>>> race = after_round(figures, num_settings=3, num_rounds=8)
>>> race.leader, sorted(race.slower)
('a', ['b'])
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.compare.significance import LARGEST_LOG, student_t
from toolkit.record.columns import Interval

ERROR = 0.05
"""Share of searches in which the truly fastest setting may be eliminated, at most."""
SAME_SPEED = 0.02
"""A search ends when no setting that is left can be faster than the leader by more than this."""

Figures = Mapping[str, Sequence[float]]
"""Logarithm of seconds per step by setting and round; a setting that was eliminated has fewer rounds."""
quantile = functools.lru_cache(maxsize=4096)(student_t)


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The settings that are left after a round."""

    leader: str
    ratios: Mapping[str, Interval]
    """Interval of the ratio of seconds per step to the leader's, of each other setting that was left."""

    @property
    def slower(self) -> dict[str, Interval]:
        """Those that are eliminated: their interval excludes 1."""
        return {name: interval for name, interval in self.ratios.items() if interval[0] > 1}

    @property
    def settled(self) -> bool:
        """True if no setting that is left can be faster than the leader by more than `SAME_SPEED`."""
        return all(low >= 1 - SAME_SPEED for low, _ in self.ratios.values())


def spent(after: int, num_rounds: int) -> float:
    """Return f: the share of the error that all rounds up to this one spend."""
    return ((after - 1) / (num_rounds - 1)) ** 2


def after_round(figures: Figures, *, num_settings: int, num_rounds: int, error: float = ERROR) -> Race:
    """Return the race after the last complete round.

    `num_settings` is K, with those that were eliminated before, and `num_rounds` is R, 2 or more.
    """
    rounds = max(map(len, figures.values()))
    left = {name: values for name, values in figures.items() if len(values) == rounds}
    leader = min(left, key=lambda name: statistics.fmean(left[name]))
    share = spent(rounds, num_rounds) - spent(rounds - 1, num_rounds) if rounds > 1 else 0.0
    # Only the lower end of an interval eliminates, so each end has the whole error of its round.
    confidence, pooled = 1 - 2 * error * share / max(num_settings - 1, 1), noise(figures)
    others = {name: _ratio(left[name], left[leader], pooled, confidence) for name in left if name != leader}
    return Race(leader=leader, ratios={name: interval for name, interval in others.items() if interval is not None})


def noise(figures: Figures) -> tuple[float, int]:
    """Return the pooled variance within settings, without the rounds' common shifts, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for at in range(1, max(map(len, figures.values()), default=0)):
        steps = [values[at] - statistics.fmean(values[:at]) for values in figures.values() if len(values) > at]
        squares += _squares(steps) * at / (at + 1)
        freedom += len(steps) - 1
    return (squares / freedom if freedom else 0.0), freedom


def ratio_interval(figures: Figures, one: str, other: str, *, confidence: float) -> Interval | None:
    """Return the interval of the ratio of two settings, over the rounds of both; None with fewer than two rounds."""
    return _ratio(figures[one], figures[other], noise(figures), confidence)


def mean_interval(figures: Figures, name: str, *, confidence: float = 0.95) -> Interval | None:
    """Return the interval of a setting's geometric mean, with the variance within all settings; None if unknown."""
    freedom = sum(len(values) - 1 for values in figures.values())
    spread = math.sqrt(sum(map(_squares, figures.values())) / max(freedom, 1) / len(figures[name]))
    return _interval(statistics.fmean(figures[name]), quantile(confidence, freedom) * spread) if freedom else None


def _ratio(
    one: Sequence[float], other: Sequence[float], pooled: tuple[float, int], confidence: float
) -> Interval | None:
    pairs, (variance, freedom) = [a - b for a, b in zip(one, other, strict=False)], pooled
    if len(pairs) < 2 or not freedom:
        return None
    larger = max(2 * variance, _squares(pairs) / (len(pairs) - 1))
    return _interval(statistics.fmean(pairs), quantile(confidence, freedom) * math.sqrt(larger / len(pairs)))


def _squares(values: Sequence[float]) -> float:
    middle = statistics.fmean(values)
    return sum((value - middle) ** 2 for value in values)


def _interval(middle: float, half: float) -> Interval:
    high = min(middle + half, LARGEST_LOG)
    return math.exp(min(middle - half, high)), math.exp(high)

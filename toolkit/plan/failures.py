"""Failures and checkpoints of a long job in closed form: time between failures, best interval, effective time ratio.

Any node's failure stops the job, which starts again from its last checkpoint. Failures are independent, at a constant
rate: real ones are not, and small jobs fail more often than their nodes explain (docs/evidence/simulations.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SECONDS_PER_DAY = 86_400
LARGEST_EXPONENT = 700.0  # of a float; no interval ever ends


@dataclass(frozen=True, kw_only=True, slots=True)
class FailingJob:
    """A job that runs on all of its nodes or on none, with blocking checkpoints at equal distances."""

    nodes: int
    failures_per_1000_node_days: float
    checkpoint_seconds: float  # training that one save costs
    restart_seconds: float  # from the replacement of a failed node to the first new step
    detection_seconds: float = 0.0  # from a failure until the job is stopped
    interval_seconds: float | None = None  # training between two saves; None: the best by Young's formula
    spare_nodes: int | None = None  # nodes that wait to replace a failed one; None: there is always one
    repair_seconds: float = 0.0  # from a node's failure until it is a spare

    @property
    def mean_seconds_between_failures(self) -> float:
        """Mean time between failures of the job: that of a node divided by the number of nodes."""
        return 1000 * SECONDS_PER_DAY / (self.failures_per_1000_node_days * self.nodes)

    @property
    def interval(self) -> float:
        """Seconds of training between two saves."""
        if self.interval_seconds is not None:
            return self.interval_seconds
        return young_interval(self.checkpoint_seconds, self.mean_seconds_between_failures)

    @property
    def checkpoint_fraction(self) -> float:
        """Seconds of saving per second of training."""
        return self.checkpoint_seconds / self.interval

    @property
    def effective_time_ratio(self) -> float:
        """Share of the time, with all nodes there, in which training makes progress that is not lost again.

        First order in the failure rate (https://arxiv.org/abs/2410.21680): each failure costs detection, restart, and
        half an interval on average; saving costs the rest. 0 where that leaves nothing.
        """
        lost = self.detection_seconds + self.restart_seconds + self.interval / 2
        return max(0.0, 1 - lost / self.mean_seconds_between_failures) / (1 + self.checkpoint_fraction)

    @property
    def exact_time_ratio(self) -> float:
        """The same also for frequent failures: Daly 2006, equation 20; none is counted in the time of detection."""
        mean = self.mean_seconds_between_failures
        exponents = self.restart_seconds / mean, (self.interval + self.checkpoint_seconds) / mean
        if sum(exponents) > LARGEST_EXPONENT:
            return 0.0
        failures = math.exp(exponents[0]) * math.expm1(exponents[1])
        return self.interval / ((mean + self.detection_seconds) * failures)

    @property
    def availability(self) -> float:
        """Share of the time in which the job has all of its nodes, for repair times of any distribution.

        Erlang's loss formula: nodes in repair are the busy lines, and there is one more line than spares, since the job
        stops, and so fails no more, when one node is missing.
        """
        if self.spare_nodes is None:
            return 1.0
        return 1 - erlang_loss(self.spare_nodes + 1, self.repair_seconds / self.mean_seconds_between_failures)

    @property
    def goodput(self) -> float:
        """Share of all nodes' time, spares included, that is progress."""
        used = self.nodes / (self.nodes + (self.spare_nodes or 0))
        return self.exact_time_ratio * self.availability * used

    def at_interval(self, seconds: float) -> FailingJob:
        """Return the same job with another interval between saves."""
        return replace(self, interval_seconds=seconds)


def young_interval(checkpoint_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the best training time between two saves to first order, √(2·C·M) (J. W. Young, CACM 17(9), 1974).

    >>> young_interval(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * checkpoint_seconds * mean_seconds_between_failures)


def daly_interval(checkpoint_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the best training time between two saves to higher order; M itself where saving takes 2·M or longer.

    J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.

    >>> round(daly_interval(50, 10_000), 1)
    966.9
    """
    ratio = checkpoint_seconds / (2 * mean_seconds_between_failures)
    if ratio >= 1:
        return mean_seconds_between_failures
    young = young_interval(checkpoint_seconds, mean_seconds_between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds


def erlang_loss(lines: int, load: float) -> float:
    """Return the share of the time in which all lines are busy, for a load in mean busy lines."""
    loss = 1.0
    for line in range(1, lines + 1):
        loss = load * loss / (line + load * loss)
    return loss

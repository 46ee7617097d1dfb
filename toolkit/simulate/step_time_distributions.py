"""Compute times of workers, step by step: drawn from a named distribution, or from the rows of a real run.

Every distribution is given by its mean and its spread (standard deviation over mean), so that two of them differ by the
shape of their tails alone.

    >>> StepTimes(distribution="constant", step_seconds=1.0).draw(seed=0, workers=3, steps=1).tolist()
    [[1.0], [1.0], [1.0]]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.run.folder import RunFolder
from toolkit.run.measurements import read_steps, timed_steps
from toolkit.simulate.options import DISTRIBUTIONS
from toolkit.simulate.synchronization import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """A named distribution. Raises ToolkitError for what no distribution has."""

    distribution: str
    step_seconds: float
    """Mean of an ordinary worker."""
    spread: float = 0.0
    """Standard deviation over mean."""

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ToolkitError(
                f"unknown distribution {self.distribution!r}; known: {', '.join(DISTRIBUTIONS)}",
                hint=did_you_mean(self.distribution, DISTRIBUTIONS),
            )
        if not 0 < self.step_seconds <= 1e6:
            raise ToolkitError(f"--step-seconds is {self.step_seconds}, expected seconds above 0, at most a million")
        most = 1.0 if self.distribution == "exponential" else 10.0
        if not 0 <= self.spread <= most:
            raise ToolkitError(f"--spread is {self.spread}, expected 0 to {most:g} for {self.distribution}")

    @property
    def summary(self) -> str:
        """One line for a report."""
        spread = "" if self.spread == 0 else f", spread {self.spread:g}"
        return f"{self.distribution}, mean {self.step_seconds:g} s{spread}"

    def draw(self, *, seed: int, workers: int, steps: int) -> FloatArray:
        """Return seconds of shape (workers, steps); the same for the same seed."""
        mean, spread, size = self.step_seconds, self.spread, (workers, steps)
        generator = numpy.random.default_rng(seed)
        if self.distribution == "constant" or spread == 0:
            return numpy.full(size, mean)
        if self.distribution == "lognormal":
            variance = math.log1p(spread**2)
            return generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size)
        if self.distribution == "exponential":  # a constant part and an exponential tail; spread 1 has no constant part
            return mean * (1 - spread) + generator.exponential(mean * spread, size)
        index = 1 + math.sqrt(1 + 1 / spread**2)  # Pareto: variance over squared mean is 1 / (index (index - 2))
        return mean * (index - 1) / index * (1 + generator.pareto(index, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStepTimes:
    """Compute times of a run, by step and rank. More workers than ranks repeat the ranks, each time with other steps.

    Steps are drawn whole, so that ranks that were slow in the same step stay slow together.
    """

    seconds: tuple[tuple[float, ...], ...]
    """By step, the compute seconds of each rank."""
    folder: str

    @property
    def summary(self) -> str:
        """One line for a report."""
        return f"{len(self.seconds)} steps of {len(self.seconds[0])} ranks in {self.folder}"

    def draw(self, *, seed: int, workers: int, steps: int) -> FloatArray:
        """Return seconds of shape (workers, steps), drawn from the run's steps with repetition."""
        generator, measured = numpy.random.default_rng(seed), numpy.array(self.seconds)
        ranks = measured.shape[1]
        groups = [measured[generator.integers(len(measured), size=steps)].T for _ in range(-(-workers // ranks))]
        return numpy.concatenate(groups)[:workers]


def measured_step_times(folder: Path, *, untimed_steps: int) -> MeasuredStepTimes:
    """Read the compute times of a run's timed steps. Raises ToolkitError for a folder without any.

    A rank reports `own_seconds`, where it waits for nobody: data loading, the first forward, the optimizer step. In the
    rest, backward, it computes and waits for the others' gradients, which nothing tells apart. The rank with the most
    `own_seconds` waits least: its rest is taken as every rank's. A rank whose backward is slow too therefore looks
    faster by comparison than it is.
    """
    steps = timed_steps(read_steps(RunFolder(folder)), untimed_steps=untimed_steps)
    if not steps:
        raise ToolkitError(
            f"{folder} has no timed step of all ranks in ranks/rank*.jsonl",
            hint=f"name the folder of a run of more than {untimed_steps} steps",
        )
    if any(row.get("own_seconds") is None for step in steps for row in step):
        raise ToolkitError(f"the rows in {folder}/ranks have no own_seconds", hint="name a run of this version")
    seconds = tuple(map(compute_seconds, steps))
    if min(map(min, seconds)) <= 0:
        raise ToolkitError(f"a step in {folder}/ranks took no time", hint="name another run")
    return MeasuredStepTimes(seconds=seconds, folder=folder.name)


def compute_seconds(step: list[dict[str, float]]) -> tuple[float, ...]:
    """Return each rank's compute seconds of one step: its own, and the slowest rank's rest.

    >>> compute_seconds([{"seconds": 5.0, "own_seconds": 1.0}, {"seconds": 5.0, "own_seconds": 3.0}])
    (3.0, 5.0)
    """
    slowest = max(step, key=lambda row: row["own_seconds"])
    rest = slowest["seconds"] - slowest["own_seconds"]
    return tuple(row["own_seconds"] + rest for row in step)

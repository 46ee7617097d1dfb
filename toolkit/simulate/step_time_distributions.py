"""Compute times of workers, step by step: drawn from a named distribution, or from the rows of a real run.

Every distribution is given by its mean and its spread (standard deviation over mean), so that two of them differ by the
shape of their tails alone.

    >>> times = StepTimes(distribution="constant", step_seconds=1.0)
    >>> slowed(times.draw(seed=0, workers=3, steps=1), SlowWorkers(count=1, factor=2.0)).tolist()
    [[1.0], [1.0], [2.0]]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from toolkit.errors import ToolkitError, did_you_mean

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    FloatArray = NDArray[numpy.float64]


class ComputeTimes(Protocol):
    """A source of compute times, without communication and without waiting."""

    @property
    def summary(self) -> str:
        """One line for a report: where the times come from."""

    def draw(self, *, seed: int, workers: int, steps: int) -> FloatArray:
        """Return seconds of shape (workers, steps)."""


def _constant(generator: numpy.random.Generator, mean: float, spread: float, size: tuple[int, int]) -> FloatArray:
    del generator, spread
    import numpy

    return numpy.full(size, mean)


def _lognormal(generator: numpy.random.Generator, mean: float, spread: float, size: tuple[int, int]) -> FloatArray:
    variance = math.log1p(spread**2)
    return generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size)


def _exponential(generator: numpy.random.Generator, mean: float, spread: float, size: tuple[int, int]) -> FloatArray:
    return mean * (1 - spread) + generator.exponential(mean * spread, size)


def _pareto(generator: numpy.random.Generator, mean: float, spread: float, size: tuple[int, int]) -> FloatArray:
    index = pareto_index(spread)
    return mean * (index - 1) / index * (1 + generator.pareto(index, size))


def pareto_index(spread: float) -> float:
    """Return the tail index of a Pareto distribution: the variance over the squared mean is 1 / (index (index - 2)).

    >>> round(pareto_index(3**-0.5), 9)
    3.0
    """
    return 1 + math.sqrt(1 + 1 / spread**2)


Draw = Callable[["numpy.random.Generator", float, float, tuple[int, int]], "FloatArray"]
DISTRIBUTIONS: dict[str, Draw] = {
    "constant": _constant,
    "lognormal": _lognormal,
    "exponential": _exponential,  # a constant part and an exponential tail; spread 1 has no constant part
    "pareto": _pareto,
}


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
        import numpy

        name = self.distribution if self.spread > 0 else "constant"
        generator = numpy.random.default_rng(seed)
        return DISTRIBUTIONS[name](generator, self.step_seconds, self.spread, (workers, steps))


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
        import numpy

        generator, measured = numpy.random.default_rng(seed), numpy.array(self.seconds)
        ranks = measured.shape[1]
        groups = [measured[generator.integers(len(measured), size=steps)].T for _ in range(-(-workers // ranks))]
        return numpy.concatenate(groups)[:workers]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowWorkers:
    """Workers that are slower than the others in every step: a throttled GPU, a node with a slow disk."""

    count: int = 0
    factor: float = 1.0
    """Their compute time over that of the same worker in good order."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ToolkitError(f"--slow-workers is {self.count}, expected 0 or more")
        if not 1 <= self.factor <= 1000:
            raise ToolkitError(f"--slow-factor is {self.factor}, expected 1 to 1000")


def slowed(seconds: FloatArray, slow: SlowWorkers) -> FloatArray:
    """Return compute times of which the last workers' are longer."""
    longer = seconds.copy()
    longer[len(seconds) - slow.count :] *= slow.factor
    return longer


def measured_step_times(folder: Path, *, untimed_steps: int) -> MeasuredStepTimes:
    """Read the compute times of a run's timed steps. Raises ToolkitError for a folder without any.

    A rank reports `own_seconds`, where it waits for nobody: data loading, the first forward, the optimizer step. In the
    rest, backward, it computes and waits for the others' gradients, which nothing tells apart. The rank with the most
    `own_seconds` waits least: its rest is taken as every rank's. A rank whose backward is slow too therefore looks
    faster by comparison than it is.
    """
    from toolkit.record.folder import RunFolder  # takes longer to import than a simulation
    from toolkit.record.measurements import read_steps, timed_steps

    timed = timed_steps(read_steps(RunFolder(folder)), untimed_steps=untimed_steps)
    steps = [[row.model_dump() for row in step] for step in timed]
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

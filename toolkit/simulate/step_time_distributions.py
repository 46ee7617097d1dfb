"""Compute times of workers, step by step: drawn from a named distribution, or from the rows of a real run.

Every distribution is given by its mean and its spread (standard deviation over mean), so that two of them differ by the
shape of their tails alone.

    >>> drawn_seconds("constant", mean=1.0, spread=0.0, shape=(2, 3), seed=0).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import StepRow, read_steps, timed_steps
from toolkit.simulate.options import (
    DEFAULT_DISTRIBUTION,
    DEFAULT_SPREAD,
    DEFAULT_STEP_SECONDS,
    DISTRIBUTIONS,
    StragglerOptions,
)
from toolkit.simulate.synchronization import FloatArray


def compute_times(options: StragglerOptions) -> tuple[FloatArray, str]:
    """Return seconds of shape (workers, 2 x steps), the same for the same seed, and one line on where they come from.

    Raises ToolkitError for options that no distribution and no run has.
    """
    shape = (options.workers, 2 * options.steps)
    if options.run_folder is None:
        distribution = options.distribution or DEFAULT_DISTRIBUTION
        mean = DEFAULT_STEP_SECONDS if options.step_seconds is None else options.step_seconds
        spread = DEFAULT_SPREAD if options.spread is None else options.spread
        _check(distribution, mean, spread)
        seconds = drawn_seconds(distribution, mean=mean, spread=spread, shape=shape, seed=options.seed)
        source = f"{distribution}, mean {mean:g} s" + (f", spread {spread:g}" if spread else "")
    else:
        drawn = {"distribution": options.distribution, "step-seconds": options.step_seconds, "spread": options.spread}
        for name, value in drawn.items():
            if value is not None:
                raise ToolkitError(
                    f"--run-folder and --{name} both say how long a step takes", hint=f"leave out --{name}"
                )
        measured = measured_step_times(options.run_folder, untimed_steps=options.untimed_steps)
        seconds = resampled(measured, shape=shape, seed=options.seed)
        source = f"{len(measured)} steps of {measured.shape[1]} ranks in {options.run_folder.name}"
    seconds[options.workers - options.slow_workers :] *= options.slow_factor
    slower = f"; {options.slow_workers} slower by {options.slow_factor:g}" if options.slow_workers else ""
    return seconds, source + slower


def _check(distribution: str, mean: float, spread: float) -> None:
    if distribution not in DISTRIBUTIONS:
        raise ToolkitError(
            f"unknown distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}",
            hint=did_you_mean(distribution, DISTRIBUTIONS),
        )
    if not 0 < mean <= 1e6:
        raise ToolkitError(f"--step-seconds is {mean}, expected seconds above 0, at most a million")
    most = 1.0 if distribution == "exponential" else 10.0
    if not 0 <= spread <= most:
        raise ToolkitError(f"--spread is {spread}, expected 0 to {most:g} for {distribution}")


def drawn_seconds(distribution: str, *, mean: float, spread: float, shape: tuple[int, int], seed: int) -> FloatArray:
    """Return compute times of this mean and spread (standard deviation over mean); without spread, all are equal."""
    generator = numpy.random.default_rng(seed)
    if distribution == "constant" or spread == 0:
        return numpy.full(shape, mean)
    if distribution == "lognormal":
        variance = math.log1p(spread**2)
        return generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), shape)
    if distribution == "exponential":  # a constant part and an exponential tail; spread 1 has no constant part
        return mean * (1 - spread) + generator.exponential(mean * spread, shape)
    index = 1 + math.sqrt(1 + 1 / spread**2)  # Pareto: variance over squared mean is 1 / (index (index - 2))
    return mean * (index - 1) / index * (1 + generator.pareto(index, shape))


def resampled(measured: FloatArray, *, shape: tuple[int, int], seed: int) -> FloatArray:
    """Return compute times of workers, drawn with repetition from a run's steps, of shape (steps, ranks).

    Steps are drawn whole, so that ranks that were slow in the same step stay slow together. More workers than ranks
    repeat the ranks, each time with other steps.
    """
    generator, (workers, steps) = numpy.random.default_rng(seed), shape
    groups = -(-workers // measured.shape[1])
    drawn = [measured[generator.integers(len(measured), size=steps)].T for _ in range(groups)]
    return numpy.concatenate(drawn)[:workers]


def measured_step_times(folder: Path, *, untimed_steps: int) -> FloatArray:
    """Read the compute times of a run's timed steps, of shape (steps, ranks). Raises ToolkitError if it has none.

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
    if any(row.own_seconds is None for step in steps for row in step):
        raise ToolkitError(f"the rows in {folder}/ranks have no own_seconds", hint="name a run of this version")
    seconds = numpy.array([compute_seconds(step) for step in steps])
    if seconds.min() <= 0:
        raise ToolkitError(f"a step in {folder}/ranks took no time", hint="name another run")
    return seconds


def compute_seconds(step: Sequence[StepRow]) -> tuple[float, ...]:
    """Return each rank's compute seconds of one step: its own, and the slowest rank's rest.

    >>> compute_seconds([StepRow.model_construct(seconds=5.0, own_seconds=own) for own in (1.0, 3.0)])
    (3.0, 5.0)
    """
    own = [row.own_seconds or 0.0 for row in step]
    rest = step[own.index(max(own))].seconds - max(own)
    return tuple(seconds + rest for seconds in own)

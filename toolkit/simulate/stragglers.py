"""`toolkit simulate stragglers`: what slow workers cost data parallelism, and what backup workers would win back.

Two policies, over the same compute times:

- `synchronous`: an update is the mean of all workers' gradients.
- `backup_workers`: of N + b workers, an update is the mean of the first N gradients; a late worker finishes its batch,
  drops the gradient, and joins the update in progress (Chen et al. 2016, https://arxiv.org/abs/1604.00981).

    >>> import numpy
    >>> slow = numpy.array([[1.0] * 4, [2.0] * 4])
    >>> simulate(slow, steps=2).seconds
    4.0

With a model, its gradients are all-reduced in a ring as `toolkit plan` does, at the worst rates of the interconnect
(`toolkit.plan.interconnect`), with nothing overlapped.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from toolkit.engines.planned import Collective
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GIGA, named_or_visible_gpu
from toolkit.job.argument_values import check_word
from toolkit.models.read_model import read_model
from toolkit.plan.interconnect import Interconnect, Range
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_steps, timed_steps
from toolkit.report.charts import Bar, BarChart
from toolkit.report.rendering import number_cell, text_cell
from toolkit.simulate import options as defaults
from toolkit.simulate.options import LEAST, StragglerOptions, check_ranges, refuse_given
from toolkit.simulate.simulation_report import SimulationReport, table_of
from toolkit.units import SECONDS_PER_HOUR, counted, gib, number
from toolkit.units import seconds as seconds_text

FloatArray = NDArray[numpy.float64]

MOST_BATCHES = 1_000_000  # workers times steps
MOST_BACKUP_WORKERS = 32  # more are dearer than the stragglers they hide
GRADIENT_BYTES = 4  # fp32, as DDP reduces those of fp32 master weights
NOTES = (
    "A step is an update: by the mean of all gradients, or of those that backup workers do not miss.",
    "Wasted GPU-hours are waiting and dropped gradients of all workers, until all steps are applied. What a smaller"
    " global batch does to the loss is left out.",
)
# Columns of numbers: heading, key of a row in the JSON, factor, and digits.
COLUMNS = (
    ("steps/s", "steps_per_second", 1, 3),
    ("waiting\n%", "waiting_fraction", 100, 1),
    ("dropped\n%", "discarded_fraction", 100, 1),
    ("comm.\n%", "communication_fraction", 100, 1),
    ("wasted\nGPU-h", "wasted_gpu_hours", 1, 3),
)


@dataclass(kw_only=True, slots=True)
class PolicyRun:
    """Everything that happened until all steps were applied."""

    workers: int
    backup_workers: int  # workers whose gradient an update does not wait for
    steps: int
    seconds: float = 0.0  # time of the last update
    waiting_seconds: float = 0.0  # of all workers, as the next two: idle until the update
    discarded_seconds: float = 0.0  # spent on gradients that were dropped
    communication_seconds: float = 0.0

    def as_row(self) -> dict[str, Any]:
        """Return the run as `--json` prints it."""
        spent = {name: getattr(self, f"{name}_seconds") for name in ("waiting", "discarded", "communication")}
        return {
            "policy": f"backup_workers {self.backup_workers}" if self.backup_workers else "synchronous",
            "seconds": self.seconds,
            "steps_per_second": self.steps / self.seconds,
            **{f"{name}_fraction": seconds / (self.workers * self.seconds) for name, seconds in spent.items()},
            "wasted_gpu_hours": (self.waiting_seconds + self.discarded_seconds) / SECONDS_PER_HOUR,
        }


def simulate(
    seconds: FloatArray, *, steps: int, backup_workers: int = 0, communication_seconds: float = 0.0
) -> PolicyRun:
    """Run until `steps` updates are applied; each waits for the first gradients of the current weights.

    `seconds` has the compute time of each worker's batches, of shape (workers, batches); after the last batch a worker
    begins again with the first. `communication_seconds` is one all-reduce.
    """
    workers, batches = seconds.shape
    run = PolicyRun(workers=workers, backup_workers=backup_workers, steps=steps)
    batch, free = numpy.zeros(workers, dtype=int), numpy.zeros(workers)
    for _ in range(steps):
        duration = seconds[numpy.arange(workers), batch % batches]
        start = numpy.maximum(run.seconds, free)
        finish = start + duration
        first = numpy.argsort(finish, kind="stable")[: workers - backup_workers]
        done = float(finish[first].max())
        started = start < done
        free = numpy.where(started, finish, free)
        late = started & ~numpy.isin(numpy.arange(workers), first)
        run.seconds = done + communication_seconds
        run.waiting_seconds += float(numpy.maximum(done - free, 0.0).sum())
        run.discarded_seconds += float(duration[late].sum())
        run.communication_seconds += workers * communication_seconds
        batch += started
    return run


def best_backup_workers(seconds: FloatArray, *, steps: int, communication_seconds: float = 0.0) -> tuple[int, float]:
    """Return the number of backup workers that applies most gradients per second, and the gain over none.

    The workers stay as many: one more backup worker is one gradient less per update.
    """
    workers, rates = len(seconds), {}
    for count in range(min(workers - 1, MOST_BACKUP_WORKERS) + 1):
        run = simulate(seconds, steps=steps, backup_workers=count, communication_seconds=communication_seconds)
        rates[count] = (workers - count) / run.seconds
    best = max(rates, key=rates.__getitem__)
    return best, rates[best] / rates[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerStudy:
    """Everything that `toolkit simulate stragglers` reports."""

    workers: int
    steps: int
    seed: int
    step_times: str
    slowdown: float  # a step that waits for all workers over the mean compute time
    best_backup_workers: int  # the number that applies most gradients per second
    best_backup_gain: float
    model: str | None
    gradient_bytes: int | None
    all_reduce_seconds: Range | None  # at the best and the worst rates; None without a model
    policies: tuple[PolicyRun, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the study as `--json` prints it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"policies": [run.as_row() for run in self.policies]}


def study_stragglers(options: StragglerOptions) -> StragglerStudy:
    """Simulate both policies. Raises ToolkitError for options out of range."""
    _check_options(options)
    seconds, step_times = compute_times(options)
    gradient_bytes, all_reduce = _communication(options)
    communication = 0.0 if all_reduce is None else all_reduce[1]
    policies = [
        simulate(seconds, steps=options.steps, backup_workers=count, communication_seconds=communication)
        for count in (0, options.backup_workers)
    ]
    best, gain = best_backup_workers(seconds, steps=options.steps, communication_seconds=communication)
    everyone = simulate(seconds, steps=options.steps)
    return StragglerStudy(
        workers=options.workers,
        steps=options.steps,
        seed=options.seed,
        step_times=step_times,
        slowdown=everyone.seconds / options.steps / float(seconds[:, : options.steps].mean()),
        best_backup_workers=best,
        best_backup_gain=gain,
        model=options.model,
        gradient_bytes=gradient_bytes,
        all_reduce_seconds=all_reduce,
        policies=tuple(policies),
    )


def _check_options(options: StragglerOptions) -> None:
    ranges: dict[str, tuple[float, float]] = {
        "workers": (2, 100_000),
        "backup_workers": (1, options.workers - 1),
        "steps": (1, MOST_BATCHES),
        "seed": (0, 2**32 - 1),
        "slow_workers": (0, options.workers),
        "slow_factor": (1, 1000),
        "untimed_steps": (0, MOST_BATCHES),
        "network_gb_per_second": (1e-6, 10**6),
        "gpus_per_node": (1, 100_000),
        "step_seconds": (LEAST, 10**6),
        "spread": (0, 1 if options.distribution == "exponential" else 10),
    }
    check_ranges(options, ranges)
    if options.workers * options.steps > MOST_BATCHES:
        what = f"{options.workers} workers times {options.steps} steps are more than {MOST_BATCHES:,} batches"
        raise ToolkitError(what, hint=f"--steps {MOST_BATCHES // options.workers}")


def compute_times(options: StragglerOptions) -> tuple[FloatArray, str]:
    """Return seconds of shape (workers, 2 x steps), the same for the same seed, and one line on where they come from.

    Raises ToolkitError for options that no distribution and no run has.
    """
    shape = (options.workers, 2 * options.steps)
    if options.run_folder is None:
        distribution = options.distribution or defaults.DEFAULT_DISTRIBUTION
        mean = defaults.DEFAULT_STEP_SECONDS if options.step_seconds is None else options.step_seconds
        spread = defaults.DEFAULT_SPREAD if options.spread is None else options.spread
        check_word("--distribution", distribution, defaults.DISTRIBUTIONS)
        seconds = drawn_seconds(distribution, mean=mean, spread=spread, shape=shape, seed=options.seed)
        source = f"{distribution}, mean {mean:g} s" + (f", spread {spread:g}" if spread else "")
    else:
        what = "--run-folder and {flag} both say how long a step takes"
        refuse_given(options, ("distribution", "step_seconds", "spread"), what, "leave out {flag}")
        measured = measured_step_times(options.run_folder, untimed_steps=options.untimed_steps)
        seconds = resampled(measured, shape=shape, seed=options.seed)
        source = f"{len(measured)} steps of {measured.shape[1]} ranks in {options.run_folder.name}"
    seconds[options.workers - options.slow_workers :] *= options.slow_factor
    slower = f"; {options.slow_workers} slower by {options.slow_factor:g}" if options.slow_workers else ""
    return seconds, source + slower


def drawn_seconds(distribution: str, *, mean: float, spread: float, shape: tuple[int, int], seed: int) -> FloatArray:
    """Return compute times of this mean and spread (standard deviation over mean); without spread, all are equal.

    >>> drawn_seconds("constant", mean=1.0, spread=0.0, shape=(2, 3), seed=0).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
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
    steps = list(timed_steps(read_steps(RunFolder(folder)), untimed_steps=untimed_steps).values())
    if not steps:
        hint = f"name the folder of a run of more than {untimed_steps} steps"
        raise ToolkitError(f"{folder} has no timed step of all ranks in ranks/rank*.jsonl", hint=hint)
    if any(row.own_seconds is None for step in steps for row in step):
        raise ToolkitError(f"the rows in {folder}/ranks have no own_seconds", hint="name a run of this version")
    step_seconds = numpy.array([[row.seconds for row in step] for step in steps])
    own_seconds = numpy.array([[row.own_seconds for row in step] for step in steps])
    rest = (step_seconds - own_seconds)[numpy.arange(len(steps)), own_seconds.argmax(axis=1)]
    seconds: FloatArray = own_seconds + rest[:, None]
    if seconds.min() <= 0:
        raise ToolkitError(f"a step in {folder}/ranks took no time", hint="name another run")
    return seconds


def _communication(options: StragglerOptions) -> tuple[int, Range] | tuple[None, None]:
    if options.model is None:
        names = ("gpu", "gpus_per_node", "network_gb_per_second")
        refuse_given(options, names, "{flag} has no effect: nothing is communicated", "--model, or no {flag}")
        return None, None
    gradient_bytes = GRADIENT_BYTES * read_model(options.model).num_params
    gpu, rate, workers = named_or_visible_gpu(options.gpu), options.network_gb_per_second, options.workers
    assert gpu is not None  # only a GPU given by its memory has none
    interconnect = Interconnect(
        gpu=gpu,
        world_size=workers,
        gpus_per_node=options.gpus_per_node or max(number for number in range(1, 9) if workers % number == 0),
        network_bytes_per_second=None if rate is None else math.ceil(rate * GIGA),
    )
    gradients = Collective(name="all_reduce", purpose="gradients", payload_bytes=gradient_bytes, group_size=workers)
    return gradient_bytes, interconnect.seconds(gradients)


def straggler_report(study: StragglerStudy) -> SimulationReport:
    """Return the study for people: one row per policy, and what waiting for all workers costs."""
    rows, bars = [], []
    for row in (run.as_row() for run in study.policies):
        numbers = {heading: number_cell(factor * row[key], digits) for heading, key, factor, digits in COLUMNS}
        rows.append({"policy": text_cell(row["policy"]), **numbers})
        speed = row["steps_per_second"]
        bars.append((row["policy"], Bar(segments=((speed, "speed"),), text=number(speed, 3))))
    notes = list(NOTES)
    if study.all_reduce_seconds is not None:
        reduced = " to ".join(map(seconds_text, study.all_reduce_seconds))
        notes.append(
            f"Gradients of {gib(study.gradient_bytes)}: an all-reduce takes {reduced}. Policies take the worst rate,"
            " nothing overlaps; no GPU has confirmed it."
        )
    backup = "No number of backup workers would apply more gradients per second than none."
    if study.best_backup_workers:
        workers = counted(study.best_backup_workers, "backup worker")
        backup = f"{workers} would apply most gradients per second, {study.best_backup_gain:.3f} times those without."
    return SimulationReport(
        title="Stragglers and synchronization, simulated",
        summary=f"{study.workers} workers, {study.steps} steps, compute times: {study.step_times}. Waiting for every"
        f" worker takes {study.slowdown:.3f} times the mean compute time: {100 * (1 - 1 / study.slowdown):.1f} % of"
        f" computing and waiting is waiting. {backup}",
        sections=[
            ("", table_of(rows)),
            ("Steps per second", BarChart(bars=tuple(bars))),
        ],
        notes=notes,
    )

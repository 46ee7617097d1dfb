"""`toolkit simulate stragglers`: speed, waste, staleness and losses of policies side by side.

With a model, its gradients are communicated at the worst rates of the interconnect (`toolkit.plan.interconnect`), with
nothing overlapped: synchronous policies all-reduce them in a ring, as `toolkit plan` does. In the others each worker
pushes them to a parameter server and pulls the weights, as slowly as if all workers did at once (Li et al. 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from toolkit.engines.planned import Collective
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GIGA, named_or_visible_gpu
from toolkit.job.argument_values import check_word
from toolkit.models.read_model import read_model
from toolkit.plan.interconnect import CALL_SECONDS, Interconnect, Range
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import percentile, read_steps, timed_steps
from toolkit.report.charts import Bar, BarChart, LineChart, curves
from toolkit.report.rendering import Heading, Table, number_cell, text_cell, text_heading
from toolkit.simulate import options as defaults
from toolkit.simulate import synchronization
from toolkit.simulate.options import LEAST, StragglerOptions, check_ranges, refuse_given
from toolkit.simulate.simulation_report import SimulationReport
from toolkit.simulate.synchronization import Curve, FloatArray, Policy, PolicyRun, SmallProblem, best_backup_workers
from toolkit.units import SECONDS_PER_HOUR, counted, gib, number
from toolkit.units import seconds as seconds_text

MOST_BATCHES = 1_000_000  # workers times steps: about two minutes per policy
PROGRESS_BATCHES = 10_000  # more take seconds, so that each policy is named when it begins
TARGET_MARGIN = 1.05  # losses of one policy vary by this much from one evaluation to the next
GRADIENT_BYTES = 4  # fp32, as DDP reduces those of fp32 master weights
FREE: Range = (0.0, 0.0)
SYNCHRONOUS = Policy(name="synchronous")
NOTES = (
    "A step is a global batch: as many gradients as synchronous training averages.",
    "Wasted GPU-hours are waiting and dropped gradients of all workers, until all steps are applied.",
    "The losses are those of a small classifier, trained in NumPy on the same rows under each policy: an order of "
    "policies, not a prediction for another model.",
    "A worker's gradient alone moves the weights by the learning rate over the gradients of a step.",
)
# Columns of numbers: heading, key of a row in the JSON, factor, and digits.
COLUMNS = (
    ("steps/s", "steps_per_second", 1, 3),
    ("waiting\n%", "waiting_fraction", 100, 1),
    ("dropped\n%", "discarded_fraction", 100, 1),
    ("comm.\n%", "communication_fraction", 100, 1),
    ("wasted\nGPU-h", "wasted_gpu_hours", 1, 3),
    ("stale\nmean", "staleness_mean", 1, 1),
    ("p99", "staleness_p99", 1, 0),
    ("s to\nloss", "seconds_to_target", 1, 1),
    ("last\nloss", "final_loss", 1, 4),
)
NO_BACKUP = "fewer backup workers than workers; `--policy synchronous` has none"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """One policy: its simulated run, and the small network's loss."""

    run: PolicyRun
    curve: Curve
    target_loss: float

    @property
    def final_loss(self) -> float | None:
        """The last loss; None where training diverged, so that the curve ends early."""
        seconds, loss = self.curve[-1]
        return None if seconds < self.run.seconds else loss

    @property
    def seconds_to_target(self) -> float | None:
        """The first time at which the loss is at most the one to reach; None where it never is."""
        return next((seconds for seconds, loss in self.curve if loss <= self.target_loss), None)

    def as_row(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        run, ages = self.run, sorted(self.run.staleness.elements())
        spent = {name: getattr(run, f"{name}_seconds") for name in ("waiting", "discarded", "communication")}
        return {
            "policy": run.policy.label,
            "seconds": run.seconds,
            "steps_per_second": run.steps_per_second,
            "updates_per_second": len(run.updates) / run.seconds,
            **{f"{name}_fraction": seconds / (run.workers * run.seconds) for name, seconds in spent.items()},
            "wasted_gpu_hours": (run.waiting_seconds + run.discarded_seconds) / SECONDS_PER_HOUR,
            "staleness": dict(sorted(run.staleness.items())),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_p99": percentile(ages, 0.99),
            "curve": [{"seconds": seconds, "loss": loss} for seconds, loss in self.curve],
            "diverged": self.final_loss is None,
            "final_loss": self.final_loss,
            "seconds_to_target": self.seconds_to_target,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerStudy:
    """Everything that `toolkit simulate stragglers` reports."""

    workers: int
    steps: int
    seed: int
    learning_rate: float
    step_times: str
    slowdown: float  # a step that waits for all workers over the mean compute time
    best_backup_workers: int  # the number that applies most gradients per second
    best_backup_gain: float
    model: str | None
    gradient_bytes: int
    all_reduce_seconds: Range | None  # at the best and the worst rates; None without a model
    push_pull_seconds: Range | None
    target_loss: float  # within 5 % of the last loss of `target_policy`
    target_policy: str  # synchronous training, or the first policy without it
    policies: tuple[PolicyResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the study as `--json` prints it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"policies": [result.as_row() for result in self.policies]}


def study_stragglers(options: StragglerOptions, *, say: Callable[[str], None]) -> StragglerStudy:
    """Simulate and train under every policy. Raises ToolkitError for options out of range."""
    policies = checked_policies(options)
    seconds, step_times = compute_times(options)
    num_params = synchronization.NUM_PARAMS if options.model is None else read_model(options.model).num_params
    reduce, push_pull = _communication(options, GRADIENT_BYTES * num_params)
    rate = options.learning_rate
    if rate is None:  # it grows with the rows of a global batch, as far as training stays stable
        rate = min(options.workers * synchronization.RATE_PER_WORKER, synchronization.LARGEST_LEARNING_RATE)
    problem, results = SmallProblem(seed=options.seed), []
    for policy in policies:
        if options.workers * options.steps > PROGRESS_BATCHES:
            say(f"simulating and training {policy.label}")
        _, communication = (reduce if policy.is_synchronous else push_pull) or FREE
        run = synchronization.simulate(policy, seconds, steps=options.steps, communication_seconds=communication)
        results.append((run, synchronization.train(run, problem, learning_rate=rate)))
    baseline, curve = next((result for result in results if result[0].policy == SYNCHRONOUS), results[0])
    target = TARGET_MARGIN * curve[-1][1]
    backup, gain = best_backup_workers(seconds, steps=options.steps, communication_seconds=(reduce or FREE)[1])
    everyone = synchronization.simulate(SYNCHRONOUS, seconds, steps=options.steps)
    return StragglerStudy(
        workers=options.workers,
        steps=options.steps,
        seed=options.seed,
        learning_rate=rate,
        step_times=step_times,
        slowdown=everyone.seconds / options.steps / float(seconds[:, : options.steps].mean()),
        best_backup_workers=backup,
        best_backup_gain=gain,
        model=options.model,
        gradient_bytes=GRADIENT_BYTES * num_params,
        all_reduce_seconds=reduce,
        push_pull_seconds=push_pull,
        target_loss=target,
        target_policy=baseline.policy.label,
        policies=tuple(PolicyResult(run=run, curve=curve, target_loss=target) for run, curve in results),
    )


def checked_policies(options: StragglerOptions) -> list[Policy]:
    """Return the named policies, or all. Raises ToolkitError for an unknown one, and for options out of range."""
    names = tuple(dict.fromkeys(options.policy or defaults.POLICIES))
    for name in names:
        check_word("--policy", name, defaults.POLICIES)
    ranges: dict[str, tuple[float, float]] = {
        **{"workers": (2, 100_000), "steps": (1, MOST_BATCHES), "seed": (0, 2**32 - 1), "slow_factor": (1, 1000)},
        **{"slow_workers": (0, options.workers), "learning_rate": (1e-12, 10**6), "untimed_steps": (0, MOST_BATCHES)},
        **{"network_gb_per_second": (1e-6, 10**6), "gpus_per_node": (1, 100_000), "parameter_servers": (1, 100_000)},
        **{"step_seconds": (LEAST, 10**6), "spread": (0, 1 if options.distribution == "exponential" else 10)},
        **({"staleness": (0, MOST_BATCHES)} if "bounded_staleness" in names else {}),
    }
    check_ranges(options, ranges)
    if "backup_workers" in names:
        check_ranges(options, {"backup_workers": (1, options.workers - 1)}, hint=NO_BACKUP)
    if options.workers * options.steps > MOST_BATCHES:
        what = f"{options.workers} workers times {options.steps} steps are more than {MOST_BATCHES:,} batches"
        raise ToolkitError(what, hint=f"--steps {MOST_BATCHES // options.workers}")
    numbers = {"backup_workers": options.backup_workers, "bounded_staleness": options.staleness}
    return [Policy(name=name, number=numbers.get(name, 0)) for name in names]


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


def _communication(options: StragglerOptions, gradient_bytes: int) -> tuple[Range, Range] | tuple[None, None]:
    """Seconds of an all-reduce, and of a push and pull."""
    if options.model is None:
        names = ("gpu", "gpus_per_node", "network_gb_per_second", "parameter_servers")
        refuse_given(options, names, "{flag} has no effect: nothing is communicated", "--model, or no {flag}")
        return None, None
    gpu, rate, workers = named_or_visible_gpu(options.gpu), options.network_gb_per_second, options.workers
    assert gpu is not None  # only a GPU given by its memory has none
    interconnect = Interconnect(
        gpu=gpu,
        world_size=workers,
        gpus_per_node=options.gpus_per_node or max(number for number in range(1, 9) if workers % number == 0),
        network_bytes_per_second=None if rate is None else math.ceil(rate * GIGA),
    )
    gradients = Collective(name="all_reduce", purpose="gradients", payload_bytes=gradient_bytes, group_size=workers)
    return interconnect.seconds(gradients), push_pull_seconds(interconnect, gradient_bytes, options.parameter_servers)


def push_pull_seconds(interconnect: Interconnect, gradient_bytes: int, servers: int | None = None) -> Range:
    """Return the seconds in which all workers push their gradients and pull the weights; by default a server per node.

    The slower of a worker's share of its node's network, and the network of a server, which shares no node.
    """
    local = min(interconnect.gpus_per_node, interconnect.world_size)
    through_server = interconnect.world_size * gradient_bytes // (servers or interconnect.num_nodes)
    slow, _, fast = (max(local * gradient_bytes, through_server) / rate for rate in interconnect.network_rate)
    (best, worst), (first, last) = CALL_SECONDS, interconnect.hop_seconds(between_nodes=True)
    return 2 * (fast + best + first), 2 * (slow + worst + last)


def straggler_report(study: StragglerStudy) -> SimulationReport:
    """Return the study for people: one row per policy, and what waiting for all workers costs."""
    rows, bars = [], []
    for row in (result.as_row() for result in study.policies):
        cells = [number_cell(row[key] and factor * row[key], digits) for _, key, factor, digits in COLUMNS]
        if row["diverged"]:
            cells[-1] = text_cell("diverged")
        rows.append((text_cell(row["policy"]), *cells))
        speed = row["steps_per_second"]
        bars.append((row["policy"], Bar(segments=((speed, "speed"),), text=number(speed, 3))))
    headings = (text_heading("policy"), *(Heading(text=text) for text, *_ in COLUMNS))
    notes = [*NOTES, f"The loss to reach is {study.target_loss:.4f}, 5 % above the last of {study.target_policy}."]
    if study.all_reduce_seconds is not None and study.push_pull_seconds is not None:
        ranges = (study.all_reduce_seconds, study.push_pull_seconds)
        reduced, pushed = (" to ".join(map(seconds_text, ends)) for ends in ranges)
        notes.append(
            f"Gradients of {gib(study.gradient_bytes)}: an all-reduce takes {reduced}, a push and pull through"
            f" parameter servers {pushed}. Policies take the worst rates, nothing overlaps; no GPU has confirmed them."
        )
    last = max(result.curve[-1][0] for result in study.policies)
    losses = LineChart(
        lines=curves((result.run.policy.label, result.curve) for result in study.policies),
        x_labels=[(0.0, "0"), (last, f"{last:,.0f}")],
        x_name="seconds",
        title="loss by time",
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
            ("", Table(headings=headings, rows=tuple(rows))),
            ("Steps per second", BarChart(bars=tuple(bars))),
            ("Loss by time", losses),
        ],
        notes=notes,
    )

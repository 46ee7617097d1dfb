"""Policies side by side: from the options of `toolkit simulate stragglers` to speed, waste, staleness and losses.

With a model, its gradients are communicated at the worst rates of the interconnect (`toolkit.plan.interconnect`), with
nothing overlapped: synchronous policies all-reduce them in a ring, as `toolkit plan` does. In the others each worker
pushes them to a parameter server and pulls the weights, as slowly as if all workers did at once (Li et al. 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.hardware.gpu_table import GIGA, named_or_visible_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.interconnect import CALL_SECONDS, Collective, Interconnect, Range
from toolkit.record.measurements import percentile
from toolkit.simulate.options import POLICIES, StragglerOptions
from toolkit.simulate.small_training import NUM_PARAMS, Curve, SmallProblem, default_learning_rate, train
from toolkit.simulate.step_time_distributions import compute_times
from toolkit.simulate.synchronization import Policy, PolicyRun, best_backup_workers, simulate
from toolkit.units import SECONDS_PER_HOUR

MOST_BATCHES = 1_000_000
"""Workers times steps: about two minutes per policy."""
PROGRESS_BATCHES = 10_000
"""More take seconds, so that each policy is named when it begins."""
# Losses of one policy vary by this much from one evaluation to the next.
TARGET_MARGIN = 1.05
GRADIENT_BYTES = 4  # fp32, as DDP reduces those of fp32 master weights
FREE: Range = (0.0, 0.0)
SYNCHRONOUS = Policy(name="synchronous")
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
        return {
            "policy": run.policy.label,
            "seconds": run.seconds,
            "steps_per_second": run.steps_per_second,
            "updates_per_second": len(run.updates) / run.seconds,
            "waiting_fraction": run.waiting_fraction,
            "discarded_fraction": run.discarded_seconds / (run.workers * run.seconds),
            "communication_fraction": run.communication_seconds / (run.workers * run.seconds),
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
    slowdown: float
    """A step that waits for all workers over the mean compute time."""
    best_backup_workers: int
    """The number that applies most gradients per second."""
    best_backup_gain: float
    """Gradients per second over those without backup workers."""
    model: str | None
    gradient_bytes: int
    all_reduce_seconds: Range | None
    """At the best and the worst rates; None without a model."""
    push_pull_seconds: Range | None
    target_loss: float
    """Within 5 % of the last loss of `target_policy`."""
    target_policy: str
    """Synchronous training, or the first policy without it."""
    policies: tuple[PolicyResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the study as `--json` prints it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"policies": [result.as_row() for result in self.policies]}


def study_stragglers(options: StragglerOptions, *, say: Callable[[str], None]) -> StragglerStudy:
    """Simulate and train under every policy. Raises ToolkitError for options out of range."""
    check_ranges(options)
    policies = chosen_policies(options)
    seconds, step_times = compute_times(options)
    num_params = NUM_PARAMS if options.model is None else read_model(options.model).num_params
    reduce, push_pull = _communication(options, GRADIENT_BYTES * num_params)
    rate = default_learning_rate(options.workers) if options.learning_rate is None else options.learning_rate
    problem, results = SmallProblem(seed=options.seed), []
    for policy in policies:
        if options.workers * options.steps > PROGRESS_BATCHES:
            say(f"simulating and training {policy.label}")
        _, communication = (reduce if policy.is_synchronous else push_pull) or FREE
        run = simulate(policy, seconds, steps=options.steps, communication_seconds=communication)
        results.append((run, train(run, problem, learning_rate=rate)))
    baseline, curve = next((result for result in results if result[0].policy == SYNCHRONOUS), results[0])
    target = TARGET_MARGIN * curve[-1][1]
    backup, gain = best_backup_workers(seconds, steps=options.steps, communication_seconds=(reduce or FREE)[1])
    everyone = simulate(SYNCHRONOUS, seconds, steps=options.steps)
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


def check_ranges(options: StragglerOptions) -> None:
    """Raise ToolkitError for the first number that is out of range, by its flag."""
    ranges: dict[str, tuple[float, float]] = {
        "workers": (2, 100_000),
        "steps": (1, MOST_BATCHES),
        "seed": (0, 2**32 - 1),
        "slow_workers": (0, options.workers),
        "slow_factor": (1, 1000),
        "learning_rate": (1e-12, 10**6),
        "network_gb_per_second": (1e-6, 10**6),
        "untimed_steps": (0, MOST_BATCHES),
        "gpus_per_node": (1, 100_000),
        "parameter_servers": (1, 100_000),
    }
    for name, (low, high) in ranges.items():
        _check_range(name, getattr(options, name), low, high)
    if options.workers * options.steps > MOST_BATCHES:
        raise ToolkitError(
            f"{options.workers} workers times {options.steps} steps are more than {MOST_BATCHES:,} batches",
            hint=f"--steps {MOST_BATCHES // options.workers}",
        )


def _check_range(name: str, value: float | None, low: float, high: float, hint: str | None = None) -> None:
    if value is not None and not low <= value <= high:
        flag = f"--{name.replace('_', '-')}"
        raise ToolkitError(f"{flag} is {value}, expected {low:,} to {high:,}", hint=hint)


def chosen_policies(options: StragglerOptions) -> list[Policy]:
    """Return the named policies, or all. Raises ToolkitError for an unknown one, and for its number out of range."""
    names = tuple(dict.fromkeys(options.policy or POLICIES))
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ToolkitError(f"unknown policy {name!r}; known: {known}", hint=did_you_mean(name, POLICIES))
    if "backup_workers" in names:
        _check_range("backup_workers", options.backup_workers, 1, options.workers - 1, NO_BACKUP)
    if "bounded_staleness" in names:
        _check_range("staleness", options.staleness, 0, MOST_BATCHES)
    numbers = {"backup_workers": options.backup_workers, "bounded_staleness": options.staleness}
    return [Policy(name=name, number=numbers.get(name, 0)) for name in names]


def _communication(options: StragglerOptions, gradient_bytes: int) -> tuple[Range, Range] | tuple[None, None]:
    """Seconds of an all-reduce, and of a push and pull; None without a model, and flags without effect are refused."""
    if options.model is None:
        for flag in ("gpu", "gpus_per_node", "network_gb_per_second", "parameter_servers"):
            if getattr(options, flag) is not None:
                name = f"--{flag.replace('_', '-')}"
                raise ToolkitError(f"{name} has no effect: nothing is communicated", hint=f"--model, or no {name}")
        return None, None
    gpu, rate, workers = named_or_visible_gpu(options.gpu), options.network_gb_per_second, options.workers
    assert gpu is not None  # only a GPU given by its memory has none
    interconnect = Interconnect(
        gpu=gpu,
        world_size=workers,
        gpus_per_node=options.gpus_per_node or max(number for number in range(1, 9) if workers % number == 0),
        network_bytes_per_second=None if rate is None else math.ceil(rate * GIGA),
    )
    gradients = Collective(
        name="all_reduce", purpose="gradients", payload_bytes=gradient_bytes, group_size=interconnect.world_size
    )
    return interconnect.seconds(gradients), push_pull_seconds(interconnect, gradient_bytes, options.parameter_servers)


def push_pull_seconds(interconnect: Interconnect, gradient_bytes: int, servers: int | None = None) -> Range:
    """Return the seconds in which all workers push their gradients and pull the weights; by default a server per node.

    The slower of a worker's share of its node's network, and the network of a server, which shares no node.
    """
    local = min(interconnect.gpus_per_node, interconnect.world_size)
    through_server = interconnect.world_size * gradient_bytes // (servers or interconnect.num_nodes)
    slow, fast = (max(local * gradient_bytes, through_server) / rate for rate in interconnect.network_rate)
    (best, worst), (first, last) = CALL_SECONDS, interconnect.hop_seconds(between_nodes=True)
    return 2 * (fast + best + first), 2 * (slow + worst + last)

"""Policies, reductions and compressions side by side: from the options of `toolkit simulate stragglers` to results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.hardware.gpu_table import GIGA, named_or_visible_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.interconnect import Interconnect, Range
from toolkit.record.measurements import percentile
from toolkit.simulate.allreduce_algorithms import PARAMETER_SERVER, ReductionTime, reduction_times
from toolkit.simulate.compressed_training import train_compressed
from toolkit.simulate.gradient_compression import Compression, Shape, parse_compression
from toolkit.simulate.small_training import (
    BATCH_ROWS,
    LARGEST_LEARNING_RATE,
    LEARNING_RATE_PER_ROW,
    LossPoint,
    SmallProblem,
    layer_shapes,
    seconds_to_loss,
    train,
)
from toolkit.simulate.step_time_distributions import (
    ComputeTimes,
    SlowWorkers,
    StepTimes,
    measured_step_times,
    slowed,
)
from toolkit.simulate.straggler_options import (
    DEFAULT_DISTRIBUTION,
    DEFAULT_SPREAD,
    DEFAULT_STEP_SECONDS,
    StragglerOptions,
)
from toolkit.simulate.synchronization import POLICIES, Policy, PolicyRun, best_backup_workers, simulate

if TYPE_CHECKING:
    from toolkit.simulate.step_time_distributions import FloatArray

MOST_BATCHES = 1_000_000
"""Workers times steps: about two minutes per policy."""
PROGRESS_BATCHES = 10_000
"""More take seconds, so that each part of the work is named when it begins."""
# Losses of one policy vary by this much from one evaluation to the next.
TARGET_MARGIN = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """One policy: its speed, what it wastes, how stale its gradients are, and the small network's loss."""

    policy: str
    seconds: float
    """Until all global batches were applied."""
    steps_per_second: float
    updates_per_second: float
    waiting_fraction: float
    discarded_fraction: float
    communication_fraction: float
    wasted_gpu_hours: float
    staleness: dict[int, int]
    """Updates between reading the weights and applying the gradient -> number of gradients."""
    curve: tuple[LossPoint, ...]
    diverged: bool
    seconds_to_target: float | None = None

    @property
    def staleness_mean(self) -> float:
        """Mean over all gradients."""
        return sum(updates * count for updates, count in self.staleness.items()) / sum(self.staleness.values())

    @property
    def staleness_p99(self) -> int:
        """The 99th percentile over all gradients."""
        return int(percentile(sorted(Counter(self.staleness).elements()), 0.99) or 0)

    @property
    def final_loss(self) -> float | None:
        """The last loss; None where training diverged."""
        return None if self.diverged else self.curve[-1].loss


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionResult:
    """One compression: its bytes, its time, and the small network's loss after as many steps as the others."""

    compression: str
    collective: str
    payload_bytes: int
    """Of one worker and step."""
    sent_bytes: int
    """By one worker, in a ring."""
    compressed_fraction: float
    """Payload over that of the uncompressed gradient."""
    communication_seconds: Range | None
    step_seconds: float
    """Synchronous step: the slowest worker's computation and the collective at the worst rates."""
    curve: tuple[LossPoint, ...]
    diverged: bool

    @property
    def final_loss(self) -> float | None:
        """The last loss; None where training diverged."""
        return None if self.diverged else self.curve[-1].loss


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
    target_loss: float
    """Within 5 % of the last loss of `target_policy`."""
    target_policy: str
    """Synchronous training, or the first policy without it."""
    policies: tuple[PolicyResult, ...]
    reductions: tuple[ReductionTime, ...]
    """Empty without a model."""
    compressions: tuple[CompressionResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the study as `--json` prints it."""
        values = asdict(self)
        values["policies"] = [
            asdict(result) | {name: getattr(result, name) for name in ("staleness_mean", "staleness_p99", "final_loss")}
            for result in self.policies
        ]
        values["compressions"] = [asdict(result) | {"final_loss": result.final_loss} for result in self.compressions]
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """Checked options."""

    workers: int
    steps: int
    seed: int
    policies: tuple[Policy, ...]
    compressions: tuple[Compression, ...]
    times: ComputeTimes
    slow: SlowWorkers
    learning_rate: float
    model: str | None
    shapes: tuple[Shape, ...]
    interconnect: Interconnect | None
    """None without a model: nothing is communicated."""
    parameter_servers: int


def study_stragglers(options: StragglerOptions, *, say: Callable[[str], None]) -> StragglerStudy:
    """Simulate and train under every policy and compression. Raises ToolkitError for options out of range."""
    setting = checked(options)
    seconds = slowed(
        setting.times.draw(seed=setting.seed, workers=setting.workers, steps=2 * setting.steps), setting.slow
    )
    uncompressed = Compression(name="none").payload_bytes(setting.shapes)
    reductions = _reductions(setting, uncompressed)
    problem, everyone = SmallProblem(seed=setting.seed), simulate(POLICY_OF_ALL, seconds, steps=setting.steps)
    policies = [_policy(policy, seconds, reductions, problem, setting, say) for policy in setting.policies]
    baseline = next((result for result in policies if result.policy == POLICY_OF_ALL.name), policies[0])
    backup, gain = best_backup_workers(
        seconds, steps=setting.steps, communication_seconds=communication_seconds(POLICY_OF_ALL, reductions)
    )
    target = TARGET_MARGIN * baseline.curve[-1].loss
    return StragglerStudy(
        workers=setting.workers,
        steps=setting.steps,
        seed=setting.seed,
        learning_rate=setting.learning_rate,
        step_times=_summary(setting),
        slowdown=everyone.seconds / setting.steps / float(seconds[:, : setting.steps].mean()),
        best_backup_workers=backup,
        best_backup_gain=gain,
        model=setting.model,
        gradient_bytes=uncompressed,
        target_loss=target,
        target_policy=baseline.policy,
        policies=tuple(_with_target(result, target) for result in policies),
        reductions=reductions,
        compressions=tuple(
            _compression(compression, everyone.seconds / setting.steps, uncompressed, problem, setting, say)
            for compression in setting.compressions
        ),
    )


POLICY_OF_ALL = Policy(name="synchronous")
NO_BACKUP = "fewer backup workers than workers; `--policy synchronous` has none"


def _summary(setting: _Setting) -> str:
    slow = setting.slow
    return setting.times.summary + (f"; {slow.count} slower by {slow.factor:g}" if slow.count else "")


def _policy(
    policy: Policy,
    seconds: FloatArray,
    reductions: Sequence[ReductionTime],
    problem: SmallProblem,
    setting: _Setting,
    say: Callable[[str], None],
) -> PolicyResult:
    communication = communication_seconds(policy, reductions)
    if setting.workers * setting.steps > PROGRESS_BATCHES:
        say(f"simulating and training {policy.label}")
    timeline = simulate(policy, seconds, steps=setting.steps, communication_seconds=communication)
    curve = train(timeline, problem, learning_rate=setting.learning_rate)
    return _policy_result(timeline, curve)


def _policy_result(timeline: PolicyRun, curve: tuple[LossPoint, ...]) -> PolicyResult:
    return PolicyResult(
        policy=timeline.policy.label,
        seconds=timeline.seconds,
        steps_per_second=timeline.steps_per_second,
        updates_per_second=len(timeline.updates) / timeline.seconds,
        waiting_fraction=timeline.waiting_fraction,
        discarded_fraction=timeline.discarded_fraction,
        communication_fraction=timeline.communication_seconds / (timeline.workers * timeline.seconds),
        wasted_gpu_hours=timeline.wasted_gpu_hours,
        staleness=dict(sorted(timeline.staleness.items())),
        curve=curve,
        diverged=curve[-1].seconds < timeline.seconds,
    )


def _with_target(result: PolicyResult, target: float) -> PolicyResult:
    return replace(result, seconds_to_target=seconds_to_loss(result.curve, target))


def communication_seconds(policy: Policy, reductions: Sequence[ReductionTime]) -> float:
    """Return the seconds that a policy adds to a batch, at the worst rates, nothing overlapped; 0 without a model.

    Synchronous policies take the fastest all-reduce. In the others each worker pushes and pulls as slowly as if all
    workers did at once.
    """
    wanted = [time for time in reductions if (time.algorithm == PARAMETER_SERVER) != policy.is_synchronous]
    return min((time.seconds[1] for time in wanted), default=0.0)


def _compression(
    compression: Compression,
    compute_seconds: float,
    uncompressed: int,
    problem: SmallProblem,
    setting: _Setting,
    say: Callable[[str], None],
) -> CompressionResult:
    if setting.workers * setting.steps > PROGRESS_BATCHES:
        say(f"training with {compression.label}")
    collective = compression.collective(setting.shapes, workers=setting.workers)
    communication = None if setting.interconnect is None else setting.interconnect.seconds(collective)
    step_seconds = compute_seconds + (communication[1] if communication else 0.0)
    payload = compression.payload_bytes(setting.shapes)
    curve = train_compressed(
        compression,
        problem,
        workers=setting.workers,
        steps=setting.steps,
        learning_rate=setting.learning_rate,
        step_seconds=step_seconds,
    )
    return CompressionResult(
        compression=compression.label,
        collective=collective.name,
        payload_bytes=payload,
        sent_bytes=collective.sent_bytes,
        compressed_fraction=payload / uncompressed,
        communication_seconds=communication,
        step_seconds=step_seconds,
        curve=curve,
        diverged=curve[-1].seconds < setting.steps * step_seconds,
    )


def _reductions(setting: _Setting, gradient_bytes: int) -> tuple[ReductionTime, ...]:
    if setting.interconnect is None:
        return ()
    return reduction_times(gradient_bytes, setting.interconnect, parameter_servers=setting.parameter_servers)


def checked(options: StragglerOptions) -> _Setting:
    """Return the options as values. Raises ToolkitError for the first that is out of range, by its flag."""
    _check_range("--workers", options.workers, 2, 100_000)
    _check_range("--steps", options.steps, 1, MOST_BATCHES)
    if options.workers * options.steps > MOST_BATCHES:
        raise ToolkitError(
            f"{options.workers} workers times {options.steps} steps are more than {MOST_BATCHES:,} batches",
            hint=f"--steps {MOST_BATCHES // options.workers}",
        )
    _check_range("--seed", options.seed, 0, 2**32 - 1)
    _check_range("--slow-workers", options.slow_workers, 0, options.workers)
    interconnect = _interconnect(options)
    return _Setting(
        workers=options.workers,
        steps=options.steps,
        seed=options.seed,
        policies=tuple(_policies(options)),
        compressions=tuple(map(parse_compression, dict.fromkeys(options.compression))),
        times=_times(options),
        slow=SlowWorkers(count=options.slow_workers, factor=options.slow_factor),
        learning_rate=_learning_rate(options),
        model=options.model,
        shapes=_shapes(options.model),
        interconnect=interconnect,
        parameter_servers=_parameter_servers(options, interconnect),
    )


def _check_range(flag: str, value: int, low: int, high: int, hint: str | None = None) -> None:
    if not low <= value <= high:
        raise ToolkitError(f"{flag} is {value}, expected {low:,} to {high:,}", hint=hint)


def _policies(options: StragglerOptions) -> list[Policy]:
    names = list(dict.fromkeys(options.policy)) or list(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise ToolkitError(
                f"unknown policy {name!r}; known: {', '.join(POLICIES)}", hint=did_you_mean(name, POLICIES)
            )
    if "backup_workers" in names:
        _check_range("--backup-workers", options.backup_workers, 1, options.workers - 1, NO_BACKUP)
    if "bounded_staleness" in names:
        _check_range("--staleness", options.staleness, 0, MOST_BATCHES)
    return [
        Policy(
            name=name,
            backup_workers=options.backup_workers if name == "backup_workers" else 0,
            staleness=options.staleness if name == "bounded_staleness" else None,
        )
        for name in names
    ]


def _times(options: StragglerOptions) -> ComputeTimes:
    drawn = {"--distribution": options.distribution, "--step-seconds": options.step_seconds, "--spread": options.spread}
    if options.run_folder is None:
        return StepTimes(
            distribution=options.distribution or DEFAULT_DISTRIBUTION,
            step_seconds=DEFAULT_STEP_SECONDS if options.step_seconds is None else options.step_seconds,
            spread=DEFAULT_SPREAD if options.spread is None else options.spread,
        )
    given = [flag for flag, value in drawn.items() if value is not None]
    if given:
        raise ToolkitError(f"--run-folder and {given[0]} both say how long a step takes", hint=f"leave out {given[0]}")
    _check_range("--untimed-steps", options.untimed_steps, 0, MOST_BATCHES)
    return measured_step_times(options.run_folder, untimed_steps=options.untimed_steps)


def _learning_rate(options: StragglerOptions) -> float:
    rate = options.learning_rate
    if rate is None:
        return min(LEARNING_RATE_PER_ROW * BATCH_ROWS * options.workers, LARGEST_LEARNING_RATE)
    if not 0 < rate <= 1e6:
        raise ToolkitError(f"--learning-rate is {rate}, expected a number above 0")
    return rate


def _shapes(model: str | None) -> tuple[Shape, ...]:
    if model is None:
        return layer_shapes()
    shape = read_model(model)
    return tuple(tensor.shape for layer in (*shape.layers, shape.outer) for tensor in layer)


def _interconnect(options: StragglerOptions) -> Interconnect | None:
    """None without a model; a flag that would then have no effect is refused."""
    if options.model is None:
        for flag in ("gpu", "gpus_per_node", "network_gb_per_second", "parameter_servers"):
            if getattr(options, flag) is not None:
                name = f"--{flag.replace('_', '-')}"
                raise ToolkitError(f"{name} has no effect: nothing is communicated", hint=f"--model, or no {name}")
        return None
    rate = options.network_gb_per_second
    if rate is not None and not 0 < rate < 10**6:
        raise ToolkitError(f"--network-gb-per-second is {rate}, expected more than 0 and below a million")
    gpu = named_or_visible_gpu(options.gpu)
    assert gpu is not None  # only a GPU given by its memory has none
    divisor = max(number for number in range(1, 9) if options.workers % number == 0)
    return Interconnect(
        gpu=gpu,
        world_size=options.workers,
        gpus_per_node=divisor if options.gpus_per_node is None else options.gpus_per_node,
        network_bytes_per_second=None if rate is None else math.ceil(rate * GIGA),
    )


def _parameter_servers(options: StragglerOptions, interconnect: Interconnect | None) -> int:
    if options.parameter_servers is not None:
        return options.parameter_servers
    return 1 if interconnect is None else interconnect.num_nodes

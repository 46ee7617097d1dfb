"""A recommendation as people and programs read it, and its scaling curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.hardware.gpu_table import GIGA
from toolkit.plan.candidates import LARGEST_WORLD_SIZE, Candidate, RecommendRequest, host_assumption
from toolkit.plan.failures import FailingJob
from toolkit.plan.finish import ANY_GPU, EXPECT, Work, finish_of
from toolkit.plan.interconnect import Range
from toolkit.plan.planned_job import TrainingSetup
from toolkit.plan.recommend import Recommendation
from toolkit.plan.recommended_commands import COMPARED_STEPS, broken, compare_command, train_command
from toolkit.plan.step_time import ALIKE_DIGITS, NO_GENERATION, StepTime
from toolkit.units import SECONDS_PER_HOUR, dollars, gib, percent, seconds, tenths_of_gib

SHOWN, COMPARED = 3, 2  # alternatives and rejected presets that are shown without `--all`; alternatives to measure
# Llama 3's training had 419 unexpected interruptions in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783,
# table 5): one per 50,700 GPU-hours.
GPU_HOURS_TO_FAILURE = 54 * 24 * 16_384 / 419


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One world size of a weak-scaling curve, on which the micro-batch stays and the global batch grows."""

    world_size: int
    tokens_per_second: Range
    scaling_efficiency: Range
    """Tokens per second and GPU over those of the smallest world size, at the same end of the range."""
    failure_loss: float
    """Share of the time lost to failures, at the best interval between checkpoints."""


def scaling_curve(candidate: Candidate, request: RecommendRequest) -> list[ScalingPoint]:
    """Return the curve from the request's GPUs, doubled up to 1,024; empty if the GPU's peak is unknown."""
    points: list[ScalingPoint] = []
    smallest: Range | None = None
    size, preset, per_node = request.world_size, candidate.preset, request.job.gpus_per_node
    while size <= max(request.world_size, min(LARGEST_WORLD_SIZE, preset.max_world_size or LARGEST_WORLD_SIZE)):
        if size <= per_node or size % per_node == 0:
            shape = candidate.job.method.model(request.shape)
            setup = TrainingSetup(shape=shape, preset=preset, world_size=size, job=candidate.job)
            speed = request.step_time(setup)
            if speed is None:
                return []
            low, high = speed.tokens_per_second_per_gpu
            smallest = smallest or (low, high)
            points.append(
                ScalingPoint(
                    world_size=size,
                    tokens_per_second=(low * size, high * size),
                    scaling_efficiency=(low / smallest[0], high / smallest[1]),
                    failure_loss=failure_loss(size),
                )
            )
        size *= 2
    return points


def failure_loss(world_size: int) -> float:
    """Return the share of the time spent on saving, on repeated work and on restarts, at Young's interval."""
    failures = 1000 * 24 / GPU_HOURS_TO_FAILURE  # a GPU stands for a node: only their product with the rate counts
    costs = FailingJob(
        nodes=world_size, failures_per_1000_node_days=failures, checkpoint_seconds=60.0, restart_seconds=600.0
    )
    return round(1 - costs.exact_time_ratio, ALIKE_DIGITS)


def dollars_per_million_tokens(price_per_gpu_hour: float | None, speed: StepTime | None) -> Range | None:
    """Return the price at the fast and at the slow end; None without a price or a speed."""
    if price_per_gpu_hour is None or speed is None:
        return None
    slow, fast = speed.tokens_per_second_per_gpu
    return price_per_gpu_hour / (fast * SECONDS_PER_HOUR) * 1e6, price_per_gpu_hour / (slow * SECONDS_PER_HOUR) * 1e6


def recommendation_json(
    recommendation: Recommendation,
    request: RecommendRequest,
    *,
    model: str,
    objective: str,
    price: float | None,
    work: Work | None = None,
) -> dict[str, Any]:
    """Return the recommendation as `toolkit recommend --json` prints it; `price` is in dollars per GPU-hour."""
    choice, others, why_not = recommendation.choice, recommendation.others, recommendation.why_not

    def row(candidate: Candidate) -> dict[str, Any]:
        return _row(candidate, request, price, work)

    return {
        "model": model,
        "num_params": request.shape.num_params,
        "gpu": request.gpu.name,
        "world_size": request.world_size,
        "objective": objective,
        "choice": row(choice),
        "reasons": list(recommendation.reasons),
        "others": [row(other) | {"why_not": why_not[other.preset.name]} for other in others],
        "why_not": why_not,
        "instead": list(recommendation.instead),
        "rule_of_thumb": recommendation.rule_of_thumb,
        "scaling": [asdict(point) for point in scaling_curve(choice, request)],
        "command": train_command(choice, request, model),
        "compare_command": compare_command([choice, *others[:COMPARED]], request, model),
    }


def _row(
    candidate: Candidate, request: RecommendRequest, price: float | None, work: Work | None = None
) -> dict[str, Any]:
    speed = candidate.speed
    return {
        **candidate.as_row(),
        "degrees": candidate.job.degrees,
        "global_batch_size": request.global_batch_size,
        **{name: getattr(speed, name, None) for name in ("communication_bytes_per_step", "communication_seconds")},
        "dollars_per_million_tokens": dollars_per_million_tokens(price, speed),
        "finish": None if work is None else asdict(finish_of(candidate, work, prices_of(price))),
    }


def prices_of(price: float | None) -> dict[str, float]:
    """Return the one price of a recommendation as the prices of `toolkit plan`."""
    return {} if price is None else {ANY_GPU: price}


def recommendation_lines(
    recommendation: Recommendation,
    request: RecommendRequest,
    *,
    model: str,
    price: float | None = None,
    work: Work | None = None,
    scaling: bool = False,
    show_all: bool = False,
) -> list[str]:
    """Return the recommendation as lines of text that are legible without colour."""
    choice, others, why_not = recommendation.choice, recommendation.others, recommendation.why_not
    equal = ", all of equal length" if request.job.lengths_differ is False else ""
    host = f"; needs {tenths_of_gib(choice.memory.host.peak_bytes)} GiB of host memory per node"
    lines = [
        f"{model}: {request.shape.num_params:,} parameters, {request.job.method_text}, "
        f"{request.job.tokens_per_row:,} tokens per sequence{equal}, {request.global_batch_size} sequences per step, "
        f"on {request.world_size} x {request.gpu.name}",
        "",
        f"use       {choice.preset.name}: {choice.settings}{host if choice.preset.offloads else ''}",
        *(f"because   {reason}" for reason in recommendation.reasons),
        *_facts(choice, request, price, work),
        *(f"instead   {way}" for way in recommendation.instead),
    ]
    if recommendation.instead and not request.job.is_lora:
        lines.append("instead   bf16 weights without fp32 master weights, as other tools train, are not planned")
    shown = None if show_all else SHOWN
    fitting = [other.preset.name for other in others]
    rejected = [name for name in why_not if name not in fitting] if show_all else list(recommendation.too_large)
    lines += ["", *(f"or        {name}: {why_not[name]}" for name in fitting[:shown])]
    lines += [f"rejected  {name}: {why_not[name]}" for name in rejected[:shown]]
    hidden = 0 if show_all else len(why_not) - len(fitting[:SHOWN]) - len(rejected[:SHOWN])
    lines += [f"{hidden} more with `--all`"] if hidden else []
    lines += ["", *_scaling_lines(scaling_curve(choice, request))] if scaling else []
    trainer = request.job.method.spec.trainer
    lines += [
        "",
        "run it:" if trainer is None else f"run it, with a script of yours: TRL has none, but {trainer}:",
        broken(train_command(choice, request, model)),
        "",
    ]
    compare = compare_command([choice, *others[:COMPARED]], request, model)
    if compare is None:
        measures = f"a run with `--max_steps {COMPARED_STEPS}` measures"
        if request.interconnect.num_nodes > 1:
            measures = "`toolkit compare` measures on one node"
        return [*lines, f"No figure above is measured; {measures}."]
    return [*lines, "No figure above is measured; this measures:", broken(compare)]


def _facts(choice: Candidate, request: RecommendRequest, price: float | None, work: Work | None) -> list[str]:
    memory, speed = choice.memory, choice.speed
    disk = f", {gib(memory.host.disk_bytes)} on its disk" if memory.host.disk_bytes else ""
    host = f"{tenths_of_gib(memory.host.peak_bytes)} GiB of host memory per node{disk}"
    lines = [f"memory    {choice.peak_text} per GPU; {host}"]
    if choice.preset.offloads and request.host_memory_bytes is None:
        lines.append(f"host      {host_assumption(request)}")
    if speed is None:
        return [*lines, "speed     n/a: the GPU's peak is not known (`--gpu-tflops`)"]
    low, high = speed.tokens_per_second_per_gpu
    wider = f"; the range is wide because of {' and '.join(speed.wider_for)}" if speed.wider_for else ""
    without = f"; without {NO_GENERATION}" if speed.without_generation else ""
    lines.append(
        f"speed     {low:,.0f} to {high:,.0f} tokens/s per GPU (expect the lower end), "
        f"{seconds(speed.step_seconds[0])} to {seconds(speed.step_seconds[1])} per step, "
        f"MFU {percent(speed.mfu[0])} to {percent(speed.mfu[1])}{wider}{without}"
    )
    if speed.communication_bytes_per_step:
        fast, slow = speed.communication_seconds
        sent = f"{speed.communication_bytes_per_step / GIGA:,.1f} GB sent per step and GPU"
        lines.append(f"network   {sent}: {seconds(fast)} to {seconds(slow)} without overlap")
    if speed.offload_efficiency is not None:
        worst, best = speed.offload_efficiency
        shares = f"{percent(worst)} to {percent(best)} of the time to the GPU"
        lines.append(f"offload   leaves {shares}, without overlap")
    if work is not None:
        finish = finish_of(choice, work, prices_of(price))
        least = "at least " if speed.without_generation else ""
        lines.append(f"time      {least}{finish.time_text} ({EXPECT}): {finish.steps:,} steps for {work.text}")
        lines += [f"cost      {least}{finish.cost_text} ({EXPECT})"] if price is not None else []
    per_million = dollars_per_million_tokens(price, speed)
    if price is not None and per_million is not None:
        low_price, high_price = map(dollars, per_million)
        lines.append(
            f"price     {low_price} to {high_price} per million tokens ({EXPECT}), at {dollars(price)} per GPU-hour"
        )
    return lines


def _scaling_lines(points: Sequence[ScalingPoint]) -> list[str]:
    if not points:
        return ["  scaling   n/a: the GPU's peak is not known (`--gpu-tflops`)"]
    relative = f"relative to {points[0].world_size:,} GPUs"
    lines = [
        "  GPUs   tokens/s of all GPUs            tokens/s per GPU,      share of time",
        f"         (low to high end)               {relative:<21}  lost to failures",
    ]
    for point in points:
        low, high = point.tokens_per_second
        worst, best = sorted(point.scaling_efficiency)
        lines.append(
            f"  {point.world_size:>5}  {f'{low:,.0f} to {high:,.0f}':<30}  {f'{worst:.0%} to {best:.0%}':<21}  "
            f"{point.failure_loss:.1%}"
        )
    return lines

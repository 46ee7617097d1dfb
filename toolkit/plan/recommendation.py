"""A recommendation as people and programs read it, and its scaling curve."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.hardware.gpu_table import GIGA
from toolkit.plan.candidates import LARGEST_WORLD_SIZE, Candidate, RecommendRequest, host_assumption
from toolkit.plan.failures import FailingJob
from toolkit.plan.finish import EXPECT, NO_COST, Cost, ends_text
from toolkit.plan.interconnect import Range
from toolkit.plan.plan_table import images_text
from toolkit.plan.recommend import Recommendation
from toolkit.plan.recommended_commands import COMPARED_STEPS, broken, compare_command, train_command, tune_command
from toolkit.plan.step_time import ALIKE_DIGITS, NO_GENERATION
from toolkit.screen_text import table_lines
from toolkit.units import dollars, percent, seconds, tenths_of_gib

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
    failure_loss: float  # share of the time lost to failures, at the best interval between checkpoints


def scaling_curve(candidate: Candidate, request: RecommendRequest) -> list[ScalingPoint]:
    """Return the curve from the request's GPUs, doubled up to 1,024; empty if the GPU's peak is unknown."""
    points: list[ScalingPoint] = []
    smallest: Range | None = None
    size, per_node = request.world_size, request.job.gpus_per_node
    largest = min(LARGEST_WORLD_SIZE, candidate.preset.max_world_size or LARGEST_WORLD_SIZE)
    while size <= max(request.world_size, largest):
        if size <= per_node or size % per_node == 0:
            speed = request.step_time(replace(candidate.setup, world_size=size))
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


def recommendation_json(
    found: Recommendation, request: RecommendRequest, *, model: str, objective: str, cost: Cost = NO_COST
) -> dict[str, Any]:
    """Return the recommendation as `toolkit recommend --json` prints it."""
    choice, others, why_not = found.choice, found.others, found.why_not

    def row(candidate: Candidate) -> dict[str, Any]:
        more = {"degrees": candidate.job.degrees, "global_batch_size": request.global_batch_size}
        names = ("communication_bytes_per_step", "communication_seconds")
        more |= {name: getattr(candidate.speed, name, None) for name in names} | cost.as_row(candidate)
        more["dollars_per_million_tokens"] = cost.range_per_million_tokens(candidate)
        return candidate.as_row() | more

    return {
        "model": model,
        "num_params": request.shape.num_params,
        "gpu": request.gpu.name,
        "world_size": request.world_size,
        "objective": objective,
        "choice": row(choice),
        "reasons": list(found.reasons),
        "others": [row(other) | {"why_not": why_not[other.preset.name]} for other in others],
        "why_not": why_not,
        "instead": list(found.instead),
        "rule_of_thumb": found.rule_of_thumb,
        "scaling": [asdict(point) for point in scaling_curve(choice, request)],
        "command": train_command(choice, request, model),
        "compare_command": compare_command([choice, *others[:COMPARED]], request, model),
        "tune_command": tune_command(choice, request, model),
    }


def recommendation_lines(
    found: Recommendation,
    request: RecommendRequest,
    *,
    model: str,
    cost: Cost = NO_COST,
    scaling: bool = False,
    show_all: bool = False,
) -> list[str]:
    """Return the recommendation as lines of text that are legible without colour."""
    choice, why_not, job = found.choice, found.why_not, request.job
    where = f"{request.world_size} x {request.gpu.name}"
    equal = ", all of equal length" if job.lengths_differ is False else ""
    images = f" ({text})" if (text := images_text(request)) else ""
    host = f"; needs {tenths_of_gib(choice.memory.host.peak_bytes)} GiB of host memory per node"
    masters = "bf16 weights without fp32 master weights, as other tools train, are not planned"
    trainer = job.method.spec.trainer or ("a trainer that reads images" if job.image_tokens else None)
    script = f", in a script around {trainer}" if trainer else ""
    fitting = [other.preset.name for other in found.others]
    rejected = [name for name in why_not if name not in fitting] if show_all else list(found.too_large)
    shown = [*(("or", name) for name in fitting[: None if show_all else SHOWN])]
    shown += [("rejected", name) for name in rejected[: None if show_all else SHOWN]]
    lines = [
        f"{model}: {request.shape.num_params:,} parameters, {job.method_text}, {job.tokens_per_row:,} tokens per "
        f"sequence{images}{equal}, {request.global_batch_size} sequences per step, on {where}",
        "",
        f"use       {choice.preset.name}: {choice.settings}{host if choice.preset.offloads else ''}",
        *(f"because   {reason}" for reason in found.reasons),
        *_facts(choice, request, cost),
        *(f"instead   {way}" for way in (*found.instead, *([masters] if found.instead and not job.is_lora else ()))),
        "",
        *(f"{label:<9} {name}: {why_not[name]}" for label, name in shown),
        *([f"{len(why_not) - len(shown)} more with `--all`"] if len(shown) < len(why_not) else []),
        *(["", *_scaling_lines(scaling_curve(choice, request))] if scaling else []),
        "",
        f"run it{script}:",
        broken(train_command(choice, request, model)),
        "",
    ]
    compare = compare_command([choice, *found.others[:COMPARED]], request, model)
    tune = tune_command(choice, request, model)
    searched = [] if tune is None else ["", "and this searches on for the fastest settings:", broken(tune)]
    if compare is not None:
        return [*lines, "No figure above is measured; this measures:", broken(compare), *searched]
    short = f"a run with `--max_steps {COMPARED_STEPS}`"
    measuring = "`toolkit compare` on one node" if request.interconnect.num_nodes > 1 else short
    return [*lines, f"No figure above is measured; {measuring} measures.", *searched]


def _facts(choice: Candidate, request: RecommendRequest, cost: Cost) -> Iterator[str]:
    host, speed = choice.memory.host, choice.speed
    on_host = f"{tenths_of_gib(host.peak_bytes)} GiB of host memory per node{host.disk_text}"
    yield f"memory    {choice.peak_text} per GPU; {on_host}"
    if choice.preset.offloads and request.host_memory_bytes is None:
        yield f"host      {host_assumption(request)}"
    if speed is None:
        yield "speed     n/a: the GPU's peak is not known (`--gpu-tflops`)"
        return
    wide = f"; the range is wide because of {' and '.join(speed.wider_for)}" if speed.wider_for else ""
    more = f"{wide}; without {NO_GENERATION}" if speed.without_generation else wide
    step, mfu = ends_text(seconds, speed.step_seconds), ends_text(percent, speed.mfu)
    tokens = ends_text("{:,.0f}".format, speed.tokens_per_second_per_gpu)
    yield f"speed     {tokens} tokens/s per GPU (expect the lower end), {step} per step, MFU {mfu}{more}"
    if speed.communication_bytes_per_step:
        sent = f"{speed.communication_bytes_per_step / GIGA:,.1f} GB sent per step and GPU"
        yield f"network   {sent}: {ends_text(seconds, speed.communication_seconds)} without overlap"
    if speed.offload_efficiency is not None:
        yield f"offload   leaves {ends_text(percent, speed.offload_efficiency)} of the time to the GPU, without overlap"
    if cost.work is not None:
        finish = cost.finish(choice)
        of_data = "" if cost.work.max_steps else f" for {cost.work.text}"
        total = f", {finish.cost_text}" if finish.cost_text else ""
        yield f"total     {finish.time_text}{total} ({EXPECT}): {finish.steps:,} steps{of_data}"
    if per_million := cost.range_per_million_tokens(choice):
        yield f"price     {ends_text(dollars, per_million)} per million tokens ({EXPECT})"


def _scaling_lines(points: Sequence[ScalingPoint]) -> list[str]:
    if not points:
        return ["  scaling   n/a: the GPU's peak is not known (`--gpu-tflops`)"]
    relative = f"relative to {points[0].world_size:,} GPUs"
    rows = [("GPUs", "tokens/s, all GPUs", "tokens/s per GPU", "share of time"), ("", "", relative, "lost to failures")]
    for point in points:
        low, high = point.tokens_per_second
        worst, best = sorted(point.scaling_efficiency)
        efficiency, lost = f"{percent(worst)} to {percent(best)}", percent(point.failure_loss, 1)
        rows.append((f"{point.world_size:,}", f"{low:,.0f} to {high:,.0f}", efficiency, lost))
    return [*table_lines(rows, left=())]

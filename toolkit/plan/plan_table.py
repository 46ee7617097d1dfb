"""Plans as people and programs read them: a table that is legible without colour, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from toolkit.hardware.gpu_table import GIGA
from toolkit.models.read_model import is_checked
from toolkit.plan.finish import Work, dollars_per_million_tokens, finish_of, finish_row
from toolkit.plan.memory import DOES_NOT_FIT, FITS, PARTS, TOO_CLOSE
from toolkit.plan.methods import SFT
from toolkit.plan.planner import (
    LARGEST_WORLD_SIZE,
    VERDICT_TEXT,
    Plan,
    PlanRequest,
    offloads,
    simplest_fast,
    verdict_of_batch,
)
from toolkit.units import GIB, MIB, NOT_AVAILABLE, gib, number, percent, seconds

TABLE_COLUMNS = 100
# Two lines of heading for each column.
COLUMNS = (
    *("preset\n", "GPUs\n", "verdict\n", "torch\nGiB", "smi\nGiB", "model\nstates", "activ-\nations", "logits\n"),
    *("other\n", "host\nGiB", "max.\nbatch", "min.\nGPUs", "tokens/s\nper GPU"),
)
GPU_COLUMNS = (
    *("GPU\n", "GPUs\n", "preset\n", "torch\nGiB", "smi\nGiB", "of\nGiB", "tokens/s\nper GPU", "$ per M\ntokens"),
)
TEXT_COLUMNS = {"GPU\n", "preset\n", "verdict\n"}
MAX_GPUS_SHOWN = 12
NUMBERS = (
    "torch: GiB (2**30) allocated on rank 0, which has the largest share, at its peak, as",
    "torch.cuda.max_memory_allocated() says; smi: what nvidia-smi shows, with the allocator's reserve,",
)
LEGEND = (
    "CUDA and NCCL; of it model states, activations, logits and other (buffers, gathered layers, and what",
    "only nvidia-smi shows); host: memory of each node. max. batch: largest micro-batch that fits; min.",
    f"GPUs: fewest that fit this one, up to {LARGEST_WORLD_SIZE:,}; tokens/s: ±25% is a 90 % range from 0.8",
    "to 1.25 times the estimate.",
)
GPU_LEGEND = (
    "CUDA and NCCL; tokens/s: ±25% is a 90 % range from 0.8 to 1.25 times the estimate. Presets that",
    "offload are planned only if `--preset` names them; `--gpu NAME --num-processes N` shows the parts.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The plans of a request, and what they are shown with."""

    request: PlanRequest
    plans: Sequence[Plan]
    any_gpu: bool = False  # each plan has the fewest of one kind of GPU
    work: Work | None = None
    prices: Mapping[str, float] = field(default_factory=dict)


def print_json(model: str, answer: PlanAnswer, **more: Any) -> None:
    """Print the plans as JSON; `more` are further keys at the top level."""
    request, shape = answer.request, answer.request.shape
    head: dict[str, Any] = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from, "model_states_checked": are_states_checked(request)}
    head["summary"] = summary(answer)[0]
    rows = [plan.as_row() | finish_row(plan, request.job, answer.work, answer.prices) for plan in answer.plans]
    print(json.dumps(head | {"plans": rows} | more, indent=2))


def print_plans(answer: PlanAnswer) -> None:
    """Print the verdict, one row per plan, time and cost if they are asked for, and how exact the numbers are."""
    plans, request = answer.plans[: MAX_GPUS_SHOWN if answer.any_gpu else None], answer.request
    console = Console(width=max(Console().width, TABLE_COLUMNS), highlight=False, soft_wrap=True)
    for line in (_heading(answer), *summary(answer), ""):
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in GPU_COLUMNS[: None if answer.prices else -1] if answer.any_gpu else COLUMNS:
        table.add_column(heading, justify="left" if heading in TEXT_COLUMNS else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*(_gpu_cells(plan, answer.prices) if answer.any_gpu else _cells(plan)))
    console.print(table, soft_wrap=False)
    checked = f"{request.shape.model_type}, {request.job.method_text}"
    exact = f"Model states are exact (tests compare {checked}, with the libraries)."
    if not are_states_checked(request):
        exact = f"Model states are counted from config.json, and not checked for {checked}."
    disk = max(plan.memory.host.disk_bytes for plan in plans)
    advice = [f"{plan.preset}, {plan.world_size} GPUs: {line}" for plan in plans for line in plan.advice]
    on_disk = [f"on disk, per node: up to {gib(disk)}"] if disk else []
    legend = (*NUMBERS, *(GPU_LEGEND if answer.any_gpu else LEGEND))
    methods = () if answer.any_gpu else (*_phase_lines(plans), *advice)
    more = (*_wider_lines(plans), *methods, *_finish_lines(plans, answer))
    lines = (*_layout_lines(plans), *more, *legend, exact)
    for line in (*lines, "No figure has been checked against a GPU.", *on_disk):
        console.print(line, markup=False)


def summary(answer: PlanAnswer) -> tuple[str, str]:
    """Return the verdict in one line, and in another what people compare with other screens.

    It is about the fewest GPUs on which something fits, and the simplest of the fastest presets there.
    """
    plans, request = answer.plans, answer.request
    fitting = [plan for plan in plans if plan.verdict == FITS]
    offloading = {each.name for each in request.presets if offloads(each)}
    if answer.any_gpu:
        best, first = plans[0], "cheapest of those with a price" if answer.prices else "the least memory in all"
        text = f"{first}: {_where(best)}, {_of_gpu(best)}"
    elif fitting:
        fewest = [plan for plan in fitting if plan.world_size == min(each.world_size for each in fitting)]
        best = simplest_fast(fewest, request.presets)
        text = f"fits on {_where(best)}, {_of_gpu(best)}; {_next_batch(best, request)}"
    else:
        best = min(plans, key=lambda plan: (plan.verdict == DOES_NOT_FIT, plan.memory.planned_peak_bytes))
        enough = [plan for plan in plans if plan.smallest_world_size is not None]
        more = min(enough, key=lambda plan: (plan.smallest_world_size, plan.preset in offloading), default=None)
        text = f"{VERDICT_TEXT[best.verdict]} on {_where(best)}, {_of_gpu(best)}"
        text += "" if more is None else f"; `{more.preset}` fits on {more.smallest_world_size} GPUs"
    peak, share = best.memory.peak, percent(best.logits_fraction)
    shown = f"torch allocates {gib(peak.allocated_bytes)}, {share} of it logits; nvidia-smi shows "
    return text, f"{shown}{gib(best.memory.planned_peak_bytes)} ({peak.phase})"


def _where(plan: Plan) -> str:
    return f"{plan.world_size} x {plan.gpu} with `{plan.preset}`"


def _of_gpu(plan: Plan) -> str:
    return f"{plan.memory.planned_peak_bytes / GIB:.1f} GiB of {plan.gpu_memory_bytes / GIB:.1f}"


def _next_batch(plan: Plan, request: PlanRequest) -> str:
    size = request.job.per_device_train_batch_size
    if plan.largest_micro_batch is not None and plan.largest_micro_batch > size:
        return f"up to {plan.largest_micro_batch} sequences per GPU do"
    is_close = verdict_of_batch(request, plan, size + 1) == TOO_CLOSE
    return f"the next larger batch {'is too close to call' if is_close else 'does not'}"


def _finish_lines(plans: Sequence[Plan], answer: PlanAnswer) -> Iterator[str]:
    """Steps, hours and dollars of each plan that may fit: the best estimate, and the range."""
    if answer.work is None:
        return
    yield f"To finish {answer.work.text}, without loading, evaluation and saving; best estimate (range):"
    for plan in plans:
        if plan.verdict == DOES_NOT_FIT:
            continue
        finish = finish_of(plan, answer.request.job, answer.work, answer.prices)
        text = f"  {plan.world_size} x {plan.gpu}, {plan.preset}: {finish.steps:,} steps"
        if finish.hours is not None and finish.hours_range is not None:
            unit, scale = ("h", 1) if finish.hours >= 2 else ("min", 60)
            low, high = (f"{scale * hours:,.1f}" for hours in finish.hours_range)
            text += f", {scale * finish.hours:,.1f} {unit} ({low} to {high})"
        if finish.dollars_range is not None:
            low, high = map(number, finish.dollars_range)
            text += f", {number(finish.dollars)} dollars ({low} to {high})"
        yield text


def _heading(answer: PlanAnswer) -> str:
    request = answer.request
    shape, job, steps = request.shape, request.job, request.job.gradient_accumulation_steps
    batch_group = "GPU" if job.gpus_per_batch == 1 else "group of GPUs with the same rows"
    parts = [
        f"{shape.model_type}, {number(shape.num_params, 0)} parameters",
        job.method_text,
        f"{job.per_device_train_batch_size} x {job.tokens_per_row} tokens per {batch_group}",
        "rows of equal length" if job.lengths_differ is False else "",
        f"{steps} accumulation steps" if steps > 1 else "",
        f"{job.accumulate} gradients between them" if steps > 1 and job.accumulate is not None else "",
        ", ".join(f"{name} {degree}" for name, degree in job.degrees.items()),
        "activation checkpointing" if job.activation_checkpointing else "",
        "" if answer.any_gpu else f"{request.gpu.name}, {gib(request.gpu.memory_bytes)}",
        f"counted on the {shape.counted_on}" if shape.counted_on != "arithmetic" else "",
    ]
    if shape.activations_from == "llama":
        parts.append(f"activations estimated as Llama's, because they cannot be counted ({shape.why_not_counted})")
    return "; ".join(part for part in parts if part)


def _cells(plan: Plan) -> list[str]:
    memory, peak = plan.memory, plan.memory.peak
    sizes = [peak.allocated_bytes, memory.planned_peak_bytes, peak.state_bytes, peak.activation_bytes]
    sizes += [
        peak.logits_bytes,
        peak.buffer_bytes + peak.generation_bytes + memory.overhead_bytes,
        memory.host.peak_bytes,
    ]
    counts = (plan.largest_micro_batch, plan.smallest_world_size)
    return [
        *(plan.preset, str(plan.world_size), plan.verdict.replace("_", " ")),
        *map(_short_gib, sizes),
        *("none" if count is None else str(count) for count in counts),
        _speed(plan),
    ]


def _gpu_cells(plan: Plan, prices: Mapping[str, float]) -> list[str]:
    sizes = (plan.memory.peak.allocated_bytes, plan.memory.planned_peak_bytes, plan.gpu_memory_bytes)
    words = [plan.gpu, str(plan.world_size), plan.preset, *map(_short_gib, sizes), _speed(plan)]
    return [*words, number(dollars_per_million_tokens(plan, prices))] if prices else words


def _short_gib(size: int) -> str:
    """Three digits and more, so that columns stay narrow."""
    return f"{size / GIB:.1f}" if abs(size) < 99.95 * GIB else f"{size / GIB:.0f}"


def _speed(plan: Plan) -> str:
    if plan.speed is None:
        return NOT_AVAILABLE
    estimate, (low, _) = plan.speed.tokens_per_second_per_gpu_estimate, plan.speed.tokens_per_second_per_gpu
    shown = f"{estimate:.0f}" if estimate < 999.5 else f"{_thousands(estimate)}k"
    return f"{shown}±{estimate / low - 1:.0%}"


def _wider_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Presets whose range of speeds is wider than that of published rows, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for plan in plans:
        for reason in plan.speed.wider_for if plan.speed else ():
            names = by_reason.setdefault(reason, [])
            names += [plan.preset] if plan.preset not in names else []
    every = {plan.preset for plan in plans}
    for reason, names in by_reason.items():
        yield f"tokens/s: wider because of {reason} ({'all' if set(names) == every else ', '.join(names)})"


def _thousands(speed: float) -> str:
    return f"{speed / 1000:.1f}" if speed < 99_950 else f"{speed / 1000:.0f}"


def _layout_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """How each plan divides its ranks, and what a GPU sends in a step along each dimension."""
    for plan in plans:
        if plan.layout is None:
            continue
        yield f"{plan.preset}, {plan.world_size} GPUs: {plan.layout}; each GPU sends per step, without overlap:"
        for traffic in plan.traffic:
            fast, slow = traffic.seconds
            where = "between nodes" if traffic.crosses_nodes else "within a node"
            sent = f"{traffic.sent_bytes / GIGA:,.2f} GB {where}"
            yield f"  {traffic.dimension:<12} {sent:<24} {seconds(fast)} to {seconds(slow)}"


def _phase_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """The phases of a method that scores, generates or holds more than one model, each with its parts."""
    for plan in plans:
        if plan.method == SFT:
            continue
        yield f"{plan.preset}, {plan.world_size} GPUs, allocated by phase:"
        for phase in plan.memory.phases:
            parts = ((part, getattr(phase, f"{part}_bytes")) for part in PARTS)
            shown = ", ".join(f"{part} {gib(size)}" for part, size in parts if size >= MIB)
            yield f"  {phase.phase:<10} {gib(phase.allocated_bytes):>10}: {shown}"


def are_states_checked(request: PlanRequest) -> bool:
    """Return True if a test compares the tensors of this architecture and training method with the libraries' own."""
    return is_checked(request.shape.model_type, in_4bit=request.job.load_in_4bit)

"""Plans as people and programs read them: a table that is legible without colour, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from toolkit.hardware.gpu_table import GIGA
from toolkit.models.read_model import is_checked
from toolkit.plan.planner import LARGEST_WORLD_SIZE, Plan, PlanRequest
from toolkit.units import GIB, NOT_AVAILABLE, gib, number, seconds

TABLE_COLUMNS = 100
# Two lines of heading for each column.
COLUMNS = (
    *("preset\n", "GPUs\n", "verdict\n", "peak\nGiB", "model\nstates", "activ-\nations", "logits\n", "other\n"),
    *("left\nGiB", "host\nGiB", "max.\nbatch", "min.\nGPUs", "tokens/s\nper GPU"),
)
LEGEND = (
    "GiB (2**30) of GPU memory on rank 0, which has the largest share, at its peak: model states,",
    "activations, logits and other (buffers, gathered layers, CUDA, the allocator); left: the rest of",
    "the GPU; host: memory of each node. max. batch: largest micro-batch that fits; min. GPUs: fewest",
    f"that fit this one, up to {LARGEST_WORLD_SIZE:,}; tokens/s: best estimate (90 % range), k for",
    "thousands. See docs/concepts/plan.md",
)


def print_json(model: str, plans: Sequence[Plan], request: PlanRequest, **more: Any) -> None:
    """Print the plans as JSON; `more` are further keys at the top level."""
    shape = request.shape
    head: dict[str, Any] = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from, "model_states_checked": are_states_checked(request)}
    print(json.dumps(head | {"plans": [plan.as_row() for plan in plans]} | more, indent=2))


def print_plans(plans: Sequence[Plan], request: PlanRequest) -> None:
    """Print one row per plan, below a line that describes the job and above one that says how exact the numbers are."""
    console = Console(width=max(Console().width, TABLE_COLUMNS), highlight=False, soft_wrap=True)
    console.print(_heading(request), markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("preset\n", "verdict\n") else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*_cells(plan))
    console.print(table, soft_wrap=False)
    checked = f"{request.shape.model_type}, {request.job.method_text}"
    exact = f"Model states are exact (tests compare {checked}, with the libraries)."
    if not are_states_checked(request):
        exact = f"Model states are counted from config.json, and not checked for {checked}."
    disk = max(plan.memory.host.disk_bytes for plan in plans)
    on_disk = [f"on disk, per node: up to {gib(disk)}"] if disk else []
    for line in (
        *_layout_lines(plans),
        *_wider_lines(plans),
        *LEGEND,
        exact,
        "No figure has been checked against a GPU.",
        *on_disk,
    ):
        console.print(line, markup=False)


def _heading(request: PlanRequest) -> str:
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
        f"{request.gpu.name}, {gib(request.gpu.memory_bytes)}",
        f"counted on the {shape.counted_on}" if shape.counted_on != "arithmetic" else "",
    ]
    if shape.activations_from == "llama":
        parts.append(f"activations estimated as Llama's, because they cannot be counted ({shape.why_not_counted})")
    return "; ".join(part for part in parts if part)


def _cells(plan: Plan) -> list[str]:
    memory, peak = plan.memory, plan.memory.peak
    sizes = [memory.planned_peak_bytes, peak.state_bytes, peak.activation_bytes, peak.logits_bytes]
    sizes += [peak.buffer_bytes + memory.overhead_bytes, plan.headroom_bytes, memory.host.peak_bytes]
    counts, speed = (plan.largest_micro_batch, plan.smallest_world_size), NOT_AVAILABLE
    if plan.speed is not None:
        low, high = plan.speed.tokens_per_second_per_gpu
        shown, unit = (_thousands, "k") if high >= 999.5 else ("{:.0f}".format, "")
        speed = f"{shown(plan.speed.tokens_per_second_per_gpu_estimate)}{unit} ({shown(low)}-{shown(high)})"
    return [
        *(plan.preset, str(plan.world_size), plan.verdict.replace("_", " ")),
        # three digits and more, so that columns stay narrow
        *(f"{size / GIB:.1f}" if abs(size) < 99.95 * GIB else f"{size / GIB:.0f}" for size in sizes),
        *("none" if count is None else str(count) for count in counts),
        speed,
    ]


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


def _wider_lines(plans: Sequence[Plan]) -> list[str]:
    """Presets whose range of speeds is wider than that of published rows, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for plan in plans:
        for reason in plan.speed.wider_for if plan.speed else ():
            names = by_reason.setdefault(reason, [])
            names += [plan.preset] if plan.preset not in names else []
    every = {plan.preset for plan in plans}
    return [
        f"tokens/s: wider because of {reason} ({'all' if set(names) == every else ', '.join(names)})"
        for reason, names in by_reason.items()
    ]


def are_states_checked(request: PlanRequest) -> bool:
    """Return True if a test compares the tensors of this architecture and training method with the libraries' own."""
    return is_checked(request.shape.model_type, in_4bit=request.job.load_in_4bit)

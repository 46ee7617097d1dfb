"""Plans as people and programs read them: a table that is legible without colour, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from toolkit.plan.memory_verdict import LARGEST_WORLD_SIZE
from toolkit.plan.planner import Plan, PlanRequest
from toolkit.units import GIB, NOT_AVAILABLE, gib, number

TABLE_COLUMNS = 126
COLUMNS = [
    "preset",
    "GPUs",
    "verdict",
    "peak",
    "states",
    "acts",
    "logits",
    "buffers",
    "other",
    "left",
    "host",
    "batch",
    "min",
    "tokens/s/GPU",
]


def print_json(model: str, plans: Sequence[Plan], request: PlanRequest, **more: Any) -> None:
    """Print the plans as JSON; `more` are further keys at the top level."""
    shape = request.shape
    head = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from}
    print(json.dumps(head | {"plans": [plan.as_row() for plan in plans]} | more, indent=2))


def print_plans(plans: Sequence[Plan], request: PlanRequest) -> None:
    """Print one row per plan, below a line that describes the job and above one that says how exact the numbers are."""
    console = Console(width=max(Console().width, TABLE_COLUMNS), highlight=False, soft_wrap=True)
    console.print(_heading(request), markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("preset", "verdict") else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*_cells(plan))
    console.print(table, soft_wrap=False)
    console.print(_footer(plans), markup=False)


def _heading(request: PlanRequest) -> str:
    shape, job = request.shape, request.job
    steps, counted = job.gradient_accumulation_steps, shape.counted_on != "arithmetic"
    parts = [
        f"{shape.model_type}, {number(shape.num_params, 0)} parameters",
        job.method_text,
        f"{job.per_device_train_batch_size} x {job.max_seq_length} tokens per GPU",
        f"{steps} accumulation steps" if steps > 1 else "",
        "activation checkpointing" if job.activation_checkpointing else "",
        f"{request.gpu.name}, {gib(request.gpu.memory_bytes)}",
        f"counted on the {shape.counted_on}" if counted else "",
    ]
    if shape.activations_from == "llama":
        parts.append(f"activations estimated as Llama's, because they cannot be counted ({shape.why_not_counted})")
    return "; ".join(part for part in parts if part)


def _cells(plan: Plan) -> list[str]:
    memory, peak = plan.memory, plan.memory.peak
    sizes = [memory.planned_peak_bytes, peak.state_bytes, peak.activation_bytes, peak.logits_bytes, peak.buffer_bytes]
    sizes += [memory.overhead_bytes, plan.headroom_bytes, memory.host.peak_bytes]
    return [
        plan.preset,
        str(plan.world_size),
        plan.verdict.replace("_", " "),
        *(f"{size / GIB:.1f}" for size in sizes),
        "none" if plan.largest_micro_batch is None else str(plan.largest_micro_batch),
        f">{LARGEST_WORLD_SIZE}" if plan.smallest_world_size is None else str(plan.smallest_world_size),
        _tokens_per_second(plan),
    ]


def _tokens_per_second(plan: Plan) -> str:
    if plan.speed is None:
        return NOT_AVAILABLE
    low, high = plan.speed.tokens_per_second_per_gpu
    return f"{low:,.0f} - {high:,.0f}"


def _footer(plans: Sequence[Plan]) -> str:
    disk = max(plan.memory.host.disk_bytes for plan in plans)
    lines = [
        "GiB (2**30), rank 0 at its peak; host: per node. Model states are exact; the rest has not been checked",
        "against a GPU (docs/concepts/plan.md). batch: the largest that fits; min: the fewest GPUs for this batch.",
    ]
    return "\n".join([*lines, f"on disk, per node: up to {gib(disk)}"] if disk else lines)

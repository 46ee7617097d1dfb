"""Plans as a table on stdout: one row a preset and world size, legible without colour.

print_plans(plans, request)
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from toolkit.plan.planner import Plan, Request
from toolkit.plan.verdict import LARGEST_WORLD_SIZE
from toolkit.units import NOT_AVAILABLE, gib, number

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


def print_plans(plans: Sequence[Plan], request: Request) -> None:
    """The table under a line that says of what, and above one that says how far to trust it."""
    console = Console(width=max(Console().width, TABLE_COLUMNS), highlight=False, soft_wrap=True)
    console.print(_heading(request), markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("preset", "verdict") else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*_cells(plan))
    console.print(table, soft_wrap=False)
    console.print(_footer(plans), markup=False)


def _heading(request: Request) -> str:
    shape, job = request.shape, request.job
    how = "full fine-tune" if job.lora_r is None else f"{'QLoRA' if job.load_in_4bit else 'LoRA'} r={job.lora_r}"
    parts = [
        f"{shape.model_type}, {number(shape.num_params, 0)} parameters",
        how,
        f"{job.per_device_train_batch_size} x {job.max_seq_length} tokens a GPU",
        f"{job.gradient_accumulation_steps} micro-steps" if job.gradient_accumulation_steps > 1 else "",
        "activations recomputed" if job.activation_checkpointing else "",
        f"{request.gpu.name}, {gib(request.gpu.memory_bytes)}",
        "" if shape.counted_on == "arithmetic" else f"counted on the {shape.counted_on}",
        f"activations as Llama's, for want of its own ({shape.why_not_kept})"
        if shape.activations_from == "llama"
        else "",
    ]
    return "; ".join(part for part in parts if part)


def _cells(plan: Plan) -> list[str]:
    memory, peak = plan.memory, plan.memory.peak
    states = peak.parameter_bytes + peak.gradient_bytes + peak.optimizer_bytes
    parts = [memory.planned_peak_bytes, states, peak.activation_bytes, peak.logits_bytes, peak.buffer_bytes]
    sizes = [*parts, memory.overhead_bytes, plan.headroom_bytes, memory.host.peak_bytes]
    return [
        plan.preset,
        str(plan.world_size),
        plan.verdict.replace("_", " "),
        *(f"{size / 2**30:.1f}" for size in sizes),
        "none" if plan.largest_micro_batch is None else str(plan.largest_micro_batch),
        f">{LARGEST_WORLD_SIZE}" if plan.smallest_world_size is None else str(plan.smallest_world_size),
        _speed(plan),
    ]


def _speed(plan: Plan) -> str:
    if plan.speed is None:
        return NOT_AVAILABLE
    low, high = plan.speed.tokens_per_second_per_gpu
    return f"{low:,.0f} - {high:,.0f}"


def _footer(plans: Sequence[Plan]) -> str:
    disk = max(plan.memory.host.disk_bytes for plan in plans)
    lines = ["GiB (2**30), rank 0 at its worst moment; host: of one machine. States are exact; the rest was never"]
    lines.append(
        "held against a GPU. batch: the largest that fits; min: the fewest GPUs that fit this batch. docs/plan.md"
    )
    if disk:
        lines.append(f"on disk, a machine: up to {gib(disk)}")
    return "\n".join(lines)

"""Measured runs that are shipped with the planner: published rows, and those of the toolkit's own GPU measurements.

Each line of `measured_by_others.jsonl` has fields of `toolkit.record.shared_run.SharedRun`, which a test checks: the
planner page has neither pydantic nor run folders. A plan is shown the nearest row of its model, preset, GPU and number
of GPUs; a row changes no plan.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.plan.planner import Plan
from toolkit.units import gib, number

ROWS = Path(__file__).with_suffix(".jsonl")
# One architecture has one size: Llama 3's 8.03e9 parameters are not Qwen3-8B's 8.19e9.
SAME_SIZE = 0.002
Row = dict[str, Any]


@cache
def shipped_rows() -> tuple[Row, ...]:
    """Return all rows."""
    return tuple(json.loads(line) for line in ROWS.read_text().splitlines())


def nearest_row(plan: Plan) -> Row | None:
    """Return the row of the same model, method, preset and GPUs whose tokens per GPU are nearest; None without one."""
    job, size = plan.job, plan.request.shape.num_params
    same = (plan.preset.name, plan.request.gpu.name, plan.world_size, job.lora_r, job.load_in_4bit)
    tokens = job.per_device_train_batch_size * job.max_seq_length

    def distance(row: Row) -> float:
        return abs(math.log(row["per_device_train_batch_size"] * row["max_seq_length"] / tokens))

    rows = [row for row in shipped_rows() if abs(row["num_params"] / size - 1) < SAME_SIZE and _key(row) == same]
    return min(rows, key=distance, default=None) if job.method.method == "sft" else None


def _key(row: Row) -> tuple[Any, ...]:
    return row["preset"], row["gpu"], row["world_size"], row.get("lora_r"), row.get("load_in_4bit", False)


def measured_line(row: Row) -> str:
    """Return a row for people, with what it trained and where it is from."""
    parts = [f"per-GPU batch {row['per_device_train_batch_size']} x {row['max_seq_length']:,} tokens"]
    parts += ["activation checkpointing" if row["activation_checkpointing"] else "no activation checkpointing"]
    parts += [f"{row['master_dtype']} weights and states"] if "master_dtype" in row else []
    parts += [f"{number(row['tokens_per_second_per_gpu'], 0)} tokens/s per GPU"]
    kind = next((kind for kind in ("allocated", "reserved") if f"peak_{kind}_bytes" in row), None)
    parts += [] if kind is None else [f"{gib(row[f'peak_{kind}_bytes'])} {kind}"]
    return f"Measured by others ({row['source']}): {', '.join(parts)}."

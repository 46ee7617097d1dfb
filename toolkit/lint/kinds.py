"""Which library reads a file, told by its keys.

>>> kind_of({"zero_optimization": {"stage": 2}})
'deepspeed'
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import nearest
from toolkit.installed import training_argument_types
from toolkit.keys import ACCELERATE_KEYS, DEEPSPEED_KEYS
from toolkit.lint.document import ACCELERATE, DEEPSPEED, TRAINER
from toolkit.lint.removed import DEEPSPEED_REMOVED, TRAINING_ARGUMENTS_REMOVED

# Keys of other programs' own formats, whose words only look like `TrainingArguments`.
FOREIGN = {"base_model", "snr_results"}
# A key that several libraries have says little, unless its value has one library's shape.
SHARED = {
    *("debug", "use_cpu", "fsdp_config", "parallelism_config", "bf16", "fp16", "gradient_accumulation_steps"),
    *("optimizer", "scheduler", "compile", "checkpoint", "pipeline", "commands"),
}
SURE = {
    ACCELERATE: {"distributed_type", "compute_environment", "deepspeed_config", "main_training_function"},
    DEEPSPEED: {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"},
}


def kind_of(data: dict[str, Any]) -> str | None:
    """The library whose words the keys are; None for a file that is none of the three."""
    keys = set(data)
    if keys & FOREIGN:
        return None
    for kind, sure in SURE.items():
        if keys & sure:
            return kind
    points = {
        ACCELERATE: _points(keys, ACCELERATE_KEYS),
        DEEPSPEED: _points(keys, DEEPSPEED_KEYS | set(DEEPSPEED_REMOVED)),
        TRAINER: _points(keys, set(training_argument_types()) | set(TRAINING_ARGUMENTS_REMOVED)),
    }
    best = max(points, key=lambda kind: points[kind])
    return best if points[best] > 0 else _of_shared(data) or _of_misspelt(keys)


def _points(keys: set[str], known: set[str] | frozenset[str]) -> int:
    return len((keys & known) - SHARED)


def _of_shared(data: dict[str, Any]) -> str | None:
    """By the shape of a value that several libraries have."""
    if any(isinstance(data.get(key), dict) for key in ("bf16", "fp16", "optimizer", "scheduler")):
        return DEEPSPEED
    if any(key.startswith(("fsdp_", "parallelism_config_")) for key in _nested(data)):
        return ACCELERATE
    return TRAINER if set(data) & set(training_argument_types()) else None


def _nested(data: dict[str, Any]) -> list[str]:
    return [key for block in ("fsdp_config", "parallelism_config") if isinstance(data.get(block), dict)
            for key in data[block]]  # fmt: skip


def _of_misspelt(keys: set[str]) -> str | None:
    """By the one key that decides, misspelt."""
    for kind, sure in SURE.items():
        if any(nearest(key, sure, cutoff=0.85) for key in sorted(keys)[:50]):
            return kind
    return None

"""The rows of README's table of what fits: the recommended preset for public models on two kinds of hardware.

The configurations in `tests/fixtures/` have the sizes that the models' owners publish. `check.py` rehearses these rows
on a GPU that is large enough, for the table's measured column.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import ROOT

from toolkit.errors import ToolkitError
from toolkit.plan.candidates import Candidate
from toolkit.plan.options import RecommendOptions
from toolkit.plan.recommend import recommend, recommend_request
from toolkit.presets import list_presets

FULL, LORA, QLORA = "full", "LoRA r=16", "QLoRA r=16"
METHODS: dict[str, dict[str, Any]] = {FULL: {}, LORA: {"lora_r": 16}, QLORA: {"lora_r": 16, "load_in_4bit": True}}
# Model -> its rows, and billions of parameters as its page on the Hugging Face hub says.
MODELS: dict[str, tuple[tuple[str, ...], float]] = {
    **{"Qwen3-0.6B": ((FULL,), 0.6), "Qwen3-1.7B": ((FULL,), 1.7), "Qwen3-4B": ((FULL,), 4.0)},
    **{"Qwen3-8B": ((FULL, LORA, QLORA), 8.2), "Qwen3-14B": ((FULL, LORA), 14.8)},
    **{"Qwen3-32B": ((FULL, LORA, QLORA), 32.8), "Qwen2.5-72B": ((FULL, LORA, QLORA), 72.7)},
}
# Column -> the options of `toolkit recommend`.
HARDWARE: dict[str, dict[str, Any]] = {
    "8 × H100 80 GB": {"gpu": "h100", "num_processes": 8, "host_memory_gib": 1024},
    "2 × RTX 4090 24 GB": {"gpu": "rtx-4090", "num_processes": 2, "host_memory_gib": 128},
}
LENGTH = 2048


def rows() -> Iterator[tuple[str, str]]:
    """Yield model and method of each row of the table."""
    return ((model, method) for model, (methods, _) in MODELS.items() for method in methods)


def config_of(model: str) -> Path:
    return ROOT / "tests" / "fixtures" / model.lower() / "config.json"


def choice(model: str, method: str, hardware: dict[str, Any]) -> Candidate | None:
    """Return what `toolkit recommend` chooses; None if nothing fits."""
    options = RecommendOptions(max_seq_length=LENGTH, **hardware, **METHODS[method])
    try:
        return recommend(recommend_request(str(config_of(model)), options), list_presets()).choice
    except ToolkitError as error:
        if not error.message.startswith("nothing fits"):
            raise
        return None


@functools.cache
def chosen(model: str, method: str, column: str) -> Candidate | None:
    """Return the choice on the hardware of a column."""
    return choice(model, method, HARDWARE[column])


def case_of(model: str, method: str, column: str) -> dict[str, Any] | None:
    """Return a row in one column as a case of `validate.py`: rank 0 of the chosen preset; None if nothing fits."""
    found = chosen(model, method, column)
    if found is None:
        return None
    return {
        **{"id": f"{model} {method}, {column}", "split": "fits", "architecture": model, "method": method},
        **{"preset": found.preset.name, "world_size": HARDWARE[column]["num_processes"], "rank": 0},
        **{"max_seq_length": LENGTH, "gpu": HARDWARE[column]["gpu"]},
        "per_device_train_batch_size": found.job.per_device_train_batch_size,
        "gradient_accumulation_steps": found.job.gradient_accumulation_steps,
        "activation_checkpointing": bool(found.job.activation_checkpointing),
    }


def configs() -> dict[str, dict[str, Any]]:
    """Return the configuration of each model of the table."""
    return {model: json.loads(config_of(model).read_text()) for model in MODELS}

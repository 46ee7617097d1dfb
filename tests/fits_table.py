"""README's table of what fits: the recommended preset for public models on two kinds of hardware, planned.

The configurations in `fixtures/` have the sizes that the models' owners publish.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.plan.candidates import Candidate
from toolkit.plan.options import RecommendOptions
from toolkit.plan.recommend import recommend, recommend_request
from toolkit.presets import list_presets
from toolkit.units import GIB

FIXTURES = Path(__file__).parent / "fixtures"
MAX_SEQ_LENGTH = 2048
FULL, LORA, QLORA = "full", "LoRA r=16", "QLoRA r=16"
METHODS: dict[str, dict[str, Any]] = {FULL: {}, LORA: {"lora_r": 16}, QLORA: {"lora_r": 16, "load_in_4bit": True}}
ROWS = {
    **dict.fromkeys(("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"), (FULL,)),
    **{"Qwen3-8B": (FULL, LORA, QLORA), "Qwen3-14B": (FULL, LORA)},
    **dict.fromkeys(("Qwen3-32B", "Qwen2.5-72B"), (FULL, LORA, QLORA)),
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A column of the table."""

    name: str
    gpu: str
    num_processes: int
    host_memory_gib: int


HARDWARE = (
    Hardware(name="8 × H100 80 GB, host 1,024 GiB", gpu="h100", num_processes=8, host_memory_gib=1024),
    Hardware(name="2 × RTX 4090 24 GB, host 128 GiB", gpu="rtx-4090", num_processes=2, host_memory_gib=128),
)


def config_of(model: str) -> str:
    """Return the path of a model's configuration."""
    return str(FIXTURES / model.lower() / "config.json")


def choice(model: str, method: str, hardware: Hardware) -> Candidate | None:
    """Return what `toolkit recommend` chooses; None if nothing fits."""
    options = RecommendOptions(
        num_processes=hardware.num_processes,
        gpu=hardware.gpu,
        host_memory_gib=hardware.host_memory_gib,
        max_seq_length=MAX_SEQ_LENGTH,
        **METHODS[method],
    )
    try:
        return recommend(recommend_request(config_of(model), options), list_presets()).choice
    except ToolkitError as error:
        if not error.message.startswith("nothing fits"):
            raise
        return None


def cell(found: Candidate | None) -> str:
    """Return preset, micro-batch and planned GiB, with `c` for activation checkpointing, as Markdown."""
    if found is None:
        return "does not fit"
    job, preset, memory = found.job, found.preset, found.memory
    batch = f"{job.per_device_train_batch_size}{'c' if job.activation_checkpointing else ''}"
    text = f"`{preset.name}`, {batch}, {memory.planned_peak_bytes / GIB:.0f} GiB"
    offloads = preset.offload_optimizer or preset.offload_param
    return text + (f", host {memory.host.peak_bytes / GIB:.0f} GiB" if offloads else "")


def fits_table() -> str:
    """Return the Markdown table."""
    lines = [f"| model | method | {' | '.join(hardware.name for hardware in HARDWARE)} |", "| :--- " * 4 + "|"]
    for model, methods in ROWS.items():
        for method in methods:
            cells = [cell(choice(model, method, hardware)) for hardware in HARDWARE]
            lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)

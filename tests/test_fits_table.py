"""README's table of what fits: the recommended preset for public models on two kinds of hardware, planned.

The configurations in `fixtures/` have the sizes that the models' owners publish.
"""

from __future__ import annotations

from typing import Any

import pytest
from launching import ROOT

from toolkit.errors import ToolkitError
from toolkit.models.read_model import read_model
from toolkit.plan.candidates import Candidate
from toolkit.plan.options import PlanOptions, RecommendOptions
from toolkit.plan.planner import make_plans, plan_request
from toolkit.plan.recommend import recommend, recommend_request
from toolkit.presets import list_presets
from toolkit.units import GIB

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


def config_of(model: str) -> str:
    return str(ROOT / "tests" / "fixtures" / model.lower() / "config.json")


def choice(model: str, method: str, hardware: dict[str, Any]) -> Candidate | None:
    """Return what `toolkit recommend` chooses; None if nothing fits."""
    options = RecommendOptions(max_seq_length=2048, **hardware, **METHODS[method])
    try:
        return recommend(recommend_request(config_of(model), options), list_presets()).choice
    except ToolkitError as error:
        if not error.message.startswith("nothing fits"):
            raise
        return None


def cells_of(found: Candidate | None) -> str:
    """Return preset, micro-batch and planned GiB, with the host's where the preset offloads, as cells of Markdown."""
    if found is None:
        return "does not fit | |"
    job, preset, memory = found.job, found.preset, found.memory
    batch = f"{job.per_device_train_batch_size}{' + ckpt' if job.activation_checkpointing else ''}"
    offloads = preset.offload_optimizer or preset.offload_param
    host = f" + {memory.host.peak_bytes / GIB:.0f} of the host" if offloads else ""
    return f"`{preset.name}` | {batch} | {memory.planned_peak_bytes / GIB:.0f}{host}"


def fits_table() -> str:
    titles = [f"{hardware} | micro-batch | GiB" for hardware in HARDWARE]
    lines = [f"| model | method | {' | '.join(titles)} |", "| :--- | :--- " + "| :--- | :--- | ---: " * 2 + "|"]
    for model, (methods, _) in MODELS.items():
        for method in methods:
            cells = [cells_of(choice(model, method, hardware)) for hardware in HARDWARE.values()]
            lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.parametrize("model", MODELS)
def test_the_models_have_their_published_sizes(model: str) -> None:
    assert round(read_model(config_of(model)).num_params / 1e9, 1) == MODELS[model][1]


@pytest.mark.parametrize("method", [FULL, LORA])
def test_a_cell_has_the_bytes_that_plan_says(method: str) -> None:
    found = choice("Qwen3-8B", method, HARDWARE["8 × H100 80 GB"])
    assert found is not None
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "max_seq_length")
    job = {name: getattr(found.job, name) for name in names}
    options = PlanOptions(num_processes=(8,), gpu="h100", preset=(found.preset.name,), **job, **METHODS[method])
    (plan,) = make_plans(plan_request(config_of("Qwen3-8B"), options))
    assert plan.verdict == "fits"
    assert plan.memory.planned_peak_bytes == found.memory.planned_peak_bytes
    assert cells_of(found).endswith(f" | {found.memory.planned_peak_bytes / GIB:.0f}")


def test_what_fits_nowhere_says_so() -> None:
    tiny = {"gpu": "rtx-4090", "num_processes": 1, "host_memory_gib": 16}
    assert cells_of(choice("Qwen3-32B", FULL, tiny)).startswith("does not fit")

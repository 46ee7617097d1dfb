"""README's table of what fits, and the sizes of the models in it."""

from __future__ import annotations

import pytest
from fits_table import FULL, HARDWARE, LORA, METHODS, ROWS, Hardware, cell, choice, config_of

from toolkit.models.read_model import read_model
from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import make_plans, plan_request

# Billions of parameters, as the models' pages on the Hugging Face hub say.
PUBLISHED = {
    **{"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8},
    "Qwen2.5-72B": 72.7,
}


@pytest.mark.parametrize("model", ROWS)
def test_the_models_have_their_published_sizes(model: str) -> None:
    assert round(read_model(config_of(model)).num_params / 1e9, 1) == PUBLISHED[model]


@pytest.mark.parametrize("method", [FULL, LORA])
def test_a_cell_has_the_bytes_that_plan_says(method: str) -> None:
    model, hardware = "Qwen3-8B", HARDWARE[0]
    found = choice(model, method, hardware)
    assert found is not None
    job = found.job
    options = PlanOptions(
        num_processes=(hardware.num_processes,),
        preset=(found.preset.name,),
        gpu=hardware.gpu,
        per_device_train_batch_size=job.per_device_train_batch_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        activation_checkpointing=job.activation_checkpointing,
        max_seq_length=job.max_seq_length,
        **METHODS[method],
    )
    (plan,) = make_plans(plan_request(config_of(model), options))
    assert plan.verdict == "fits"
    assert plan.memory.planned_peak_bytes == found.memory.planned_peak_bytes
    assert f"{found.memory.planned_peak_bytes / 2**30:.0f} GiB" in cell(found)


def test_what_fits_nowhere_says_so() -> None:
    tiny = Hardware(name="1 small GPU", gpu="rtx-4090", num_processes=1, host_memory_gib=16)
    assert cell(choice("Qwen3-32B", FULL, tiny)) == "does not fit"

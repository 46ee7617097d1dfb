"""A plan names the nearest measured row of its model, preset and GPUs; the shipped rows are those of their sources."""

from typing import Any

from measured_rows import seed_rows

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.measured_by_others import measured_line, nearest_row, shipped_rows
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import Plan, PlanRequest, make_plans
from toolkit.presets import load_preset
from toolkit.record.shared_run import SharedRun


def planned(model: str, preset: str, gpu: str, world_size: int, **job: Any) -> Plan:
    request = PlanRequest(
        shape=read_model(model),
        presets=[load_preset(preset)],
        world_sizes=[world_size],
        job=PlannedJob(**{"per_device_train_batch_size": 1, "max_seq_length": 2048, **job}),
        gpu=find_gpu(gpu),
    )
    return make_plans(request)[0]


def test_the_shipped_rows_are_those_of_their_sources_and_pass_the_check() -> None:
    assert [SharedRun.model_validate(row) for row in shipped_rows()] == seed_rows()
    assert [problem for row in seed_rows() for problem in row.problems()] == []


def test_a_plan_is_shown_a_row_of_its_own_method() -> None:
    full = nearest_row(planned("meta-llama/Llama-3.2-1B", "single", "h200", 1, per_device_train_batch_size=2))
    adapters = nearest_row(planned("meta-llama/Llama-3.2-1B", "single", "h200", 1, lora_r=16))
    assert (full["per_device_train_batch_size"], full.get("lora_r")) == (8, None)  # LoRA's rows have a batch of 2
    assert (adapters["per_device_train_batch_size"], adapters["lora_r"]) == (2, 16)
    assert nearest_row(planned("meta-llama/Llama-3.2-1B", "single", "h200", 1, lora_r=8)) is None


def test_of_several_rows_the_one_with_the_nearest_tokens_per_gpu_is_shown() -> None:
    for tokens in (1024, 65_536):
        plan = planned("meta-llama/Llama-3.1-8B", "single", "a100-80gb", 1, max_seq_length=tokens)
        row = nearest_row(plan)
        own = [each for each in shipped_rows() if each["num_params"] == row["num_params"]]
        sizes = [
            each["per_device_train_batch_size"] * each["max_seq_length"] for each in own if each["world_size"] == 1
        ]
        nearest = min(sizes, key=lambda size: abs(size - tokens))
        assert row["per_device_train_batch_size"] * row["max_seq_length"] == nearest


def test_another_model_gpu_preset_or_number_of_gpus_has_no_row() -> None:
    assert nearest_row(planned("meta-llama/Llama-3.1-8B", "zero2", "h200", 8)) is not None
    for other in (("Qwen/Qwen3-8B", "zero2", "h200", 8), ("meta-llama/Llama-3.1-8B", "zero1", "h200", 8)):
        assert nearest_row(planned(*other)) is None
    assert nearest_row(planned("meta-llama/Llama-3.1-8B", "zero2", "h200", 4)) is None
    assert nearest_row(planned("meta-llama/Llama-3.1-8B", "zero2", "h100", 8)) is None


def test_a_row_is_shown_with_its_source_and_precision() -> None:
    row = nearest_row(planned("meta-llama/Llama-3.1-8B", "zero2", "h200", 8))
    line = measured_line(row)
    assert "stas00/ml-engineering" in line
    assert "float32 weights and states, 8,957 tokens/s per GPU" in line

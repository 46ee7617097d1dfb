"""`plan`, `recommend`, `rehearse` and `train` mean the same job where no flag is given."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, toolkit

from toolkit.hardware.gpu_table import find_gpu
from toolkit.job import argument_values as defaults
from toolkit.job.argument_fields import DataArguments
from toolkit.job.job import Job
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import make_plans, plan_request, plan_run
from toolkit.presets import load_preset

EXPECTED = {
    "per_device_train_batch_size": defaults.PER_DEVICE_TRAIN_BATCH_SIZE,
    "gradient_accumulation_steps": defaults.GRADIENT_ACCUMULATION_STEPS,
    "max_seq_length": defaults.MAX_SEQ_LENGTH,
}


def defaults_of(options: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(options) if field.name in EXPECTED}


@pytest.mark.parametrize("options", [PlanOptions, PlannedJob])
def test_the_planner_has_the_common_defaults(options: type[Any]) -> None:
    assert defaults_of(options) == EXPECTED


def test_the_training_script_has_the_common_defaults() -> None:
    """The batch is transformers' own, so that a plain `accelerate launch` is the job that was planned."""
    from transformers import TrainingArguments

    assert defaults_of(TrainingArguments) | defaults_of(DataArguments) == EXPECTED


def test_training_arguments_without_a_flag_are_the_planners_job() -> None:
    assert PlannedJob.of(Job()) == PlannedJob()


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_plan_without_a_batch_flag_is_the_plan_of_the_run_without_one(preset: str) -> None:
    """`plan` once assumed a micro-batch of 1 and said "fits" (45 GiB) where `train` needs 161 GiB with 8."""
    (plan,) = make_plans(
        plan_request(str(LLAMA_8B_CONFIG), PlanOptions(num_processes=(8,), preset=(preset,), gpu="h100"))
    )
    job = Job(model_name_or_path=str(LLAMA_8B_CONFIG))
    assert plan == plan_run(load_preset(preset), job, world_size=8, gpu=find_gpu("h100"))


@pytest.mark.parametrize(
    "words",
    [
        ("plan", str(LLAMA_8B_CONFIG), "--gpu", "h100"),
        ("recommend", str(LLAMA_8B_CONFIG), "--gpu", "h100"),
        ("rehearse", "--preset", "ddp", "--", "--model_name_or_path", str(LLAMA_8B_CONFIG)),
    ],
    ids=lambda words: words[0],
)
def test_without_a_gpu_the_number_of_processes_is_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = toolkit(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        "error: --num-processes is missing, and no GPU is visible on this node",
        "  hint: the number of GPUs of the job, for example `--num-processes 8`",
    ]

"""Training jobs: what is refused, and with which message."""

from __future__ import annotations

from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG
from model_configs import llama_8b

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.models.read_model import read_model
from toolkit.plan.planned_job import PlannedJob, check_planned_job


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"per_device_train_batch_size": 0}, "--per-device-train-batch-size is 0, expected 1 or more"),
        ({"max_seq_length": -5}, "--max-seq-length is -5, expected 1 or more"),
        ({"max_seq_length": 10**12}, "expected 134,217,728 or less"),
        ({"gradient_accumulation_steps": 0}, "--gradient-accumulation-steps is 0"),
        ({"lora_r": 0}, "--lora-r is 0"),
        ({"lora_r": 9000}, "--lora-r is 9000, expected at most the hidden size 4096"),
        ({"load_in_4bit": True}, "--load-in-4bit needs --lora-r"),
        ({"loss": "fast"}, "--loss is 'fast', expected one of chunked, full, fused, chunked_output"),
    ],
)
def test_values_out_of_range_are_refused_by_option(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_planned_job(PlannedJob(**how), llama_8b())


def test_the_optimizer_of_the_training_arguments_is_planned() -> None:
    assert PlannedJob.of(Job()).optim == "adamw_torch_fused"
    assert PlannedJob.of(Job.from_values({"optim": "paged_adamw_8bit"})).optim == "paged_adamw_8bit"


def test_an_optimizer_whose_memory_is_not_known_is_refused() -> None:
    with pytest.raises(ToolkitError, match="--optim galore_adamw is not planned"):
        check_planned_job(PlannedJob(optim="galore_adamw"), read_model(str(LLAMA_8B_CONFIG)))
    with pytest.raises(ToolkitError, match="--optim galore_adamw is not planned"):
        PlannedJob.of(Job.from_values({"optim": "galore_adamw"}))

"""Host memory of a node."""

from __future__ import annotations

from model_configs import LLAMA_8B_PARAMS, llama_8b

from toolkit.plan.host_memory import PROCESS_BYTES
from toolkit.plan.job import TrainingJob
from toolkit.plan.memory import plan_memory
from toolkit.presets import load_preset


def test_host_memory_is_that_of_one_node() -> None:
    job = TrainingJob(gpus_per_node=4)
    plan = plan_memory(llama_8b(), load_preset("ddp"), world_size=16, job=job)
    assert plan.host.loading_bytes == 4 * (PROCESS_BYTES + 4 * LLAMA_8B_PARAMS)  # each rank loads a copy

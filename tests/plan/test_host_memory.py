"""Host memory of a node."""

from __future__ import annotations

from model_configs import LLAMA_8B_PARAMS, llama_8b

from toolkit.plan.engine_buffers import PROCESS_BYTES
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset


def test_host_memory_is_that_of_one_node() -> None:
    job = PlannedJob(gpus_per_node=4)
    plan = plan_memory(llama_8b(), load_preset("ddp"), world_size=16, job=job)
    assert plan.host.loading_bytes == 4 * (PROCESS_BYTES + 4 * LLAMA_8B_PARAMS)  # each rank loads a copy


def test_a_background_save_holds_a_copy_of_weights_and_optimizer_states() -> None:
    without, staged = (
        plan_memory(llama_8b(), load_preset("fsdp2"), world_size=8, job=PlannedJob(async_save=async_save)).host
        for async_save in (False, True)
    )
    # fp32 weights, momentum and variance; no tensor of the model is padded on 8 ranks
    assert staged.training_bytes - without.training_bytes == 12 * LLAMA_8B_PARAMS


def test_adapters_are_copied_without_their_base_model() -> None:
    without, staged = (
        plan_memory(llama_8b(), load_preset("fsdp2"), world_size=8, job=PlannedJob(async_save=on, lora_r=8)).host
        for on in (False, True)
    )
    # 20,971,520 adapter parameters of rank 8 on all linear layers
    assert staged.training_bytes - without.training_bytes == 12 * 20_971_520

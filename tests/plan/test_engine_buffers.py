"""Buffers of the engines."""

from __future__ import annotations

from model_configs import LLAMA_8B_PARAMS, llama_8b

from toolkit.plan.engine_buffers import engine_buffers
from toolkit.plan.engine_settings import engine_settings
from toolkit.plan.model_states import job_weights, model_states
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset


def test_ddp_has_a_second_copy_of_the_gradients_and_one_process_does_not() -> None:
    weights = job_weights(llama_8b(), None, False)

    def lasting(ranks: int) -> int:
        engine = engine_settings(load_preset("ddp"), world_size=ranks, hidden_size=4096)
        return engine_buffers(engine, weights, model_states(engine, weights), PlannedJob()).lasting_bytes

    assert (lasting(2), lasting(1)) == (4 * LLAMA_8B_PARAMS, 0)


def test_fsdp2_keeps_unsharded_gradients_while_it_accumulates_whole_ones() -> None:
    engine = engine_settings(load_preset("fsdp2"), world_size=8, hidden_size=4096)
    weights = job_weights(llama_8b(), None, False)
    states = model_states(engine, weights)
    jobs = [PlannedJob(gradient_accumulation_steps=steps, accumulate="whole") for steps in (1, 2)]
    jobs.append(PlannedJob(gradient_accumulation_steps=2))
    waiting = [engine_buffers(engine, weights, states, job).accumulated_bytes for job in jobs]
    assert waiting == [0, 2 * LLAMA_8B_PARAMS, 0]

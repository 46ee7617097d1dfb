"""Settings of the engines, their buffers, and host memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from model_configs import LLAMA_8B_PARAMS, llama_8b

from toolkit.engines.planned import EngineBuffers
from toolkit.models.job_weights import job_weights
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.engine_buffers import PROCESS_BYTES, HostMemory
from toolkit.plan.memory import plan_engine_memory, plan_memory
from toolkit.plan.methods import Method
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset


def test_auto_in_a_deepspeed_file_is_resolved_from_the_hidden_size() -> None:
    engine = engine_settings(load_preset("zero3"), world_size=8, hidden_size=4096)
    assert (engine.reduce_bucket, engine.prefetch_bucket) == (4096**2, int(0.9 * 4096**2))
    assert engine.persistence_threshold == 40_960


def buffers(preset: str, ranks: int, **job: Any) -> EngineBuffers:
    engine, weights = engine_settings(load_preset(preset), world_size=ranks, hidden_size=4096), job_weights(llama_8b())
    return engine.traits.buffers(engine, weights, model_states(engine, weights), PlannedJob(**job))


def test_ddps_buckets_are_a_second_copy_of_gradients_that_are_no_views_of_them_or_that_wait() -> None:
    def beside(ranks: int, **job: Any) -> tuple[int, int]:
        found = buffers("ddp", ranks, **job)
        return found.lasting_bytes, found.waiting_bytes

    copy = 4 * LLAMA_8B_PARAMS
    assert (beside(2), beside(2, gradient_accumulation_steps=2)) == ((0, 0), (0, copy))
    copies: dict[str, Any] = {"gradient_as_bucket_view": False}
    found = (beside(1, **copies), beside(2, **copies), beside(2, gradient_accumulation_steps=2, **copies))
    assert found == ((0, 0), (copy, 0), (copy, 0))


def test_views_of_ddps_buckets_exist_from_forward_to_step() -> None:
    def gradients(**job: Any) -> list[int]:
        plan = plan_memory(llama_8b(), load_preset("ddp"), world_size=2, job=PlannedJob(**job))
        found = {each.phase: each.gradient_bytes for each in plan.phases}
        return [found[name] for name in ("forward", "step")]

    whole = 4 * LLAMA_8B_PARAMS
    assert (gradients(), gradients(gradient_as_bucket_view=False)) == ([whole, whole], [0, whole])
    assert gradients(method=Method(method="orpo")) == [0, whole]  # TRL leaves accelerate's default


def test_fsdp2_has_unsharded_gradients_while_it_accumulates_whole() -> None:
    jobs: list[dict[str, Any]] = [{"accumulate": "whole"}, {"accumulate": "whole", "gradient_accumulation_steps": 2}]
    waiting = [buffers("fsdp2", 8, **job).accumulated_bytes for job in (*jobs, {"gradient_accumulation_steps": 2})]
    assert waiting == [0, 2 * LLAMA_8B_PARAMS, 0]


def host(preset: str, ranks: int, **job: Any) -> HostMemory:
    return plan_memory(llama_8b(), load_preset(preset), world_size=ranks, job=PlannedJob(**job)).host


def test_host_memory_is_that_of_one_node() -> None:
    loading = host("ddp", 16, gpus_per_node=4).loading_bytes
    assert loading == 4 * (PROCESS_BYTES + 4 * LLAMA_8B_PARAMS)  # each rank loads a copy


@pytest.mark.parametrize(
    ("job", "copied"),
    # fp32 weights, momentum and variance; adapters of rank 8 on all linear layers without their base model
    [({}, LLAMA_8B_PARAMS), ({"lora_r": 8}, 20_971_520)],
)
def test_a_background_save_copies_trained_weights_and_optimizer_states(job: dict[str, Any], copied: int) -> None:
    without, staged = (host("fsdp2", 8, async_save=on, **job).training_bytes for on in (False, True))
    assert staged - without == 12 * copied


def test_page_locked_blocks_are_shards_of_tensors_gradients_of_sub_groups_and_flat_buffers() -> None:
    """Under ZeRO-3 as deepspeed 0.19.8 gave them to `pin_memory` on one of four CPU ranks; no master weights."""
    weights, share = job_weights(llama_8b()), LLAMA_8B_PARAMS // 8

    def blocks(preset: str = "zero3_cpu_offload", **changed: Any) -> list[int]:
        engine = replace(engine_settings(load_preset(preset), world_size=8, hidden_size=4096), **changed)
        return list(engine.traits.offloaded_blocks(engine, weights, model_states(engine, weights)))

    layer = 2 * 2**22 + 2 * 2**20 + 3 * 2**24 + 2 * 1024  # query and output, key and value, MLP, norms
    shards = 32 * layer + 2 * 2**27 + 1024
    assert blocks() == [4 * share, 2**32, 2**31, 2**31, shards]
    assert blocks(sub_group=300_000_000)[1:-3] == [2**31, 2**31, 2**31, 2**28]  # the last has the head alone
    assert sum(blocks(sub_group=300_000_000, pins_memory=False)) == 12 * share
    assert blocks("fsdp2_cpu_offload") == [2 * shards, 0]  # in fp32


def planned_on_cpu(name: str, shape: ModelShape) -> dict[str, int]:
    """Plan `zero3 128 lora`: a preset, tokens per sequence, and adapters. In fp32; all memory is the host's."""
    preset, length, *extras = name.split()
    ranks, lora_r = 1 if preset == "single" else 2, 16 if "lora" in extras else None
    job = PlannedJob(max_seq_length=int(length), per_device_train_batch_size=1, loss="full", lora_r=lora_r)
    sizes = {"world_size": ranks, "hidden_size": shape.hidden_size}
    engine = engine_settings(load_preset(preset), **sizes, mixed_precision="no")
    memory = plan_engine_memory(shape, replace(engine, pins_memory=False), job)
    held = {phase.phase: ranks * phase.allocated_bytes for phase in memory.phases}
    # Until FSDP2 wraps the model, rank 0 has the full model on the host next to all shards; other engines move it.
    whole_first = memory.host.loading_bytes + (held["load"] if preset.startswith("fsdp2") else 0)
    loading = max(whole_first, ranks * PROCESS_BYTES + held["load"] + memory.host.before_first_step_bytes)
    return {"loading_bytes": loading, "run_bytes": max(loading, memory.host.training_bytes + max(held.values()))}


def test_the_plan_beside_the_host_memory_that_was_measured_once_is_todays(tmp_path: Path) -> None:
    """What was run is in docs/evidence/plan-accuracy.md."""
    facts, *rows = map(json.loads, (ROOT / "benchmarks/results/host_memory.jsonl").read_text().splitlines())
    (tmp_path / "config.json").write_text(json.dumps(facts["config"]))
    shape = read_model(str(tmp_path))
    assert len(rows) == 15
    for row in rows:
        planned = {name: pytest.approx(size, rel=0.01) for name, size in row["planned"].items()}
        assert planned_on_cpu(row["setting"], shape) == planned, row["setting"]

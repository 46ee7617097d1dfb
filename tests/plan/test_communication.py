"""Planned communication volume, compared with collectives counted in real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_collectives import assert_planned, planned
from launching import CPU_PRESETS, ROOT, accelerate_launch, read, torchrun

from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape, Tensor
from toolkit.plan.communication import communication_bytes, step_collectives, zero3_gathers
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.presets import load_preset


@pytest.mark.launch
@pytest.mark.parametrize("preset", [name for name, ranks in CPU_PRESETS.items() if ranks > 1])
def test_the_planned_payload_of_each_collective_is_what_a_real_run_sends(
    preset: str, preset_runs: dict[str, Path], tiny_model: Path
) -> None:
    setup = TrainingSetup(
        preset=load_preset(preset),
        shape=read_model(str(tiny_model)),
        world_size=CPU_PRESETS[preset],
        mixed_precision="no",
    )
    assert_planned(setup, preset_runs[preset])


@pytest.mark.launch
@pytest.mark.parametrize(("preset", "lora_rank"), [("zero2", None), ("fsdp2", 8)])
def test_accumulation_and_adapters_send_what_is_planned(
    preset: str, lora_rank: int | None, tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    words += ["--save_strategy", "no", "--save_model", "false", "--output_dir", str(tmp_path / "run")]
    words += [] if lora_rank is None else ["--lora_r", str(lora_rank)]
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    ended = accelerate_launch(config, *words, script="count_collectives.py")
    assert ended.returncode == 0, ended.stderr[-2000:]
    shape = read_model(str(tiny_model))
    setup = TrainingSetup(
        preset=load_preset(preset),
        shape=shape,
        world_size=2,
        job=PlannedJob(gradient_accumulation_steps=2, lora_r=lora_rank),
        mixed_precision="no",
    )
    assert_planned(setup, tmp_path / "run")
    assert {rank["accumulate"] for rank in read(tmp_path / "run" / "attestation.json")["ranks"]} == {"sharded"}


def two_node_preset(folder: Path) -> Path:
    """ZeRO-3 with hpZ on nodes of two ranks, as in `zeropp`, without the quantization that needs a GPU."""
    config = json.loads((ROOT / "ds_configs" / "zeropp.json").read_text())
    zero = config["zero_optimization"] | {"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 0}
    zero |= {"stage3_prefetch_bucket_size": 0, "zero_quantized_weights": False, "zero_quantized_gradients": False}
    (folder / "hpz.json").write_text(json.dumps(config | {"zero_optimization": zero}))
    lines = ["distributed_type: DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {folder / 'hpz.json'}"]
    (folder / "hpz.yaml").write_text("\n".join(lines) + "\n")
    return folder / "hpz.yaml"


@pytest.mark.launch
@pytest.mark.parametrize(("preset", "ranks"), [("hpz", 4), ("fsdp2_hybrid", 64)])
def test_rank_0_of_many_calls_what_is_planned(
    preset: str, ranks: int, tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    """In one process, with torch's fake process group: what would be sent is counted, nothing is."""
    config = two_node_preset(tmp_path) if preset == "hpz" else ROOT / "accelerate_configs" / f"{preset}.yaml"
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    words += ["--save_strategy", "no", "--save_model", "false", "--output_dir", str(tmp_path / "run")]
    ended = torchrun("count_alone.py", str(config), str(ranks), *words, num_processes=1)
    assert ended.returncode == 0, ended.stderr[-2000:]
    setup = TrainingSetup(
        preset=load_preset(str(config)),
        shape=read_model(str(tiny_model)),
        world_size=ranks,
        job=PlannedJob(gradient_accumulation_steps=2),
        mixed_precision="no",
    )
    assert_planned(setup, tmp_path / "run")


LAYER = (Tensor(name="mlp.weight", shape=(8, 8)), Tensor(name="norm.weight", shape=(8,)))
SMALL = ModelShape(
    model_type="llama",
    num_layers=2,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=2,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=100,
    gated_mlp=False,
    activation="silu",
    tied_embeddings=False,
    layers=(LAYER, LAYER),
    outer=(Tensor(name="embed_tokens.weight", shape=(100, 8)), Tensor(name="lm_head.weight", shape=(100, 8))),
)
PARAMS = 2 * 72 + 1600


def setup_of(preset: str, *, shape: ModelShape = SMALL, world_size: int = 4, **job: Any) -> TrainingSetup:
    return TrainingSetup(preset=load_preset(preset), shape=shape, world_size=world_size, job=PlannedJob(**job))


def test_one_process_sends_nothing() -> None:
    assert step_collectives(setup_of("single", world_size=1)) == ()


def test_ddp_sends_fp32_gradients_once_per_step() -> None:
    (reduction,) = step_collectives(setup_of("ddp", gradient_accumulation_steps=4))
    assert (reduction.name, reduction.payload_bytes) == ("all_reduce", 4 * PARAMS)
    assert reduction.sent_bytes == 4 * PARAMS * 2 * 3 // 4


def test_zero1_reduces_once_and_zero2_in_every_accumulation_step_and_neither_scatters() -> None:
    gathered = 2 * (1728 + 16)  # both parameter groups are multiples of 8 already
    assert planned(setup_of("zero1", gradient_accumulation_steps=3)) == {
        "all_reduce": 2 * PARAMS,
        "all_gather": gathered,
    }
    assert planned(setup_of("zero2", gradient_accumulation_steps=3)) == {
        "all_reduce": 6 * PARAMS,
        "all_gather": gathered,
    }


def test_offloading_sends_the_same_between_gpus() -> None:
    for preset in ("zero2", "zero3", "fsdp2"):
        assert planned(setup_of(f"{preset}_cpu_offload")) == planned(setup_of(preset))


def test_fsdp2_gathers_twice_except_the_root_unit() -> None:
    plan = {item.purpose: item.payload_bytes for item in step_collectives(setup_of("fsdp2"))}
    assert plan["parameters in the forward"] == 2 * PARAMS
    assert plan["parameters in the backward"] == 2 * (PARAMS - 800)  # the head stays from forward to backward
    assert plan["gradients"] == 2 * PARAMS


def test_fsdp2_reduces_in_every_accumulation_step_or_in_the_last_one() -> None:
    sharded, whole = (
        {item.purpose: item for item in step_collectives(setup_of("fsdp2", gradient_accumulation_steps=3, **more))}
        for more in ({}, {"accumulate": "whole"})
    )
    assert sharded["gradients"].payload_bytes == 3 * whole["gradients"].payload_bytes == 3 * 2 * PARAMS
    assert sharded["gradients"].calls == 3 * whole["gradients"].calls
    assert sharded["parameters in the forward"] == whole["parameters in the forward"]


def test_fsdp2_pads_the_first_dimension() -> None:
    plan = {item.purpose: item.payload_bytes for item in step_collectives(setup_of("fsdp2", world_size=16))}
    assert plan["gradients"] == 2 * (2 * (16 * 8 + 16) + 2 * 112 * 8)


def test_a_hybrid_mesh_gathers_within_a_replica_and_reduces_shards_between() -> None:
    between = step_collectives(setup_of("fsdp2_hybrid"))[-1]
    assert (between.name, between.group, between.group_size) == ("all_reduce", "replicas", 2)
    assert between.payload_bytes == 2 * PARAMS // 2


def test_zero3_gathers_a_small_model_once_and_a_large_one_again() -> None:
    setup = setup_of("zero3")
    first, again = zero3_gathers(setup, persistent=8, reuse=10**9)
    assert (sum(first.elements()), dict(again)) == (64 * 2 + 800 * 2, {})
    first, again = zero3_gathers(setup, persistent=8, reuse=0)
    assert again == first
    # The head is used again at once; the last layer after the head and a norm twice, 1,616 elements later.
    assert dict(zero3_gathers(setup, persistent=8, reuse=1617)[1]) == {64: 1, 800: 1}


def test_a_preset_without_prefetch_gathers_one_tensor_per_call() -> None:
    setup = setup_of("zero3_nvme_offload")
    assert setup.engine.prefetch_bucket == 0
    counted = zero3_gathers(setup, persistent=setup.engine.persistence_threshold, reuse=setup.engine.reuse_distance)
    tensors = sum(part.total() for part in counted)
    gathers = [one.calls for one in step_collectives(setup) if one.name == "all_gather" and "small" not in one.purpose]
    assert all(0 <= calls <= tensors for calls in gathers)


def test_zero3_with_activation_checkpointing_gathers_a_layer_once_more() -> None:
    again = zero3_gathers(setup_of("zero3", activation_checkpointing=True), persistent=8, reuse=0)[1]
    assert again[64] == 4


def test_zeropp_sends_one_byte_per_weight_between_nodes_once_per_step() -> None:
    plan = {
        item.purpose: item
        for item in step_collectives(setup_of("zeropp", world_size=16, gradient_accumulation_steps=2))
    }
    assert plan["parameters in the step's first use"].payload_bytes == 1600  # the rest stays: 64 elements and less
    assert plan["gradients between nodes"].group_size == 2
    assert plan["gradients between nodes"].payload_bytes == plan["gradients"].payload_bytes // 8


def test_seven_billion_parameters_send_the_published_volume() -> None:
    """7e9 parameters in bf16 on 8 GPUs, fully sharded: 3·2·7e9·7/8 = 36.75 GB a step, 61 ms at 600 GB/s."""
    layer = (Tensor(name="mlp.weight", shape=(1_000_000, 7_000)),)
    shape = replace(SMALL, num_layers=1, layers=(layer,), outer=())
    sent = communication_bytes(step_collectives(setup_of("fsdp2", shape=shape, world_size=8)))
    assert sent == 36_750_000_000
    assert sent / 600e9 == pytest.approx(0.06125)

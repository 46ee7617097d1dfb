"""Planned communication volume: compared with collectives counted in real runs, and worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_collectives import assert_planned, counted, planned
from launching import CPU_PRESETS, ROOT, accelerate_launch, read, torchrun
from model_configs import small_shape

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape, Tensor
from toolkit.plan.communication import communication_bytes, step_collectives, zero3_gathers
from toolkit.plan.interconnect import Collective, Interconnect
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.plan.step_time import dimension_traffic, step_time
from toolkit.presets import load_preset

# One preset per engine; the others are compared in `make test-nightly`.
ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
ACCUMULATED = PlannedJob(gradient_accumulation_steps=2)


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def on_cpu(preset: str, model: Path, world_size: int, job: PlannedJob = ACCUMULATED) -> TrainingSetup:
    chosen, shape = load_preset(preset), read_model(str(model))
    return TrainingSetup(preset=chosen, shape=shape, world_size=world_size, job=job, mixed_precision="no")


@pytest.fixture
def words(tiny_model: Path, faq_alpaca: Path, tmp_path: Path) -> list[str]:
    """Two steps of two accumulation steps."""
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "2", "--gradient_accumulation_steps", "2", "--save_strategy", "no"]
    return [*words, "--save_model", "false", "--output_dir", str(tmp_path / "run")]


@pytest.mark.launch
@pytest.mark.parametrize(
    "preset", [name if name in ENGINES else nightly(name) for name, ranks in CPU_PRESETS.items() if ranks > 1]
)
def test_the_planned_payload_of_each_collective_is_what_a_real_run_sends(
    preset: str, preset_runs: dict[str, Path], tiny_model: Path
) -> None:
    assert_planned(on_cpu(preset, tiny_model, CPU_PRESETS[preset], PlannedJob()), preset_runs[preset])


@pytest.mark.launch
@pytest.mark.parametrize(("preset", "lora_rank"), [nightly("zero2", None), ("fsdp2", 8)])
def test_accumulation_and_adapters_send_what_is_planned(
    preset: str, lora_rank: int | None, words: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    words += ["--per_device_train_batch_size", "1"] + ([] if lora_rank is None else ["--lora_r", str(lora_rank)])
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    ended = accelerate_launch(config, *words, script="count_collectives.py")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert_planned(on_cpu(preset, tiny_model, 2, replace(ACCUMULATED, lora_r=lora_rank)), tmp_path / "run")
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
@pytest.mark.parametrize(("preset", "ranks"), [("hpz", 4), nightly("fsdp2_hybrid", 64)])
def test_rank_0_of_many_calls_what_is_planned(
    preset: str, ranks: int, words: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    """In one process, with torch's fake process group: what would be sent is counted, nothing is."""
    config = two_node_preset(tmp_path) if preset == "hpz" else ROOT / "accelerate_configs" / f"{preset}.yaml"
    words += ["--per_device_train_batch_size", "1"]
    ended = torchrun("count_alone.py", str(config), str(ranks), *words, num_processes=1)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert_planned(on_cpu(str(config), tiny_model, ranks), tmp_path / "run")


@pytest.mark.launch
def test_four_ranks_of_tensor_and_data_parallelism_send_what_is_planned(
    words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Collectives and model states of one run. Packed rows all have the full length; the head is tied."""
    words += ["--per_device_train_batch_size", "2", "--packing", "true", "--tp", "2"]
    config = ROOT / "accelerate_configs" / "fsdp2_tp.yaml"
    ended = accelerate_launch(config, *words, script="count_collectives.py", num_processes=4)
    assert ended.returncode == 0, ended.stderr[-2000:]
    job = replace(ACCUMULATED, per_device_train_batch_size=2, max_seq_length=64, tp=2, packing=True)
    setup = on_cpu("fsdp2_tp", tiny_model, 4, job)
    assert planned(setup) == counted(tmp_path / "run")
    ranks = read(tmp_path / "run" / "attestation.json")["ranks"]
    states = plan_memory(setup.shape, setup.preset, world_size=4, job=setup.job, mixed_precision="no").states
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert [rank[part] for rank in ranks] == [getattr(states, part)] * 4
    assert [rank["layout"] for rank in ranks] == [setup.layout.degrees() if setup.layout else None] * 4


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


def sent(setup: TrainingSetup) -> dict[str, Collective]:
    return {collective.purpose: collective for collective in step_collectives(setup)}


def test_one_process_sends_nothing() -> None:
    assert step_collectives(setup_of("single", world_size=1)) == ()


def test_ddp_sends_fp32_gradients_once_per_step() -> None:
    (reduction,) = step_collectives(setup_of("ddp", gradient_accumulation_steps=4))
    assert (reduction.name, reduction.payload_bytes) == ("all_reduce", 4 * PARAMS)
    assert reduction.sent_bytes == 4 * PARAMS * 2 * 3 // 4


def test_zero1_reduces_once_and_zero2_in_every_accumulation_step_and_neither_scatters() -> None:
    gathered = 2 * (1728 + 16)  # both parameter groups are multiples of 8 already
    for preset, steps in (("zero1", 1), ("zero2", 3)):
        found = planned(setup_of(preset, gradient_accumulation_steps=3))
        assert found == {"all_reduce": steps * 2 * PARAMS, "all_gather": gathered}


def test_fsdp2_gathers_twice_except_the_root_unit() -> None:
    plan = sent(setup_of("fsdp2"))
    assert plan["parameters in the forward"].payload_bytes == plan["gradients"].payload_bytes == 2 * PARAMS
    # the head stays from forward to backward
    assert plan["parameters in the backward"].payload_bytes == 2 * (PARAMS - 800)


def test_fsdp2_reduces_in_every_accumulation_step_or_in_the_last_one() -> None:
    sharded, whole = (
        sent(setup_of("fsdp2", gradient_accumulation_steps=3, **more)) for more in ({}, {"accumulate": "whole"})
    )
    assert sharded["gradients"].payload_bytes == 3 * whole["gradients"].payload_bytes == 3 * 2 * PARAMS
    assert sharded["gradients"].calls == 3 * whole["gradients"].calls
    assert sharded["parameters in the forward"] == whole["parameters in the forward"]


def test_fsdp2_pads_the_first_dimension() -> None:
    plan = sent(setup_of("fsdp2", world_size=16))
    assert plan["gradients"].payload_bytes == 2 * (2 * (16 * 8 + 16) + 2 * 112 * 8)


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


def test_zero3_with_activation_checkpointing_gathers_a_layer_once_more() -> None:
    again = zero3_gathers(setup_of("zero3", activation_checkpointing=True), persistent=8, reuse=0)[1]
    assert again[64] == 4


def test_zeropp_sends_one_byte_per_weight_between_nodes_once_per_step() -> None:
    plan = sent(setup_of("zeropp", world_size=16, gradient_accumulation_steps=2))
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


# -- split layers, experts and sequences


def split_setup(preset: str, model: str = "llama", *, world_size: int = 4, **job: Any) -> TrainingSetup:
    size = {"per_device_train_batch_size": 2, "max_seq_length": 64}
    setup = setup_of(preset, shape=small_shape(model), world_size=world_size, **{**size, **job})
    return replace(setup, mixed_precision="no")


def test_the_backward_sums_the_input_of_every_projection_into_heads_and_mlp() -> None:
    """Query, key, value, gate and up, and the head: counted on four CPU ranks as 22 calls in two accumulation steps."""
    found = sent(split_setup("fsdp2_tp", tp=2, gradient_accumulation_steps=2))
    inputs = found["gradients of the inputs of split layers"]
    outputs = found["outputs of split layers"]
    assert (inputs.calls, outputs.calls) == (2 * (5 * 2 + 1), 2 * (2 * 2 + 1))
    each = 2 * 64 * 32 * 4  # tokens, hidden size, fp32
    assert (inputs.payload_bytes, outputs.payload_bytes) == (22 * each, 10 * each)
    assert found["logits"].payload_bytes == 2 * (2 * 64 * 288 * 4)


def test_activation_checkpointing_repeats_the_sums_of_the_forward() -> None:
    once, twice = (
        sent(split_setup("fsdp2_tp", tp=2, activation_checkpointing=checkpointing))["outputs of split layers"].calls
        for checkpointing in (False, True)
    )
    assert (once, twice) == (5, 9)  # the embedding is not repeated


def test_fsdp2_gathers_and_reduces_only_a_ranks_part_of_each_layer() -> None:
    found = sent(split_setup("fsdp2_tp", tp=2))
    part = 9_216 + (9_280 - 64) + 64 * 2 + 32  # half of embedding and head, of two layers, and whole norms
    assert found["parameters in the forward"].payload_bytes == 4 * part
    assert found["gradients"].payload_bytes == 4 * part
    assert {found[name].group_size for name in ("gradients", "logits")} == {2}


def test_experts_are_gathered_among_their_own_ranks() -> None:
    found = sent(split_setup("ep", "qwen3_moe", ep=2))
    experts = 4 * (64 * 32 + 32 * 32)  # of the 8 experts, 4 on each rank: gate and up, and down
    assert found["experts in the forward"].payload_bytes == 4 * 2 * experts
    assert (found["experts in the forward"].group_size, found["parameters in the forward"].group_size) == (2, 4)
    rows = found["rows of the experts"]
    assert rows.payload_bytes == 2 * 2 * 2 * (2 * 64 * 32 * 4) * 2  # there and back, both passes, 2 layers, top 2


def test_ring_attention_gathers_keys_and_values_and_sends_their_fp32_gradients_round() -> None:
    found = sent(split_setup("cp", world_size=2, cp=2))
    keys = 2 * 64 * 2 * 16  # keys and values of both layers: 2 heads of 8, for each token of the group
    assert found["keys and values"].payload_bytes == 2 * 2 * keys * 4
    assert found["gradients of keys and values"].sent_bytes == 2 * keys * 4


def test_ulysses_exchanges_heads_and_repeats_keys_that_are_too_few() -> None:
    two, four = (sent(split_setup("ulysses", world_size=4, sp=sp))["heads of attention"].payload_bytes for sp in (2, 4))
    assert two == 2 * 2 * 64 * (2 * 4 + 2 * 2) * 8 * 4  # both passes, both layers, a half of the tokens
    assert four == 2 * 2 * 32 * (2 * 4 + 2 * 4) * 8 * 4


def test_groups_of_neighbours_stay_within_a_node_and_the_others_share_its_network() -> None:
    nodes = Interconnect(gpu=find_gpu("h100"), world_size=16)
    setup = split_setup("fsdp2_tp", world_size=16, tp=4)
    traffic = {each.dimension: each for each in dimension_traffic(step_collectives(setup), nodes)}
    assert (traffic["tp"].crosses_nodes, traffic["dp_shard"].crosses_nodes) == (False, True)
    whole, strided = (
        nodes.seconds(Collective(name="all_gather", purpose="p", payload_bytes=10**9, group_size=4, stride=stride))[0]
        for stride in (1, 4)
    )
    assert strided > 4 * whole  # four rings through each node's cards


def test_ranks_of_one_batch_count_its_tokens_once() -> None:
    speeds = [
        step_time(split_setup(preset, **degrees), Interconnect(gpu=find_gpu("h100"), world_size=4))
        for preset, degrees in (("fsdp2", {}), ("fsdp2_tp", {"tp": 2}), ("cp", {"cp": 4}))
    ]
    tokens = [None if speed is None else speed.tokens_per_step_per_gpu for speed in speeds]
    assert tokens == [128, 64, 32]

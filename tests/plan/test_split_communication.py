"""Communication of split layers, experts and sequences: counted in live ranks, and worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from counted_collectives import counted, planned
from launching import ROOT, accelerate_launch, read
from model_configs import small_shape

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.communication import step_collectives
from toolkit.plan.interconnect import Collective, Interconnect
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.plan.step_time import dimension_traffic, step_time
from toolkit.presets import load_preset


def setup_of(preset: str, model: str = "llama", *, world_size: int = 4, **job: Any) -> TrainingSetup:
    planned_job = PlannedJob(**{"per_device_train_batch_size": 2, "max_seq_length": 64, **job})
    return TrainingSetup(
        preset=load_preset(preset),
        shape=small_shape(model),
        world_size=world_size,
        job=planned_job,
        mixed_precision="no",
    )


def sent(setup: TrainingSetup) -> dict[str, Collective]:
    return {collective.purpose: collective for collective in step_collectives(setup)}


@pytest.mark.launch
def test_four_ranks_of_tensor_and_data_parallelism_send_what_is_planned(
    tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    """Collectives and model states of one run. Packed rows all have the full length; the head is tied."""
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    words += ["--packing", "true", "--tp", "2", "--save_strategy", "no", "--save_model", "false"]
    ended = accelerate_launch(
        ROOT / "accelerate_configs" / "fsdp2_tp.yaml",
        *(*words, "--output_dir", str(tmp_path / "run")),
        script="count_collectives.py",
        num_processes=4,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    setup = TrainingSetup(
        preset=load_preset("fsdp2_tp"),
        shape=read_model(str(tiny_model)),
        world_size=4,
        job=PlannedJob(
            per_device_train_batch_size=2, max_seq_length=64, gradient_accumulation_steps=2, tp=2, packing=True
        ),
        mixed_precision="no",
    )
    assert planned(setup) == counted(tmp_path / "run")
    ranks = read(tmp_path / "run" / "attestation.json")["ranks"]
    states = plan_memory(setup.shape, setup.preset, world_size=4, job=setup.job, mixed_precision="no").states
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert [rank[part] for rank in ranks] == [getattr(states, part)] * 4
    assert [rank["layout"] for rank in ranks] == [setup.layout.degrees() if setup.layout else None] * 4


def test_the_backward_sums_the_input_of_every_projection_into_heads_and_mlp() -> None:
    """Query, key, value, gate and up, and the head: counted on four CPU ranks as 22 calls in two accumulation steps."""
    found = sent(setup_of("fsdp2_tp", tp=2, gradient_accumulation_steps=2))
    inputs = found["gradients of the inputs of split layers"]
    outputs = found["outputs of split layers"]
    assert (inputs.calls, outputs.calls) == (2 * (5 * 2 + 1), 2 * (2 * 2 + 1))
    each = 2 * 64 * 32 * 4  # tokens, hidden size, fp32
    assert (inputs.payload_bytes, outputs.payload_bytes) == (22 * each, 10 * each)
    assert found["logits"].payload_bytes == 2 * (2 * 64 * 288 * 4)


def test_activation_checkpointing_repeats_the_sums_of_the_forward() -> None:
    once, twice = (
        sent(setup_of("fsdp2_tp", tp=2, activation_checkpointing=checkpointing))["outputs of split layers"].calls
        for checkpointing in (False, True)
    )
    assert (once, twice) == (5, 9)  # the embedding is not repeated


def test_fsdp2_gathers_and_reduces_only_a_ranks_part_of_each_layer() -> None:
    found = sent(setup_of("fsdp2_tp", tp=2))
    part = 9_216 + (9_280 - 64) + 64 * 2 + 32  # half of embedding and head, of two layers, and whole norms
    assert found["parameters in the forward"].payload_bytes == 4 * part
    assert found["gradients"].payload_bytes == 4 * part
    assert {found[name].group_size for name in ("gradients", "logits")} == {2}


def test_tensor_parallelism_alone_exchanges_no_model_states() -> None:
    assert {collective.dimension for collective in step_collectives(setup_of("tp", world_size=2, tp=2))} == {"tp"}


def test_experts_are_gathered_among_their_own_ranks() -> None:
    found = sent(setup_of("ep", "qwen3_moe", ep=2))
    experts = 4 * (64 * 32 + 32 * 32)  # of the 8 experts, 4 on each rank: gate and up, and down
    assert found["experts in the forward"].payload_bytes == 4 * 2 * experts
    assert (found["experts in the forward"].group_size, found["parameters in the forward"].group_size) == (2, 4)
    rows = found["rows of the experts"]
    assert rows.payload_bytes == 2 * 2 * 2 * (2 * 64 * 32 * 4) * 2  # there and back, both passes, 2 layers, top 2


def test_ring_attention_gathers_keys_and_values_and_sends_their_fp32_gradients_round() -> None:
    found = sent(setup_of("cp", world_size=2, cp=2))
    keys = 2 * 64 * 2 * 16  # keys and values of both layers: 2 heads of 8, for each token of the group
    assert found["keys and values"].payload_bytes == 2 * 2 * keys * 4
    assert found["gradients of keys and values"].sent_bytes == 2 * keys * 4


def test_ulysses_exchanges_heads_and_repeats_keys_that_are_too_few() -> None:
    two, four = (sent(setup_of("ulysses", world_size=4, sp=sp))["heads of attention"].payload_bytes for sp in (2, 4))
    assert two == 2 * 2 * 64 * (2 * 4 + 2 * 2) * 8 * 4  # both passes, both layers, a half of the tokens
    assert four == 2 * 2 * 32 * (2 * 4 + 2 * 4) * 8 * 4


def test_groups_of_neighbours_stay_within_a_node_and_the_others_share_its_network() -> None:
    nodes = Interconnect(gpu=find_gpu("h100"), world_size=16)
    setup = TrainingSetup(
        preset=load_preset("fsdp2_tp"),
        shape=small_shape("llama"),
        world_size=16,
        job=PlannedJob(max_seq_length=64, tp=4),
    )
    traffic = {each.dimension: each for each in dimension_traffic(step_collectives(setup), nodes)}
    assert (traffic["tp"].crosses_nodes, traffic["dp_shard"].crosses_nodes) == (False, True)
    whole, strided = (
        nodes.seconds(Collective(name="all_gather", purpose="p", payload_bytes=10**9, group_size=4, stride=stride))[0]
        for stride in (1, 4)
    )
    assert strided > 4 * whole  # four rings through each node's cards


def test_ranks_of_one_batch_count_its_tokens_once() -> None:
    speeds = [
        step_time(setup_of(preset, **degrees), Interconnect(gpu=find_gpu("h100"), world_size=4))
        for preset, degrees in (("fsdp2", {}), ("fsdp2_tp", {"tp": 2}), ("cp", {"cp": 4}))
    ]
    tokens = [None if speed is None else speed.tokens_per_step_per_gpu for speed in speeds]
    assert tokens == [128, 64, 32]

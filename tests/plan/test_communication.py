"""Planned communication volume: compared with collectives counted in real runs, and worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_collectives import assert_planned, counted, planned
from launching import CPU_PRESETS, ROOT, accelerate_launch, nightly_launch, read, torchrun
from model_configs import small_shape
from preset_files import deepspeed_pair

from toolkit.engines.planned import Collective
from toolkit.engines.zero import zero3_gathers
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape, Tensor
from toolkit.plan.communication import step_collectives
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.step_time import dimension_traffic, step_time
from toolkit.plan.training_setup import TrainingSetup
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
def words(tiny_job: list[str], tmp_path: Path) -> list[str]:
    """Two steps of two accumulation steps."""
    words = [*tiny_job, "--max_steps", "2", "--gradient_accumulation_steps", "2", "--save_strategy", "no"]
    return [*words, "--save_model", "false", "--output_dir", str(tmp_path / "run")]


@pytest.mark.launch
@pytest.mark.parametrize(
    "preset", [name if name in ENGINES else nightly(name) for name, ranks in CPU_PRESETS.items() if ranks > 1]
)
def test_each_payload_is_what_a_real_run_sends(preset: str, preset_runs: dict[str, Path], tiny_model: Path) -> None:
    assert_planned(on_cpu(preset, tiny_model, CPU_PRESETS[preset], PlannedJob()), preset_runs[preset])


@pytest.mark.launch
@pytest.mark.parametrize(("preset", "lora_rank"), [nightly("zero2", None), nightly("fsdp2", 8)])
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
    return deepspeed_pair(folder, config | {"zero_optimization": zero})


@nightly_launch
@pytest.mark.parametrize(("preset", "ranks"), [("hpz", 4), ("fsdp2_hybrid", 64)])
def test_rank_0_of_many_is_planned(preset: str, ranks: int, words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    """In one process, with torch's fake process group: what would be sent is counted, nothing is."""
    config = two_node_preset(tmp_path) if preset == "hpz" else ROOT / "accelerate_configs" / f"{preset}.yaml"
    words += ["--per_device_train_batch_size", "1"]
    ended = torchrun("count_collectives.py", "--alone", str(config), str(ranks), *words, num_processes=1)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert_planned(on_cpu(str(config), tiny_model, ranks), tmp_path / "run")


@nightly_launch
def test_tensor_and_data_parallelism_send_what_is_planned(words: list[str], tiny_model: Path, tmp_path: Path) -> None:
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


def recorded_setup(name: str, shape: ModelShape) -> TrainingSetup:
    """`fsdp2 n8 a2 whole`: the preset, its ranks, its accumulation steps, and what else was set."""
    preset, ranks, steps, *extras = name.split()
    job = PlannedJob(
        gradient_accumulation_steps=int(steps.removeprefix("a")),
        accumulate="whole" if "whole" in extras else None,
        lora_r=8 if "lora" in extras else None,
        activation_checkpointing="ckpt" in extras,
    )
    place = {"preset": load_preset(preset), "shape": shape, "world_size": int(ranks.removeprefix("n"))}
    return TrainingSetup(**place, job=job, mixed_precision="no")


def test_the_payloads_that_were_counted_once_in_37_settings_are_planned(tmp_path: Path) -> None:
    """docs/evidence/plan-accuracy.md says what was run. The model is a Llama of six layers."""
    config = {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 512, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model(str(tmp_path))
    facts, *rows = map(json.loads, (ROOT / "benchmarks/results/communication.jsonl").read_text().splitlines())
    assert (facts["num_params"], len(rows)) == (shape.num_params, 37)
    for row in rows:
        payloads = {name: pytest.approx(payload, rel=0.01) for name, payload in row["counted"].items()}
        assert planned(recorded_setup(row["setting"], shape)) == payloads, row["setting"]


LAYER = (Tensor(name="mlp.weight", shape=(8, 8)), Tensor(name="norm.weight", shape=(8,)))
SMALL = ModelShape(
    **{"model_type": "llama", "num_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2},
    **{"num_kv_heads": 2, "head_dim": 4, "vocab_size": 100, "gated_mlp": False, "tied_embeddings": False},
    layers=(LAYER, LAYER),
    outer=(Tensor(name="embed_tokens.weight", shape=(100, 8)), Tensor(name="lm_head.weight", shape=(100, 8))),
)
PARAMS = 2 * 72 + 1600
ACCUMULATES_3 = {"gradient_accumulation_steps": 3}


def setup_of(preset: str, *, shape: ModelShape = SMALL, world_size: int = 4, **job: Any) -> TrainingSetup:
    return TrainingSetup(preset=load_preset(preset), shape=shape, world_size=world_size, job=PlannedJob(**job))


def sent(setup: TrainingSetup) -> dict[str, Collective]:
    return {collective.purpose: collective for collective in step_collectives(setup)}


@pytest.mark.parametrize(
    ("preset", "how", "purpose", "payload_bytes"),
    [
        ("ddp", {"gradient_accumulation_steps": 4}, "gradients", 4 * PARAMS),  # fp32, once per step
        ("fsdp2", {}, "parameters in the forward", 2 * PARAMS),
        ("fsdp2", {}, "parameters in the backward", 2 * (PARAMS - 800)),  # the head stays from forward to backward
        ("fsdp2", {}, "gradients", 2 * PARAMS),
        ("fsdp2", {"world_size": 16}, "gradients", 2 * (2 * (16 * 8 + 16) + 2 * 112 * 8)),  # padded rows
        ("fsdp2", ACCUMULATES_3, "parameters in the forward", 3 * 2 * PARAMS),
        ("fsdp2", ACCUMULATES_3, "gradients", 3 * 2 * PARAMS),
        ("fsdp2", {**ACCUMULATES_3, "accumulate": "whole"}, "gradients", 2 * PARAMS),
        ("fsdp2", {**ACCUMULATES_3, "accumulate": "whole"}, "parameters in the forward", 3 * 2 * PARAMS),
        ("fsdp2_hybrid", {}, "gradients between replicas", 2 * PARAMS // 2),
        # ZeRO-1 reduces once and ZeRO-2 in every step, and both parameter groups are multiples of 8 already
        ("zero1", ACCUMULATES_3, "gradients", 2 * PARAMS),
        ("zero2", ACCUMULATES_3, "gradients", 3 * 2 * PARAMS),
        ("zero2", ACCUMULATES_3, "updated parameters", 2 * (1728 + 16)),
        # one byte per weight between nodes, once per step; the rest stays: 64 elements and less
        ("zeropp", {**ACCUMULATES_3, "world_size": 16}, "parameters in the step's first use", 1600),
        ("zeropp", {**ACCUMULATES_3, "world_size": 16}, "gradients", 3 * (PARAMS + 16) // 2),
        ("zeropp", {**ACCUMULATES_3, "world_size": 16}, "gradients between nodes", 3 * (PARAMS + 16) // 2 // 8),
    ],
)
def test_payloads_worked_out_by_hand(preset: str, how: dict[str, Any], purpose: str, payload_bytes: int) -> None:
    assert sent(setup_of(preset, **how))[purpose].payload_bytes == payload_bytes


def test_one_process_sends_nothing_and_a_ring_reduces_and_gathers() -> None:
    assert step_collectives(setup_of("single", world_size=1)) == ()
    (reduction,) = step_collectives(setup_of("ddp"))
    assert (reduction.name, reduction.sent_bytes) == ("all_reduce", 4 * PARAMS * 2 * 3 // 4)


def test_zero3_gathers_a_small_model_once_and_a_large_one_again() -> None:
    setup = setup_of("zero3")
    first, again = zero3_gathers(setup, persistent=8, reuse=10**9)
    assert (sum(first.elements()), dict(again)) == (64 * 2 + 800 * 2, {})
    first, again = zero3_gathers(setup, persistent=8, reuse=0)
    assert again == first
    # The head is used again at once; the last layer after the head and a norm twice, 1,616 elements later.
    assert dict(zero3_gathers(setup, persistent=8, reuse=1617)[1]) == {64: 1, 800: 1}
    recomputed = setup_of("zero3", activation_checkpointing=True)
    assert zero3_gathers(recomputed, persistent=8, reuse=0)[1][64] == 4  # each layer once more


# -- split layers, experts and sequences


def split_setup(preset: str, model: str = "llama", *, world_size: int = 4, **job: Any) -> TrainingSetup:
    size = {"per_device_train_batch_size": 2, "max_seq_length": 64}
    setup = setup_of(preset, shape=small_shape(model), world_size=world_size, **{**size, **job})
    return replace(setup, mixed_precision="no")


TOKENS, HIDDEN, FP32 = 2 * 64, 32, 4
PART = 9_216 + (9_280 - 64) + 64 * 2 + 32  # half of embedding and head, of two layers, and whole norms
EXPERTS = 4 * (64 * 32 + 32 * 32)  # of the 8 experts, 4 on each rank: gate and up, and down
KEYS = TOKENS * 2 * 2 * 8 * 2  # keys and values of both layers: 2 heads of 8, for each token of the group


@pytest.mark.parametrize(
    ("preset", "model", "how", "purpose", "payload", "calls", "group_size"),
    [
        # query, key, value, gate and up of two layers, and the head; counted on four CPU ranks
        ("fsdp2_tp", "llama", {"tp": 2}, "gradients of the inputs of split layers", 11 * TOKENS * HIDDEN * FP32, 11, 2),
        ("fsdp2_tp", "llama", {"tp": 2}, "outputs of split layers", 5 * TOKENS * HIDDEN * FP32, 5, 2),
        # the forward's sums are repeated, without the embedding's
        ("fsdp2_tp", "llama", {"tp": 2, "activation_checkpointing": True}, "outputs of split layers", 9 * 16_384, 9, 2),
        ("fsdp2_tp", "llama", {"tp": 2}, "logits", TOKENS * 288 * FP32, 1, 2),
        ("fsdp2_tp", "llama", {"tp": 2}, "parameters in the forward", FP32 * PART, 3, 2),
        ("fsdp2_tp", "llama", {"tp": 2}, "gradients", FP32 * PART, 3, 2),
        ("ep", "qwen3_moe", {"ep": 2}, "experts in the forward", FP32 * 2 * EXPERTS, 2, 2),
        # there and back, both passes, 2 layers, top 2
        ("ep", "qwen3_moe", {"ep": 2}, "rows of the experts", 2 * 2 * 2 * TOKENS * HIDDEN * FP32 * 2, 8, 2),
        ("cp", "llama", {"cp": 2}, "keys and values", 2 * KEYS * FP32, 4, 2),
        ("cp", "llama", {"cp": 2}, "gradients of keys and values", KEYS * FP32, 4, 2),
        # both passes, both layers, a half of the tokens; with four ranks there are too few keys
        ("ulysses", "llama", {"sp": 2}, "heads of attention", 2 * 2 * 64 * (2 * 4 + 2 * 2) * 8 * FP32, 16, 2),
        ("ulysses", "llama", {"sp": 4}, "heads of attention", 2 * 2 * 32 * (2 * 4 + 2 * 4) * 8 * FP32, 16, 4),
    ],
)
def test_collectives_of_split_models_worked_out_by_hand(
    preset: str, model: str, how: dict[str, Any], purpose: str, payload: int, calls: int, group_size: int
) -> None:
    found = sent(split_setup(preset, model, **how))[purpose]
    assert (found.payload_bytes, found.calls, found.group_size) == (payload, calls, group_size)


def test_groups_of_neighbours_stay_within_a_node_and_the_others_share_its_network() -> None:
    nodes = Interconnect(gpu=find_gpu("h100"), world_size=16)
    setup = split_setup("fsdp2_tp", world_size=16, tp=4)
    traffic = {each.dimension: each for each in dimension_traffic(step_collectives(setup), nodes)}
    assert (traffic["tp"].crosses_nodes, traffic["dp_shard"].crosses_nodes) == (False, True)
    gathers = (Collective("all_gather", "p", 10**9, group_size=4, stride=stride) for stride in (1, 4))
    whole, strided = (nodes.seconds(gather)[0] for gather in gathers)
    assert strided > 4 * whole  # four rings through each node's cards


@pytest.mark.parametrize(
    ("preset", "degrees", "tokens"), [("fsdp2", {}, 128), ("fsdp2_tp", {"tp": 2}, 64), ("cp", {"cp": 4}, 32)]
)
def test_ranks_of_one_batch_count_its_tokens_once(preset: str, degrees: dict[str, int], tokens: int) -> None:
    speed = step_time(split_setup(preset, **degrees), Interconnect(gpu=find_gpu("h100"), world_size=4))
    assert speed is not None
    assert speed.tokens_per_step_per_gpu == tokens

"""Planned memory of split layers, experts and sequences, against live ranks and against published figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, ROOT
from model_configs import llama_8b, small_shape
from planned_commands import planned_command
from split_runs import SIZES

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.activations import Activations
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import FITS, MemoryPlan, plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.step_time import step_time
from toolkit.plan.training_setup import TrainingSetup
from toolkit.presets import load_preset
from toolkit.units import GIB

ATTENTION = {"lora_r": 4, "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
# Parameters, gradients and optimizer states of every rank, as `attestation.json` of
# `toolkit train --preset PRESET --num-processes N --cpu -- --tp 2 ...` has them: fp32 ranks on gloo, transformers 5.23,
# accelerate 1.15, deepspeed 0.19.8, peft 0.21, torch 2.13.
LIVE = [("tp", "llama", 2, {"tp": 2}, (74_368, 92_800, 148_736))]
LIVE += [("tp", "llama_tied", 2, {"tp": 2}, (55_936, 55_936, 111_872))]
LIVE += [("tp", "llama_tied", 4, {"tp": 2}, (55_936, 55_936, 111_872))]
LIVE += [("tp", "qwen3_moe", 2, {"tp": 2}, (150_272, 168_704, 300_544))]
LIVE += [("tp", "qwen3", 2, {"tp": 2, "lora_r": 4}, (86_272, 11_776, 23_552))]
LIVE += [("fsdp2_tp", "llama", 4, {"tp": 2}, (37_184, 37_184, 74_368))]
LIVE += [("fsdp2_tp", "llama_mha", 4, {"tp": 2}, (39_232, 39_232, 78_464))]
LIVE += [("fsdp2_tp", "qwen3", 4, {"tp": 2, "lora_r": 4}, (49_024, 11_776, 23_552))]
LIVE += [("fsdp2_tp", "qwen3_moe", 4, {"tp": 2}, (75_136, 75_136, 150_272))]
LIVE += [("hsdp_tp", "llama", 8, {"tp": 2}, (37_184, 37_184, 74_368))]
LIVE += [("ep", "qwen3_moe", 2, {"ep": 2}, (148_864, 148_864, 297_728))]
LIVE += [("ep", "qwen3_moe", 4, {"ep": 2}, (74_432, 74_432, 148_864))]
LIVE += [("ep", "qwen3_moe", 2, {"ep": 2, **ATTENTION}, (156_032, 7_168, 14_336))]
LIVE += [("ep_tp", "qwen3_moe", 4, {"tp": 2, "ep": 2}, (75_136, 75_136, 150_272))]
LIVE += [("ep_tp", "qwen3_moe", 4, {"tp": 2, "ep": 2, **ATTENTION}, (80_768, 5_632, 11_264))]
LIVE += [("pipeline_1f1b", "llama", 2, {"pp": 2, "gradient_accumulation_steps": 2}, (73_984, 73_984, 147_968))]
LIVE += [("pipeline_1f1b", "llama_tied", 4, {"pp": 2, "gradient_accumulation_steps": 2}, (73_984, 73_984, 147_968))]
LIVE += [("cp", "llama", 2, {"cp": 2}, (74_048, 74_048, 148_096))]
LIVE += [("cp", "qwen3", 4, {"cp": 2, "lora_r": 4}, (41_152, 4_096, 8_192))]
LIVE += [("ulysses", "llama", 2, {"sp": 2}, (74_688, 74_048, 222_144))]
LIVE += [("ulysses", "qwen3", 4, {"sp": 2}, (37_824, 37_056, 111_168))]


@pytest.mark.parametrize(("preset", "model", "ranks", "job", "live"), LIVE)
def test_planned_states_are_those_of_live_ranks(preset: str, model: str, ranks: int, job: Any, live: Any) -> None:
    planned, chosen = PlannedJob(**job), load_preset(preset)
    states = plan_memory(small_shape(model), chosen, world_size=ranks, job=planned, mixed_precision="no").states
    # A pipeline's plan is that of the last rank, whose logits need most; live was rank 0, which has no final norm.
    norm = 4 * small_shape(model).hidden_size if "pp" in job else 0
    planned_bytes = (states.parameter_bytes - norm, states.gradient_bytes - norm, states.optimizer_bytes - 2 * norm)
    assert planned_bytes == live


def on_gpus(preset: str, *, length: int, ranks: int = 8, shape: ModelShape | None = None, **job: Any) -> MemoryPlan:
    how = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "loss": "full", **job}
    planned = PlannedJob(max_seq_length=length, **how)
    return plan_memory(shape or llama_8b(), load_preset(preset), world_size=ranks, job=planned)


def test_logits_are_whole_where_layers_are_split_and_divided_where_sequences_are() -> None:
    def logits(preset: str, **job: Any) -> int:
        return max(phase.logits_bytes for phase in on_gpus(preset, length=32_768, **job).phases)

    whole = 12 * 32_768 * 128_256
    assert logits("fsdp2") == logits("fsdp2_tp", tp=4) == whole
    assert logits("cp", cp=4) == logits("ulysses", sp=4) == whole // 4


def test_the_loss_is_full_where_ranks_share_a_batch_and_chunked_where_experts_are_dealt() -> None:
    def logits(preset: str, model: str, **job: Any) -> int:
        job |= {"per_device_train_batch_size": 64, "loss": "chunked"}
        plan = on_gpus(preset, length=64, ranks=4, shape=small_shape(model), **job)
        return max(phase.logits_bytes for phase in plan.phases)

    full = 12 * 64 * 64 * 288
    assert logits("fsdp2_tp", "llama", tp=2) == full
    assert logits("ep", "qwen3_moe", ep=2) < full / 2
    assert logits("cp", "llama", cp=2) == logits("ulysses", "llama", sp=2) < full / 4


# --- torchtitan, Llama 3.1 8B on 8 H100 of 96 GB: FSDP × CP, full activation checkpointing, one sequence per group,
# with compilation and Float8 (`performance.md` in its docs, table 2): cp, length, tokens per second, GiB ---
TORCHTITAN = [(1, 32_768, 3890, 83.9), (2, 65_536, 2540, 84.2), (4, 131_072, 1071, 84.0), (8, 262_144, 548, 84.5)]


def titan_job(cp: int, length: int) -> tuple[str, PlannedJob]:
    job = PlannedJob(per_device_train_batch_size=1, max_seq_length=length, activation_checkpointing=True, loss="full")
    return ("cp", replace(job, cp=cp)) if cp > 1 else ("fsdp2", job)


def test_torchtitans_peaks_stay_flat_as_context_and_ranks_grow_together() -> None:
    jobs = [titan_job(cp, length) for cp, length, _, _ in TORCHTITAN]
    plans = [plan_memory(llama_8b(), load_preset(preset), world_size=8, job=job) for preset, job in jobs]
    peaks = [plan.planned_peak_bytes / GIB for plan in plans]
    assert max(peaks) < 1.02 * min(peaks)  # measured: 83.9 to 84.5 GiB
    assert peaks == [pytest.approx(gib, rel=0.15) for *_, gib in TORCHTITAN]  # the margin of a verdict


def test_torchtitans_speeds_are_inside_the_planned_ranges() -> None:
    for cp, length, measured, _ in TORCHTITAN:
        preset, job = titan_job(cp, length)
        setup = TrainingSetup(shape=llama_8b(), preset=load_preset(preset), world_size=8, job=job)
        speed = step_time(setup, Interconnect(gpu=find_gpu("h100"), world_size=8))
        assert speed is not None
        low, high = speed.tokens_per_second_per_gpu
        assert low < measured < high
        assert ("a ring of GPUs that share a sequence" in speed.wider_for) == (cp > 1)


# --- Hugging Face's Ulysses benchmark (blog "Ulysses Sequence Parallelism", March 2026): Qwen3-4B, SP 4, ZeRO-3 on
# 4 H100, one sequence; its logits alone are 1.82 MB per token of a rank ---
ULYSSES_GB = {8_192: 22.8, 65_536: 50.5, 98_304: 66.0}


def ulysses_gb(length: int) -> float:
    shape = read_model(str(LLAMA_8B_CONFIG.parents[1] / "qwen3-4b" / "config.json"))
    return on_gpus("ulysses", length=length, ranks=4, shape=shape, sp=4).peak.allocated_bytes / 1e9


def test_ulysses_peaks_have_the_published_size_and_slope() -> None:
    planned = {length: ulysses_gb(length) for length in ULYSSES_GB}
    assert planned == {length: pytest.approx(gb, rel=0.05) for length, gb in ULYSSES_GB.items()}
    slope = (planned[98_304] - planned[65_536]) / 32.768
    assert slope == pytest.approx(0.484, rel=0.07)  # GB per 1,000 tokens


# --- long rows: one sequence of 1,048,576 tokens on 8 H100, TRL's chunked loss, peaks in GB of huggingface/trl#6845 and
# accelerate#4175; models of 30 billion parameters with `fsdp_offload_params`, the largest with its MLP in tiles ---
OFFLOAD = "--activation-checkpointing-offload"
TRL_GB = [("Qwen3-0.6B", "cp", "", 27.9), ("Qwen3-0.6B", "cp", OFFLOAD, 20.8), ("Qwen3-8B", "cp", OFFLOAD, 56.2)]
TRL_GB += [("Qwen3-30B-A3B", "offload", OFFLOAD, 46.0), ("Qwen3-32B", "offload", f"{OFFLOAD} --tiled-mlp", 60.8)]


@pytest.fixture(scope="module")
def cp_with_offload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preset with parameters and optimizer in host memory."""
    path = tmp_path_factory.mktemp("preset") / "cp_offload.yaml"
    text = (ROOT / "accelerate_configs" / "cp.yaml").read_text()
    path.write_text(text.replace("  fsdp_state_dict_type", "  fsdp_offload_params: true\n  fsdp_state_dict_type"))
    return path


@pytest.mark.parametrize(("model", "preset", "words", "gb"), TRL_GB)
def test_peaks_of_a_million_tokens_are_those_that_were_published(
    model: str, preset: str, words: str, gb: float, cp_with_offload: Path
) -> None:
    preset = str(cp_with_offload) if preset == "offload" else preset
    job = f"--cp 8 --max-seq-length 1048576 --per-device-train-batch-size 1 --activation-checkpointing {words}"
    plan = planned_command(f"{model} --gpu h100 --num-processes 8 --preset {preset} {job}")
    assert plan.memory.peak.allocated_bytes / 1e9 == pytest.approx(gb, rel=0.03)
    assert plan.verdict == FITS


def test_offloaded_checkpoints_leave_one_layers_input_on_the_gpu_and_all_in_host_memory() -> None:
    here, moved = (
        on_gpus("fsdp2", length=32_768, loss="chunked", activation_checkpointing_offload=offload)
        for offload in (False, True)
    )
    inputs = 32_768 * 4096 * 2
    kept = [phase.activation_bytes for plan in (here, moved) for phase in plan.phases if phase.phase == "forward"]
    assert kept[0] - kept[1] == 31 * inputs
    assert moved.host.training_bytes - here.host.training_bytes == 8 * 32 * inputs  # a power of two


def test_selective_checkpointing_keeps_attentions_output_and_a_statistic_per_head() -> None:
    full, selective = (
        on_gpus("fsdp2", length=32_768, loss="chunked", activation_checkpointing_selective=kept)
        for kept in (False, True)
    )
    kept = [phase.activation_bytes for plan in (full, selective) for phase in plan.phases if phase.phase == "forward"]
    assert kept[1] - kept[0] == 32 * 32_768 * (2 * 32 * 128 + 4 * 32)  # layers x tokens x (bf16 + fp32)


def test_a_checkpoint_saves_one_input_per_layer_which_is_what_an_offload_moves() -> None:
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **{**SIZES, "num_hidden_layers": 3})
    model, moved = AutoModelForCausalLM.from_config(config), []

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Where transformers puts `save_on_cpu`."""
        with saved_tensors_hooks(lambda tensor: moved.append(tensor.nbytes) or tensor, lambda tensor: tensor):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=counted)
    model.train()
    model(input_ids=torch.zeros((1, 40), dtype=torch.long), use_cache=False).logits.sum().backward()
    assert sum(moved) == 3 * 40 * 32 * 4


def test_the_ranks_of_a_ring_save_attentions_output_twice() -> None:
    """It is in the order of the heads, and the next linear layer saves a copy in that of the tokens."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kernel, by_token = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, []
    tensors = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    for rank in range(3):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            out, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, kernel, *tensors, is_causal=True)
        finally:
            dist.destroy_process_group()
        by_token.append(out.transpose(1, 2).is_contiguous())
    assert by_token == [False, False, False]
    # per token and layer of Qwen3-0.6B: 16 heads of 128, in bf16; `cp` on an H200 needed 28 x 4,096 tokens of it more
    shape = read_model("Qwen3-0.6B")
    alone, shared = (
        Activations(shape=shape, layout=layout).saved("none").largest_layer.per_token
        for layout in (None, ParallelLayout(cp=2))
    )
    assert shared - alone == 4096


def test_narrow_experts_backward_holds_three_copies_of_their_rows() -> None:
    """Counted for Qwen3-30B-A3B's layers on 2 x 131,072 tokens; wide experts have their MLP's gradients instead."""
    narrow = replace(small_shape("qwen3_moe"), hidden_size=2048, intermediate_size=768, experts_per_token=8)
    assert Activations(shape=narrow).saved("none").backward.per_token == 106_496
    wide = replace(narrow, intermediate_size=7168, experts_per_token=2)
    assert Activations(shape=wide).saved("none").backward.per_token == 65_536

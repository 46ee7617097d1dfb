"""Planned memory of split layers, experts and sequences, against live ranks and against published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG
from model_configs import llama_8b, small_shape

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.plan.step_time import step_time
from toolkit.presets import load_preset
from toolkit.units import GIB

ATTENTION = {"lora_r": 4, "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
# Parameters, gradients and optimizer states of every rank, as `attestation.json` of
# `toolkit train --preset PRESET --num-processes N --cpu -- --tp 2 ...` has them: fp32 ranks on gloo, transformers 5.23,
# accelerate 1.15, deepspeed 0.19.8, peft 0.21, torch 2.13.
LIVE = [
    ("tp", "llama", 2, {"tp": 2}, (74_368, 92_800, 148_736)),
    ("tp", "llama_tied", 4, {"tp": 2}, (55_936, 55_936, 111_872)),
    ("tp", "qwen3_moe", 2, {"tp": 2}, (150_272, 168_704, 300_544)),
    ("tp", "qwen3", 2, {"tp": 2, "lora_r": 4}, (86_272, 11_776, 23_552)),
    ("fsdp2_tp", "llama", 4, {"tp": 2}, (37_184, 37_184, 74_368)),
    ("fsdp2_tp", "llama_mha", 4, {"tp": 2}, (39_232, 39_232, 78_464)),
    ("fsdp2_tp", "qwen3", 4, {"tp": 2, "lora_r": 4}, (49_024, 11_776, 23_552)),
    ("fsdp2_tp", "qwen3_moe", 4, {"tp": 2}, (75_136, 75_136, 150_272)),
    ("hsdp_tp", "llama", 8, {"tp": 2}, (37_184, 37_184, 74_368)),
    ("ep", "qwen3_moe", 2, {"ep": 2}, (148_864, 148_864, 297_728)),
    ("ep", "qwen3_moe", 4, {"ep": 2}, (74_432, 74_432, 148_864)),
    ("ep", "qwen3_moe", 2, {"ep": 2, **ATTENTION}, (156_032, 7_168, 14_336)),
    ("ep_tp", "qwen3_moe", 4, {"tp": 2, "ep": 2}, (75_136, 75_136, 150_272)),
    ("ep_tp", "qwen3_moe", 4, {"tp": 2, "ep": 2, **ATTENTION}, (80_768, 5_632, 11_264)),
    ("pipeline_1f1b", "llama", 2, {"pp": 2, "gradient_accumulation_steps": 2}, (73_984, 73_984, 147_968)),
    ("pipeline_1f1b", "llama_tied", 4, {"pp": 2, "gradient_accumulation_steps": 2}, (73_984, 73_984, 147_968)),
    ("cp", "llama", 2, {"cp": 2}, (74_048, 74_048, 148_096)),
    ("cp", "qwen3", 4, {"cp": 2, "lora_r": 4}, (41_152, 4_096, 8_192)),
    ("ulysses", "llama", 2, {"sp": 2}, (74_688, 74_048, 222_144)),
    ("ulysses", "qwen3", 4, {"sp": 2}, (37_824, 37_056, 111_168)),
]


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

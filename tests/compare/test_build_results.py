"""What side runs and the planner add to a row; MFU, HFU and cost, worked out by hand for the tiny Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison_records import node, row, trial

from toolkit.compare.build_results import flops_per_token, peak_flops, row_cost, side_run_columns, with_efficiency
from toolkit.compare.ledger import SideRunRecord, TrialRecord
from toolkit.compare.rows import RowKey
from toolkit.models.read_model import read_model

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}
GPUS = node("cuda", H100, H100)
# The tiny Llama: 2 layers of q 64x64, k and v 32x64, o 64x64, three of 64x128, two norms of 64; one final norm; a
# tied embedding of 49152 x 64.
LAYER = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
P = 2 * LAYER + 64 + 49152 * 64
ROW = row(tokens_per_second_per_gpu=500.0, non_padding_tokens_per_second=800.0, num_params=P, num_trainable_params=P)


def bf16_trial() -> TrialRecord:
    """760 tokens in two timed steps of 2 ranks x 2 sequences: 95 each."""
    problem = {"activation_checkpointing": False, "global_batch_size": 4}
    steps = {"step_tokens": [999, 400, 360], "timed_step_numbers": [2, 3]}
    return trial("ddp", 0, problem=problem, compute_dtype="bfloat16", **steps)


def test_flops_per_token_worked_out_by_hand(tiny_model: Path) -> None:
    """6 per parameter; attention 12 x layers x width x length, half of it causal; a tied embedding is multiplied."""
    shape = read_model(str(tiny_model))
    found = flops_per_token(shape, num_params=P, num_trainable_params=P, seq_length=100, activation_checkpointing=True)
    attention = 12 * 2 * 64 * 100
    assert found.full_attention == 6 * P + attention
    assert found.causal == 6 * P + attention // 2
    assert found.without_embeddings == found.causal
    assert found.hardware == 8 * P + attention // 2 + attention // 6
    assert (found.num_params, found.seq_length) == (P, 100)


def test_adapters_count_four_per_frozen_and_six_per_trained_parameter(tiny_model: Path) -> None:
    shape = read_model(str(tiny_model))
    found = flops_per_token(
        shape, num_params=P + 1000, num_trainable_params=1000, seq_length=100, activation_checkpointing=False
    )
    assert found.causal == 4 * P + 6 * 1000 + 6 * 2 * 64 * 100


def test_mfu_is_relative_to_the_dense_peak_and_counts_only_timed_steps(tiny_model: Path) -> None:
    """An H100's dense bf16 peak is 989 TFLOP/s."""
    found = with_efficiency(ROW, [bf16_trial()], shape=read_model(str(tiny_model)), environment=GPUS)
    attention = 12 * 2 * 64 * 95
    assert found.flops_per_token is not None
    assert found.flops_per_token.seq_length == 95
    assert found.mfu == pytest.approx(500 * (6 * P + attention // 2) / 989e12, rel=1e-3)
    assert found.mfu_full_attention == pytest.approx(500 * (6 * P + attention) / 989e12, rel=1e-3)
    assert found.hfu == found.mfu  # without activation checkpointing


def test_there_is_no_mfu_without_a_peak_a_shape_or_a_speed(tiny_model: Path) -> None:
    shape, trials = read_model(str(tiny_model)), [bf16_trial()]
    assert with_efficiency(ROW, trials, shape=None, environment=GPUS).mfu is None
    without_speed = ROW.updated(tokens_per_second_per_gpu=None)
    assert with_efficiency(without_speed, trials, shape=shape, environment=GPUS).mfu is None
    on_cpu = with_efficiency(ROW, trials, shape=shape, environment=node("cpu"))
    assert on_cpu.flops_per_token is not None
    assert (on_cpu.mfu, on_cpu.flops_per_token.seq_length) == (None, 95)
    assert peak_flops(node("cuda", {"name": "Imaginary 9000", "memory_bytes": 1}), "bfloat16") is None
    assert peak_flops(GPUS, "int8") is None


def test_the_cost_of_a_row_leaves_padding_out_and_a_cpu_costs_nothing() -> None:
    assert row_cost(ROW, on_cpu=False, price_per_gpu_hour=3.0) == pytest.approx(3.0 * 2 / 3600 / 800 * 1e6)
    assert row_cost(ROW, on_cpu=True, price_per_gpu_hour=3.0) is None


def test_a_row_has_only_the_columns_of_its_own_completed_side_runs() -> None:
    profile = {"communication_fraction": 0.25, "exposed_communication_fraction": 0.1}
    save = {"save_seconds": 3.0, "save_bytes": 7}
    records = [
        SideRunRecord.of(trial("ddp", 0), trial="ddp-n2-profile", kinds=["profile"], **profile),
        SideRunRecord.of(trial("ddp", 0), trial="ddp-n2-save", kinds=["save"], status="failed", **save),
        SideRunRecord.of(trial("zero2", 0), trial="zero2-n2-save", kinds=["save"], **save),
        trial("ddp", 0),
    ]
    by_name = {record.trial: record for record in records}
    ddp = side_run_columns(by_name, RowKey(preset="ddp", world_size=2))
    assert (ddp["communication_fraction"], ddp["save_seconds"]) == (0.25, None)
    assert side_run_columns(by_name, RowKey(preset="zero2", world_size=2))["save_bytes"] == 7

"""Operations of a token against hand-worked integers, and MFU against published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from published_runs import MPT, published

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.flops import TokenFlops, flops_of, mfu, num_matmul_params, token_flops
from toolkit.models.shape import ModelShape, Tensor


def flops_of_row(row: dict[str, str]) -> TokenFlops:
    width, layers = MPT[row["model"]]
    return token_flops(
        num_params=int(row["params"]),
        num_layers=layers,
        attention_width=width,
        seq_length=int(row["seq"]),
        recompute=row["ac"] == "True",
    )


def row_mfu(row: dict[str, str], flops_per_token: int, tokens_per_second: float) -> float:
    peak = find_gpu(row["gpu"]).peak_flops("bf16")
    share = mfu(tokens_per_second_per_gpu=tokens_per_second, flops_per_token=flops_per_token, peak_flops=peak)
    assert share is not None
    return 100 * share


def test_published_mfu_and_hfu_are_reproduced_within_a_tenth_of_a_point() -> None:
    """tokens/s is published without its fraction, which is worth up to 0.13 points of the slowest rows."""
    rows = published()
    assert len(rows) == 41
    beyond = []
    for row in rows:
        flops, whole = flops_of_row(row), float(row["tok_s_gpu"])
        for column, counted in (("mfu", flops.model_flops), ("hfu", flops.hardware_flops)):
            below, above = row_mfu(row, counted, whole), row_mfu(row, counted, whole + 1)
            assert below - 0.015 <= float(row[column]) <= above + 0.015, row
            beyond += [(row["model"], row["gpus"], column)] * (abs(below - float(row[column])) > 0.1)
    assert beyond == [("70b", "32", "mfu"), ("70b", "32", "hfu")]


# Parameters 1000, 2 layers of width 16, rows of 8 tokens: a score of full attention costs 2 * 16 * 8 multiply-adds.
SCORES = 2 * 16 * 8


@pytest.mark.parametrize(
    ("how", "model_flops", "hardware_flops"),
    [
        ({}, 6 * 1000 + 12 * SCORES, 6 * 1000 + 12 * SCORES),
        ({"causal": True}, 6 * 1000 + 6 * SCORES, 6 * 1000 + 6 * SCORES),
        ({"recompute": True}, 6 * 1000 + 12 * SCORES, 8 * 1000 + 16 * SCORES),
        ({"num_trainable_params": 10}, 4 * 990 + 6 * 10 + 12 * SCORES, 4 * 990 + 6 * 10 + 12 * SCORES),
    ],
    ids=["full", "causal", "recomputed", "LoRA"],
)
def test_operations_of_a_token(how: dict[str, Any], model_flops: int, hardware_flops: int) -> None:
    flops = token_flops(num_params=1000, num_layers=2, attention_width=16, seq_length=8, **how)
    assert (flops.model_flops, flops.hardware_flops) == (model_flops, hardware_flops)


MOE = ModelShape(
    model_type="mixtral",
    num_layers=1,
    hidden_size=4,
    intermediate_size=8,
    num_attention_heads=2,
    num_kv_heads=1,
    head_dim=3,
    vocab_size=10,
    gated_mlp=True,
    tied_embeddings=False,
    num_experts=4,
    experts_per_token=2,
    layers=((Tensor(name="attn.weight", shape=(4, 5)), Tensor(name="mlp.experts.gate", shape=(4, 8, 4))),),
    outer=(Tensor(name="embed_tokens.weight", shape=(10, 4)), Tensor(name="lm_head.weight", shape=(10, 4))),
)


def test_a_mixture_counts_what_one_token_passes_through() -> None:
    flops = flops_of(MOE, seq_length=8)
    active = 20 + 128 // 2 + 40 + 40
    assert flops.dense_forward == 2 * active
    assert flops.attention_forward == 4 * 1 * (2 * 3) * 8


def test_a_table_that_is_only_looked_up_can_be_left_out_and_a_tied_one_multiplies() -> None:
    assert num_matmul_params(MOE) == 20 + 64 + 40
    tied = replace(MOE, tied_embeddings=True, outer=MOE.outer[:1])
    assert num_matmul_params(tied) == 20 + 64 + 40
    assert flops_of(MOE, seq_length=8, count_embeddings=False).dense_forward == 2 * 124


def test_adapters_are_trained_beside_a_frozen_model() -> None:
    flops = flops_of(MOE, seq_length=8, num_adapter_params=6)
    assert flops.dense_forward == 2 * (164 + 6)
    assert flops.dense_backward == 2 * (164 + 6) + 2 * 6


def test_an_unknown_peak_gives_no_mfu() -> None:
    assert mfu(tokens_per_second_per_gpu=1, flops_per_token=1, peak_flops=None) is None
    assert find_gpu("t4").peak_flops("bf16") is None

"""Operations of a token against hand-worked integers, and MFU against published runs."""

from dataclasses import replace
from typing import Any

import pytest
from published_runs import MPT, mpt, published

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.flops import flops_of, mfu
from toolkit.models.shape import ModelShape, Tensor


def row_mfu(row: dict[str, str], flops_per_token: int, tokens_per_second: float) -> float:
    peak = find_gpu(row["gpu"]).peak_flops("bf16")
    share = mfu(tokens_per_second_per_gpu=tokens_per_second, flops_per_token=flops_per_token, peak_flops=peak)
    return 100 * share


def test_published_mfu_and_hfu_are_reproduced_within_a_tenth_of_a_point() -> None:
    """tokens/s is published without its fraction, which is worth up to 0.13 points of the slowest rows."""
    rows = published()
    assert len(rows) == 41
    beyond = []
    for row in rows:
        flops = flops_of(mpt(*MPT[row["model"]]), seq_length=int(row["seq"]), recompute=row["ac"] == "True")
        whole = float(row["tok_s_gpu"])
        for column, counted in (("mfu", flops.model_flops), ("hfu", flops.hardware_flops)):
            below, above = row_mfu(row, counted, whole), row_mfu(row, counted, whole + 1)
            assert below - 0.015 <= float(row[column]) <= above + 0.015, row
            beyond += [(row["model"], row["gpus"], column)] * (abs(below - float(row[column])) > 0.1)
    assert beyond == [("70b", "32", "mfu"), ("70b", "32", "hfu")]


MOE = ModelShape(
    **{"model_type": "mixtral", "num_layers": 1, "hidden_size": 4, "intermediate_size": 8, "vocab_size": 10},
    **{"num_attention_heads": 2, "num_kv_heads": 1, "head_dim": 3, "gated_mlp": True, "tied_embeddings": False},
    **{"num_experts": 4, "experts_per_token": 2},
    layers=((Tensor(name="attn.weight", shape=(4, 5)), Tensor(name="mlp.experts.gate", shape=(4, 8, 4))),),
    outer=(Tensor(name="embed_tokens.weight", shape=(10, 4)), Tensor(name="lm_head.weight", shape=(10, 4))),
)
# A token passes through 164 parameters, two of four experts; rows of 8 tokens: a score costs 6 * 8 multiply-adds.
ACTIVE, SCORES = 20 + 128 // 2 + 40 + 40, 6 * 8


@pytest.mark.parametrize(
    ("how", "model_flops", "recomputed"),
    [
        ({}, 6 * ACTIVE + 12 * SCORES, 0),
        ({"causal": True}, 6 * ACTIVE + 6 * SCORES, 0),
        ({"recompute": True}, 6 * ACTIVE + 12 * SCORES, 2 * ACTIVE + 4 * SCORES),
        ({"recompute": True, "recompute_attention": False}, 6 * ACTIVE + 12 * SCORES, 2 * ACTIVE),
        ({"num_trainable_params": 10}, 4 * ACTIVE + 2 * 10 + 12 * SCORES, 0),
        ({"num_adapter_params": 6}, 4 * (ACTIVE + 6) + 2 * 6 + 12 * SCORES, 0),
        ({"count_embeddings": False}, 6 * (ACTIVE - 40) + 12 * SCORES, 0),
    ],
    ids=["full", "causal", "recomputed", "recomputed without attention", "frozen", "LoRA", "looked up"],
)
def test_operations_of_a_token(how: dict[str, Any], model_flops: int, recomputed: int) -> None:
    flops = flops_of(MOE, seq_length=8, **how)
    assert (flops.model_flops, flops.hardware_flops - flops.model_flops) == (model_flops, recomputed)


def test_a_tied_embedding_multiplies_and_an_unknown_peak_gives_no_mfu() -> None:
    tied = replace(MOE, tied_embeddings=True, outer=MOE.outer[:1])
    assert flops_of(tied, seq_length=8, count_embeddings=False).dense_forward == 2 * (ACTIVE - 40)
    assert mfu(tokens_per_second_per_gpu=1, flops_per_token=1, peak_flops=None) is None
    assert find_gpu("t4").peak_flops("bf16") is None

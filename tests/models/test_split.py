"""What of a model can be divided, and the part that one rank has, worked out by hand."""

from typing import Any

import pytest
from model_configs import EXPERTS, TINY
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.models.activations import Activations
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import llama_shape
from toolkit.models.shape import ModelShape
from toolkit.models.split import part_of_rank, read_split, types_with_plan
from toolkit.parallel.layout import ParallelLayout
from toolkit.versions import model_plans

LLAMA = {
    **{"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 14_336, "vocab_size": 128_256},
}
QWEN3_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 128}
SIX_KEYS = {**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 6}
# Its plan is built by a call, so that its source has no literal to read.
NOT_LITERAL = {"hrm_text"}


def plans_of_class(model_type: str) -> dict[str, Any]:
    plans = {kind: getattr(CONFIG_MAPPING[model_type], f"base_model_{kind}_plan", None) for kind in ("tp", "ep")}
    return {kind: plan for kind, plan in plans.items() if plan}


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "phi3"])
def test_plans_are_those_of_transformers_own_classes(model_type: str) -> None:
    assert model_plans(model_type) == plans_of_class(model_type)


@pytest.mark.nightly
def test_all_plans_but_one_are_those_of_transformers_own_classes() -> None:
    expected = {model_type: plans_of_class(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert {model_type for model_type, plans in expected.items() if model_plans(model_type) != plans} == NOT_LITERAL
    assert len([plans for plans in expected.values() if plans]) > 90
    assert {"llama", "qwen3", "mistral"} <= set(types_with_plan("tp"))
    assert types_with_plan("ep") == tuple(sorted({"qwen3_moe", "mixtral"}.union(types_with_plan("ep"))))


@pytest.mark.parametrize(
    ("config", "dimension", "degree", "why"),
    [
        (LLAMA, "tp", 8, None),
        (LLAMA, "tp", 16, "16 does not divide its 8 key-value heads"),
        (LLAMA, "tp", 3, "3 does not divide its 32 attention heads"),
        ({**LLAMA, "intermediate_size": 14_337}, "tp", 2, "2 does not divide its 14,337 rows of its MLP"),
        (LLAMA, "ep", 2, "llama has no experts"),
        (LLAMA, "cp", 7, None),
        (LLAMA, "sp", 16, None),  # each key-value head is then on two ranks
        (LLAMA, "sp", 3, "3 does not divide its 32 attention heads"),
        (SIX_KEYS, "sp", 4, "4 neither divides its 6 key-value heads nor is a multiple of them"),
        (QWEN3_MOE, "ep", 8, None),
        (QWEN3_MOE, "ep", 3, "3 does not divide its 128 experts"),
        ({**LLAMA, "model_type": "gpt2"}, "tp", 2, "transformers has no plan for gpt2"),
    ],
)
def test_a_degree_must_divide_its_sizes(config: dict[str, Any], dimension: str, degree: int, why: str | None) -> None:
    assert read_split(config).why_not(dimension, degree) == why


def test_heads_are_read_of_models_without_groups_and_of_the_text_part_of_composite_ones() -> None:
    plain = read_split({"model_type": "llama", "num_attention_heads": 12})
    assert plain.sizes["num_key_value_heads"] == 12
    text = read_split({"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}})
    assert (text.model_type, text.sizes["num_key_value_heads"], "tp" in text.plans) == ("gemma3_text", 8, True)
    assert [read_split(LLAMA).nearest("tp", degree) for degree in (16, 8, 2)] == [8, 4, None]  # the largest below


SLIDES = "its attention slides over a window, which needs a mask"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sliding_window": 4096}, SLIDES),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, SLIDES),
        ({"attention_chunk_size": 8192}, "it attends within chunks, which needs a mask"),
        ({"layer_types": ["linear_attention"]}, "its linear attention carries a state along the sequence"),
        ({"attn_logit_softcapping": 50.0}, "it caps its attention scores"),
        ({"sliding_window": None}, None),
    ],
)
def test_attention_that_needs_a_whole_sequence_is_not_divided(fields: dict[str, Any], why: str | None) -> None:
    split = read_split({"model_type": "llama", "num_attention_heads": 8, **fields})
    assert (split.why_not("cp", 2), split.why_not("sp", 2)) == (why, why)
    assert split.why_not("tp", 2) is None


def shapes(part: ModelShape, layer: int = 0) -> dict[str, tuple[int, ...]]:
    return {tensor.name.removesuffix(".weight"): tensor.shape for tensor in (*part.layers[layer], *part.outer)}


SHAPE = llama_shape("llama", ConfigFields(TINY | {"attention_bias": True}, "config.json"))
MIXTURE = llama_shape("qwen3_moe", ConfigFields(TINY | EXPERTS, "config.json"))


def test_projections_are_split_by_rows_or_columns_the_vocabulary_is_split_and_norms_are_whole() -> None:
    part = shapes(part_of_rank(SHAPE, ParallelLayout(dp_shard=4, tp=2)))
    assert (part["self_attn.q_proj"], part["self_attn.k_proj"]) == ((16, 32), (8, 32))
    assert part["self_attn.o_proj"] == (32, 16)
    assert (part["mlp.up_proj"], part["mlp.down_proj"]) == ((24, 32), (32, 24))
    assert (part["self_attn.q_proj.bias"], part["self_attn.o_proj.bias"]) == ((16,), (32,))
    assert (part["model.embed_tokens"], part["lm_head"]) == ((48, 32), (48, 32))
    assert part["input_layernorm"] == part["model.norm"] == (32,)


def test_tensor_parallelism_splits_each_expert_and_expert_parallelism_deals_whole_ones() -> None:
    by_tp, by_ep = (
        shapes(part_of_rank(MIXTURE, ParallelLayout(dp_shard=2, **degree))) for degree in ({"tp": 2}, {"ep": 2})
    )
    assert (by_tp["mlp.experts.gate_up_proj"], by_tp["mlp.experts.down_proj"]) == ((6, 8, 32), (6, 32, 4))
    assert (by_ep["mlp.experts.gate_up_proj"], by_ep["mlp.experts.down_proj"]) == ((3, 16, 32), (3, 32, 8))
    assert by_tp["mlp.gate"] == by_ep["mlp.gate"] == (6, 32)  # the router
    assert by_ep["self_attn.q_proj"] == (32, 32)
    # Under both, experts are dealt and attention is split.
    part = part_of_rank(MIXTURE, ParallelLayout(dp_shard=2, tp=2, ep=2))
    assert (shapes(part)["mlp.experts.gate_up_proj"], shapes(part)["self_attn.q_proj"]) == ((3, 16, 32), (16, 32))
    assert (part.num_attention_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 8)


def saved_bytes(shape: ModelShape, layout: ParallelLayout | None) -> float:
    """Bytes per token that the largest layer saves."""
    return Activations(shape=shape, layout=layout).saved("none").largest_layer.per_token


def test_a_layer_saves_its_norms_and_inputs_whole_and_the_rest_divided() -> None:
    """16h for two norms and two inputs, 4(q + kv) + 4H for attention, 8f for the MLP, 8 for two statistics."""
    saved = [saved_bytes(part_of_rank(SHAPE, layout), layout) for layout in (None, ParallelLayout(dp_shard=4, tp=2))]
    whole, divided = 16 * 32 + 8, 4 * (32 + 16) + 4 * 4 + 8 * 48
    assert saved == [whole + divided, whole + divided // 2]


def test_sequence_parallelism_saves_the_output_of_attention_once_more_and_repeats_few_keys() -> None:
    saved = [saved_bytes(SHAPE, layout) for layout in (None, ParallelLayout(sp=2), ParallelLayout(sp=4))]
    assert [each - saved[0] for each in saved] == [0, 2 * 32, 2 * 32 + 4 * 16]  # 2 key-value heads for 4 ranks

"""The part of a model that one rank has under tensor and expert parallelism, worked out by hand."""

from model_configs import EXPERTS, TINY

from toolkit.models.activations import Activations
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import llama_shape
from toolkit.models.shape import ModelShape
from toolkit.models.split import part_of_rank
from toolkit.parallel.layout import ParallelLayout


def shapes(part: ModelShape, layer: int = 0) -> dict[str, tuple[int, ...]]:
    return {tensor.name.removesuffix(".weight"): tensor.shape for tensor in (*part.layers[layer], *part.outer)}


LLAMA = llama_shape("llama", ConfigFields(TINY | {"attention_bias": True}, "config.json"))
MIXTURE = llama_shape("qwen3_moe", ConfigFields(TINY | EXPERTS, "config.json"))


def test_projections_are_split_by_rows_or_columns_the_vocabulary_is_split_and_norms_are_whole() -> None:
    part = shapes(part_of_rank(LLAMA, ParallelLayout(dp_shard=4, tp=2)))
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
    saved = [saved_bytes(part_of_rank(LLAMA, layout), layout) for layout in (None, ParallelLayout(dp_shard=4, tp=2))]
    whole, divided = 16 * 32 + 8, 4 * (32 + 16) + 4 * 4 + 8 * 48
    assert saved == [whole + divided, whole + divided // 2]


def test_sequence_parallelism_saves_the_output_of_attention_once_more_and_repeats_few_keys() -> None:
    saved = [saved_bytes(LLAMA, layout) for layout in (None, ParallelLayout(sp=2), ParallelLayout(sp=4))]
    assert [each - saved[0] for each in saved] == [0, 2 * 32, 2 * 32 + 4 * 16]  # 2 key-value heads for 4 ranks

"""Where LoRA puts adapters. `test_checked_counts.py` compares them with peft's for every architecture."""

from __future__ import annotations

import pytest
from model_configs import EXPERTS, TINY

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.lora import RENAMED_TARGETS, check_lora_targets, lora_layer
from toolkit.models.shape import Layer, ModelShape


def shape_of(model_type: str) -> ModelShape:
    shape = shape_from_config(ConfigFields({"model_type": model_type} | TINY | EXPERTS, "config.json"))
    assert shape is not None
    return shape


def adapters(model_type: str, targets: tuple[str, ...]) -> Layer:
    """The adapters of rank 4 in the first layer."""
    shape = shape_of(model_type)
    return lora_layer(shape, shape.layers[0], 4, targets)


def test_named_modules_are_matched_by_the_ends_of_their_names() -> None:
    first = adapters("llama", ("q_proj", "mlp.up_proj", "proj"))
    assert [tensor.name.split(".lora")[0] for tensor in first][::2] == ["self_attn.q_proj", "mlp.up_proj"]


def test_each_expert_has_its_own_adapters_of_twice_the_rank_on_gate_and_up() -> None:
    first = adapters("qwen3_moe", ("gate_proj", "up_proj"))
    assert [tensor.shape for tensor in first] == [(6 * 2 * 4, 32), (2 * 8, 6 * 2 * 4)]


def test_half_of_a_fused_tensor_is_refused_as_peft_refuses_it() -> None:
    with pytest.raises(ToolkitError, match="LoRA on gate_proj needs up_proj too: qwen3_moe has both in one tensor"):
        check_lora_targets(shape_of("qwen3_moe"), ("gate_proj",))


def test_adapters_outside_the_layers_are_not_planned() -> None:
    with pytest.raises(ToolkitError, match="LoRA on lm_head is not planned"):
        check_lora_targets(shape_of("llama"), ("q_proj", "lm_head"))


def test_a_name_that_no_layer_has_is_an_error_with_the_names_that_there_are() -> None:
    with pytest.raises(ToolkitError, match="no linear layer of llama is named c_attn") as error:
        check_lora_targets(shape_of("llama"), ("c_attn",))
    assert "q_proj" in str(error.value.hint)


def test_the_renamed_modules_are_pefts() -> None:
    from toolkit.models.count_from_transformers import _renamed_targets

    for model_type in ("mixtral", "qwen2_moe", "qwen3_moe"):
        assert _renamed_targets(model_type) == RENAMED_TARGETS.get(model_type, {})

"""Where LoRA puts adapters. `test_checked_counts.py` compares them with peft's for every architecture."""

from __future__ import annotations

import pytest
from model_configs import EXPERTS, TINY

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.job_weights import job_weights
from toolkit.models.lora import RENAMED_TARGETS, check_lora_targets, lora_layer
from toolkit.models.shape import ModelShape


def shape_of(model_type: str) -> ModelShape:
    shape = shape_from_config(ConfigFields({"model_type": model_type} | TINY | EXPERTS, "config.json"))
    assert shape is not None
    return shape


def test_named_modules_are_matched_by_the_ends_of_their_names() -> None:
    shape = shape_of("llama")
    adapters = lora_layer(shape, shape.layers[0], 4, ("q_proj", "mlp.up_proj", "proj"))
    assert [tensor.name.split(".lora")[0] for tensor in adapters][::2] == ["self_attn.q_proj", "mlp.up_proj"]
    shape = shape_of("qwen3_moe")  # each expert has its own adapters, of twice the rank on gate and up
    adapters = lora_layer(shape, shape.layers[0], 4, ("gate_proj", "up_proj"))
    assert [tensor.shape for tensor in adapters] == [(6 * 2 * 4, 32), (2 * 8, 6 * 2 * 4)]


@pytest.mark.parametrize(
    ("model_type", "targets", "message"),
    [
        ("qwen3_moe", ("gate_proj",), "LoRA on gate_proj needs up_proj too: qwen3_moe has both in one tensor"),
        ("llama", ("q_proj", "lm_head"), "LoRA on lm_head is not planned"),
        ("llama", ("c_attn",), "no linear layer of llama is named c_attn"),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(model_type: str, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_lora_targets(shape_of(model_type), targets)


def test_the_renamed_modules_are_pefts() -> None:
    from toolkit.models.count_from_transformers import _renamed_targets

    for model_type in ("mixtral", "qwen2_moe", "qwen3_moe"):
        assert _renamed_targets(model_type) == RENAMED_TARGETS.get(model_type, {})


def test_targets_that_no_layer_has_train_nothing() -> None:
    shape = shape_from_config(ConfigFields(TINY | {"model_type": "llama"}, "config.json"))
    weights = job_weights(shape, 4, lora_target_modules=("qproj",))
    assert (weights.num_trained, weights.largest_trained) == (0, 0)

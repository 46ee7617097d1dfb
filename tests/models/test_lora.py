"""Where LoRA puts adapters. `test_checked_counts.py` compares them with peft's for every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_configs import EXPERTS, TINY
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import ToolkitError
from toolkit.models.activations import Activations
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.fake_tensors import LiveMemory
from toolkit.models.job_weights import job_weights
from toolkit.models.lora import ALL_LINEAR, RENAMED_TARGETS, check_dora, check_lora_targets, dora_bytes, lora_layer
from toolkit.models.shape import Adapter, ModelShape


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


def _kept(tokens: int = 64, **fields: Any) -> tuple[int, int]:
    """Return trained parameters, and bytes that the backward pass of a small Llama keeps, each storage once."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=128))
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **fields))
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # the address of a freed storage would be used again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows = torch.arange(tokens).reshape(2, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=rows, labels=rows)
    return model.get_nb_trainable_parameters()[0], sum(kept.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks
def test_rslora_keeps_what_lora_does_and_dora_keeps_more() -> None:
    """So a plan has the one as LoRA, and for the other a magnitude and two saved elements per output."""
    lora, rslora, dora = _kept(), _kept(use_rslora=True), _kept(use_dora=True)
    assert rslora == lora
    outputs = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)  # of the adapted layers
    assert dora[0] - lora[0] == outputs
    per_token = ((_kept(128, use_dora=True)[1] - dora[1]) - (_kept(128)[1] - lora[1])) / 64
    assert per_token == 2 * 4 * outputs  # in fp32


def shape_of_kept() -> ModelShape:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 128}
    shape = shape_from_config(ConfigFields({"model_type": "llama"} | sizes, "config.json"))
    assert shape is not None
    return shape


def test_dora_is_planned_with_what_peft_trains_and_saves() -> None:
    shape = shape_of_kept()
    lora, dora = (job_weights(shape, 4, dora=each).num_trained for each in (False, True))
    assert dora - lora == 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    plain, scaled = (
        Activations(shape=shape, lora_r=4, dora_targets=targets).saved("none") for targets in ((), ("all-linear",))
    )
    assert scaled.layers.per_token - plain.layers.per_token == 2 * 2 * (dora - lora)  # bf16


@pytest.mark.parametrize(("columns", "rows"), [(512, 128), (128, 512), (256, 256), (384, 640), (1024, 32)])
def test_the_norms_of_dora_take_what_is_planned_and_free_it(columns: int, rows: int) -> None:
    """The peak of a forward pass of one token, where the norms are all that counts."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False)).bfloat16(),
        LoraConfig(r=2, target_modules=["0"], use_dora=True), autocast_adapter_dtype=False,
    )  # fmt: skip
    memory = LiveMemory()
    with memory:
        memory.exclude(model.parameters())
        with memory.phase("forward"):
            output = model(torch.ones(1, columns, dtype=torch.bfloat16))
    pair = Adapter(target="0", rows=rows, columns=columns).tensors(2)
    assert memory.peaks["forward"].total_bytes == pytest.approx(dora_bytes(pair)[1], rel=0.1)
    assert memory.live_bytes < 0.1 * dora_bytes(pair)[1], output.shape


def test_dora_on_fused_experts_is_refused_and_on_attention_planned() -> None:
    shape = shape_of("qwen3_moe")
    with pytest.raises(ToolkitError, match="DoRA does not adapt the experts of qwen3_moe"):
        check_dora(shape, ALL_LINEAR)
    check_dora(shape, ("q_proj", "v_proj"))

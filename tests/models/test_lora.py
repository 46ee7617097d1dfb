"""Where LoRA puts adapters. `test_checked_counts.py` compares them with peft's for every architecture."""

import warnings
from typing import Any

import pytest
import torch
from live_bytes import saved_storages
from model_configs import EXPERTS, TINY
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from toolkit.errors import ToolkitError
from toolkit.models.activations import Activations
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.fake_tensors import LiveMemory
from toolkit.models.job_weights import job_weights
from toolkit.models.lora import (
    ALL_LINEAR,
    check_adapted_modules,
    check_lora_targets,
    dora_bytes,
    lora_layer,
)
from toolkit.models.read_model import read_model
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


def test_targets_that_no_layer_has_train_nothing() -> None:
    shape = shape_from_config(ConfigFields(TINY | {"model_type": "llama"}, "config.json"))
    weights = job_weights(shape, 4, lora_target_modules=("qproj",))
    assert (weights.num_trained, weights.largest_trained) == (0, 0)


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 2}


def _kept(tokens: int = 64, **fields: Any) -> tuple[int, int]:
    """Return trained parameters, and bytes that the backward pass of a small Llama keeps, each storage once."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **fields))
    return model.get_nb_trainable_parameters()[0], saved_bytes(model, tokens)


def saved_bytes(model: torch.nn.Module, tokens: int, *, autocast: bool = False) -> int:
    """Return the bytes that a forward pass saves beside parameters, each storage once."""
    rows = torch.arange(tokens).reshape(2, -1)
    with saved_storages(model.parameters()) as kept, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(input_ids=rows, labels=rows)
    return sum(kept.values())


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
    shape = shape_from_config(ConfigFields({"model_type": "llama"} | SIZES, "config.json"))
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
        check_adapted_modules(shape, ALL_LINEAR, method="DoRA")
    check_adapted_modules(shape, ("q_proj", "v_proj"), method="DoRA")


OFT_ARCHITECTURES = ("gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3", "qwen3")


@pytest.mark.parametrize("model_type", OFT_ARCHITECTURES)
@pytest.mark.parametrize("block_size", [8, 12])
def test_oft_trains_the_rotations_that_peft_makes(model_type: str, block_size: int) -> None:
    """12 does not divide the inputs, so peft adjusts it."""
    from peft import OFTConfig, get_peft_model

    fields = TINY | {"model_type": model_type}
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
        wrapped = get_peft_model(model, OFTConfig(r=0, oft_block_size=block_size, target_modules="all-linear"))
    shape = shape_of(model_type)
    weights = job_weights(shape, 1, oft_block_size=block_size)
    assert weights.num_trained == sum(each.numel() for each in wrapped.parameters() if each.requires_grad)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("block_size", [8, 16])
def test_oft_saves_what_is_planned(autocast: bool, block_size: int) -> None:
    """Per layer, in bf16 and under autocast with rotations in fp32, beyond what peft's LoRA saves."""
    from peft import LoraConfig, OFTConfig

    def saved(config: Any) -> tuple[float, float]:
        few, many = (_saved_in_bf16(config, tokens, autocast=autocast) for tokens in (64, 128))
        return (many - few) / 64, few - (many - few)

    shape = shape_of_kept()
    pairs = lora_layer(shape, shape.layers[0], 1)
    lora = saved(LoraConfig(r=1, target_modules="all-linear"))
    oft = saved(OFTConfig(r=0, oft_block_size=block_size, target_modules="all-linear"))
    plain, rotated = (
        Activations(shape=shape, lora_r=1, autocast=autocast, oft_targets=targets, oft_block_size=block_size)
        .saved("none")
        .layers
        for targets in ((), ALL_LINEAR)
    )
    assert len(pairs) == 14
    assert oft[0] - lora[0] == rotated.per_token - plain.per_token
    assert oft[1] - lora[1] == rotated.fixed - plain.fixed


@pytest.mark.parametrize(("name", "why"), [("gpt2", "and not of `Conv1D`"), ("Qwen/Qwen3-30B-A3B", "the experts")])
def test_oft_on_what_peft_does_not_rotate_is_refused(name: str, why: str) -> None:
    with pytest.raises(ToolkitError, match=f"OFT does not adapt .*{why}"):
        check_adapted_modules(read_model(name), ALL_LINEAR, method="OFT")


def _saved_in_bf16(config: Any, tokens: int, *, autocast: bool) -> int:
    from peft import get_peft_model

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    # A gradient at the input, so that the first layer's adapters save as those of the others do.
    model.enable_input_require_grads()
    return saved_bytes(get_peft_model(model, config, autocast_adapter_dtype=autocast), tokens, autocast=autocast)

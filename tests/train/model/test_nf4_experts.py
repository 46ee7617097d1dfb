"""Fused experts in 4 bits: the problem that decoded weights give, no decoded weight kept, adapters that load again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import attested_ranks, losses, nightly_launch
from model_configs import EXPERTS, WIDE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from toolkit.checkpoint.hf_export import verify
from toolkit.job.argument_fields import ModelArguments
from toolkit.models.fake_tensors import LiveMemory
from toolkit.models.job_weights import job_weights
from toolkit.models.nf4_experts import PackedExperts
from toolkit.models.read_model import read_model
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset
from toolkit.train.model.loading import load_model
from toolkit.versions import is_importable

pytestmark = [
    pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
MIXTURES = {  # peft adapts the experts of the first, and none of the second
    "qwen3_moe": WIDE | EXPERTS | {"moe_intermediate_size": 64, "head_dim": 16},
    "qwen2_moe": WIDE | EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}


def saved_mixture(folder: Path, name: str, **fields: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MIXTURES[name] | {"num_hidden_layers": 2} | fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    torch.manual_seed(0)
    arguments = ModelArguments(model_name_or_path=str(folder), lora_r=4, load_in_4bit=True)
    return load_model(arguments, compute_dtype=torch.float32).train()


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(32).reshape(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_loss_and_gradients_are_those_of_the_decoded_experts(name: str, checkpoints: bool, tmp_path: Path) -> None:
    model, decoded = (loaded(saved_mixture(tmp_path, name)) for _ in range(2))
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    count = 0
    for module in list(decoded.modules()):
        for key, packed in list(module.named_children()):
            if isinstance(packed, PackedExperts):
                weight = packed()
                delattr(module, key)
                setattr(module, key.removeprefix("packed_"), torch.nn.Parameter(weight, requires_grad=False))
                count += 1
    for module in decoded.modules():
        module.__dict__.pop("forward", None)
    assert count == 2 * 2
    (loss, gradients), (expected, expected_gradients) = loss_and_gradients(model), loss_and_gradients(decoded)
    assert loss == expected
    assert gradients.keys() == expected_gradients.keys()
    assert any(".mlp.experts." in each for each in gradients) is (name == "qwen3_moe")
    for each, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[each]), each


def test_the_forward_keeps_no_decoded_experts_for_the_backward(tmp_path: Path) -> None:
    fields = {"hidden_size": 256, "moe_intermediate_size": 512, "num_attention_heads": 4}
    model = loaded(saved_mixture(tmp_path, "qwen2_moe", **fields))
    decoded_bytes = 4 * 6 * 3 * 512 * 256  # of one layer: fp32, six experts, three matrices
    ids = torch.arange(32).reshape(2, 16)
    memory = LiveMemory(vocab_size=96)
    with memory, memory.phase("forward"):
        loss = model(input_ids=ids, labels=ids).loss
    assert memory.peaks["forward"].total_bytes > decoded_bytes
    assert memory.live_bytes < decoded_bytes / 4
    loss.backward()


@nightly_launch
@pytest.mark.parametrize("preset", ["zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("name", MIXTURES)
def test_each_rank_holds_its_planned_bytes_with_ddps_losses_and_the_adapter_loads_again(
    name: str, preset: str, start: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    folder = tmp_path_factory.getbasetemp() / name
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        saved_mixture(folder, name, vocab_size=len(tokenizer))
        tokenizer.save_pretrained(folder)
    words = ["--model_name_or_path", str(folder), "--lora_r", "4", "--load_in_4bit", "true"]
    run, baseline, shape = start(preset, *words), start("ddp", *words), read_model(str(folder))
    engine = engine_settings(load_preset(preset), world_size=2, hidden_size=shape.hidden_size, mixed_precision="no")
    planned = model_states(engine, job_weights(shape, 4, True, element_bytes=4))
    assert attested_ranks(run)[0]["parameter_bytes"] == planned.parameter_bytes
    assert losses(run) == pytest.approx(losses(baseline), rel=1e-5)
    result = verify(run)
    assert result.problems == []
    assert result.max_difference < 1e-4

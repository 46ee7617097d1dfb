"""LoRA adapters, compared with those that peft creates."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_configs import ARCHITECTURES, built, config_file

from toolkit.models.lora import lora_layers
from toolkit.models.read_model import read_model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)  # peft's own, for fused experts
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_adapters_are_those_that_peft_makes(model_type: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    fields = next(fields for kind, fields in ARCHITECTURES if kind == model_type)
    path = config_file(tmp_path, model_type, fields)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=model_type == "gpt2")
    model = get_peft_model(built(path), config)
    real = sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad)
    planned = sorted(tensor.shape for layer in lora_layers(read_model(str(path)), 4) for tensor in layer)
    assert planned == real

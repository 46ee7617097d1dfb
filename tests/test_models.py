"""Shapes from configurations: held against transformers on the meta device, name by name and size by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.models.architectures import known_types
from toolkit.models.read import read_model
from toolkit.models.shape import ModelShape

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", TINY),
    ("llama", TINY | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("granite", TINY),
    ("smollm3", TINY),
    ("mistral", TINY),
    ("qwen2", TINY),
    ("qwen2", TINY | {"tie_word_embeddings": True}),
    ("qwen3", TINY),
    ("gemma", TINY),
    ("gemma2", TINY),
    ("gemma3_text", TINY),
    ("gemma3_text", TINY | {"tie_word_embeddings": False}),
    ("mixtral", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "qwen2_moe",
        TINY
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 24,
        },
    ),
    (
        "qwen3_moe",
        TINY | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]},
    ),
    (
        "qwen3_moe",
        TINY | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 2},
    ),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 80, "tie_word_embeddings": False}),
    ("phi3", TINY),
    ("phi", TINY),
    ("olmo", TINY),
    ("olmo2", TINY),
    ("opt", TINY | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    ("gpt_neox", TINY),
    ("stablelm", TINY),
]


def config_file(folder: Path, model_type: str, fields: dict[str, Any]) -> Path:
    """What transformers itself would save."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **fields).save_pretrained(folder)
    return folder / "config.json"


def built(path: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent))


def in_layer(shape: ModelShape, index: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(tensor.name, tensor.shape) for tensor in shape.layers[index]]


def test_every_known_architecture_is_held_against_transformers() -> None:
    assert {model_type for model_type, _ in SHAPES} == set(known_types())


@pytest.mark.parametrize(("model_type", "fields"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_tensors_are_those_that_transformers_makes(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = config_file(tmp_path, model_type, fields)
    model, shape = built(path), read_model(str(path))
    classes = set(model._no_split_modules)
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    assert shape.counted_on == "arithmetic"
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert len(shape.layers) == len(layers) == shape.num_layers
    for index, layer in enumerate(layers):
        assert in_layer(shape, index) == [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outer = [(name, tuple(p.shape)) for name, p in model.named_parameters() if id(p) not in inside]
    assert sorted((tensor.name, tensor.shape) for tensor in shape.outer) == sorted(outer)
    assert shape.attention == model.config._attn_implementation
    words = ("hidden_act", "hidden_activation", "activation_function")
    assert shape.activation in [getattr(model.config, word, None) for word in words]


@pytest.mark.parametrize(("model_type", "fields"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_weight_decay_is_where_the_trainer_puts_it(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Trainer

    path = config_file(tmp_path, model_type, fields)
    model, shape = built(path), read_model(str(path))
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    expected = sum(p.numel() for name, p in model.named_parameters() if name in decayed)
    tensors = [tensor for layer in shape.layers for tensor in layer] + list(shape.outer)
    assert sum(tensor.num_elements for tensor in tensors if tensor.decays) == expected

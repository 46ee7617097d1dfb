"""Shapes from configurations, compared with transformers on the meta device, tensor by tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_configs import ARCHITECTURES, EXPERTS, TINY, built, config_file, counted_tensors

from toolkit.errors import ToolkitError
from toolkit.models.read_model import read_model, types_with_formulas
from toolkit.models.shape import Layer, ModelShape


def in_layer(shape: ModelShape, index: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(tensor.name, tensor.shape) for tensor in shape.layers[index]]


def test_every_known_architecture_is_held_against_transformers() -> None:
    assert {model_type for model_type, _ in ARCHITECTURES} == set(types_with_formulas())


@pytest.mark.parametrize(
    ("model_type", "fields"), ARCHITECTURES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_tensors_and_their_weight_decay_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import Trainer

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
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    tensors = [tensor for layer in shape.layers for tensor in layer] + list(shape.outer)
    assert sum(tensor.num_elements for tensor in tensors if tensor.has_weight_decay) == sum(
        p.numel() for name, p in model.named_parameters() if name in decayed
    )
    words = ("hidden_act", "hidden_activation", "activation_function")
    assert shape.activation in [getattr(model.config, word, None) for word in words]


def test_counting_on_the_meta_device_agrees_with_arithmetic(tmp_path: Path) -> None:
    path = config_file(tmp_path, "qwen3_moe", TINY | EXPERTS | {"mlp_only_layers": [1]})
    counted, arithmetic = counted_tensors(built(path)), read_model(str(path))

    def described(tensors: Layer) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(tensor.name, tensor.shape, tensor.is_linear_weight) for tensor in tensors]

    assert list(map(described, counted.layers)) == list(map(described, arithmetic.layers))
    sizes = [{tensor.name: tensor.shape for tensor in shape.outer} for shape in (counted, arithmetic)]
    assert sizes[0] == sizes[1]
    for name in ("hidden_size", "intermediate_size", "num_experts", "experts_per_token", "head_dim", "gated_mlp"):
        assert getattr(counted, name) == getattr(arithmetic, name), name


def test_a_token_passes_through_its_own_experts_only(tmp_path: Path) -> None:
    shape = read_model(str(config_file(tmp_path, "mixtral", TINY | {"num_local_experts": 4, "num_experts_per_tok": 1})))
    experts = 3 * 4 * 3 * 32 * 48  # layers, experts, matrices
    assert shape.num_params - shape.num_active_params == experts * 3 // 4


def test_embeddings_are_counted_once_when_tied(tmp_path: Path) -> None:
    tied = read_model(str(config_file(tmp_path / "a", "llama", TINY | {"tie_word_embeddings": True})))
    untied = read_model(str(config_file(tmp_path / "b", "llama", TINY)))
    assert untied.num_params - tied.num_params == 96 * 32 == tied.num_embedding_params == untied.num_embedding_params


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": None}, "has no `hidden_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of 1 or more"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"hidden_size": 10**15}, "hidden_size is 1000000000000000, expected"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected an integer from 0 to 2,000"),
        ({"intermediate_size": "big"}, "intermediate_size is 'big'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of 4 heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 32 is not a multiple of 5"),
        ({"model_type": "lama"}, "did you mean `llama`?"),
        ({"model_type": None}, "has no `model_type`"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"model_type": "phi", "resid_pdrop": 2}, "resid_pdrop is 2, expected a number from 0 to 1"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_field(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | TINY | fields))
    with pytest.raises(ToolkitError, match=re.escape(said)):
        read_model(str(tmp_path))


def test_transformers_builds_no_language_model_from_another_model(tmp_path: Path) -> None:
    """`test_remote_code_is_neither_run_nor_asked_for` shows how `read_model` reports what transformers raises."""
    path = config_file(tmp_path, "vit", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4})
    with pytest.raises(ValueError, match=r"Unrecognized configuration class .*ViTConfig"):
        built(path)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no/such/folder", "no such file or folder"),
        ("./nothing", "no such file or folder"),
        ("someone/model", "the hub cannot be reached"),
        ("some one/model", "is neither a folder nor a hub id"),
    ],
)
def test_a_model_that_is_not_there_names_the_folder_way(model: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.models.read_model._is_reachable", lambda _: False)
    with pytest.raises(ToolkitError, match=said):
        read_model(model)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, said in (("{", "line 1: not JSON"), ("[]", "holds list, expected keys and values")):
        path.write_text(text)
        with pytest.raises(ToolkitError, match=said):
            read_model(str(path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ToolkitError, match=r"has no config\.json"):
        read_model(str(tmp_path / "empty"))

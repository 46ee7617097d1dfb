"""A model's config.json that is wrong or meant to harm: two lines, nothing of it runs, and no shape of nonsense."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.models import counted_shape
from toolkit.models.read_model import read_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 10,
}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10, "n_positions": 8}
MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
MOE |= {"num_key_value_heads": 1, "head_dim": 4}
GEMMA = LLAMA | {"model_type": "gemma2", "num_key_value_heads": 1}
COUNTED = LLAMA | {"model_type": "cohere"}

# base, field, value, part of the message
WRONG = [
    (LLAMA, "hidden_size", 10**15, "hidden_size is 1000000000000000, expected an integer from 0 to"),
    (LLAMA, "num_hidden_layers", 10**9, "expected an integer from 0 to 2,000"),
    (GPT2, "n_layer", 10**9, "n_layer is 1000000000, expected an integer from 0 to 2,000"),
    (LLAMA, "vocab_size", [[[1]]], "vocab_size is [[1]], expected an integer from 0 to"),
    (LLAMA, "hidden_size", 2**64, "an integer of 65 bits"),
    (LLAMA, "hidden_act", ["silu"], "hidden_act is ['silu'], expected text"),
    (LLAMA, "model_type", 5, "model_type is 5, expected a name"),
    (LLAMA, "model_type", "x" * 5000, "unknown model_type 'xxx"),
    (LLAMA, "tie_word_embeddings", "no", "expected true or false"),
    (MOE, "mlp_only_layers", 5, "mlp_only_layers is 5, expected a list of whole numbers"),
    (GEMMA, "layer_types", {"a": 1}, "expected a list of names"),
    (COUNTED, "num_hidden_layers", 10**9, "expected an integer from 0 to 2,000"),
    (COUNTED, "text_config", [1], "text_config is [1], expected keys and values"),
]


def config(folder: Path, values: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(("base", "field", "value", "words"), WRONG, ids=lambda value: str(value)[:20])
def test_a_field_that_no_model_has_is_refused_by_file_and_name(
    base: dict[str, Any], field: str, value: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError) as refused:
        read_model(config(tmp_path, base | {field: value}))
    assert words in refused.value.message
    assert str(tmp_path / "config.json") in refused.value.message
    assert len(refused.value.message) < len(str(tmp_path)) + 300


@pytest.mark.parametrize("kind", ["pipe", "deep", "list", "large"])
def test_a_config_that_is_no_file_of_fields_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b" " * (17 * 2**20))
    else:
        path.write_text("[" * 100_000 if kind == "deep" else "[]")
    with pytest.raises(ToolkitError) as refused:
        read_model(str(tmp_path))
    assert str(path) in refused.value.message


def test_an_infinity_in_a_field_that_is_not_a_size_is_read(tmp_path: Path) -> None:
    assert read_model(config(tmp_path, LLAMA | {"time_step_limit": [0.0, float("inf")]})).num_layers == 2


GARBAGE: list[Any] = [5, [], {"hidden_size": 5}, {"layers_of_kind": [[["w", "a", 1]]]}, "x"]


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_an_answer_of_the_child_that_is_no_shape_is_an_error(garbage: Any) -> None:
    with pytest.raises(ToolkitError, match="counted tensors are damaged"):
        counted_shape.shape_from_counted(garbage)


@pytest.mark.launch
@pytest.mark.cold_start
def test_remote_code_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")
    named = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    values = {"model_type": "vit", "hidden_size": 8, "architectures": 5, "auto_map": named}
    with pytest.raises(ToolkitError, match="transformers cannot build a language model from it"):
        read_model(config(tmp_path, values))
    assert not ran.exists()
